"""What of a guest's output reaches the person's terminal: a filter, and a memory of modes.

A terminal is a program that obeys whoever writes to it, and it answers on our keyboard. A
guest is hostile, so of its escape sequences only those pass that are listed here, whole and
well formed; a terminal that would read one differently than we do never gets to see it. The
rest is dropped, and what is malformed loses its escape and is printed as the text it is.

The policy (docs/attach.md says it for operators):
- text, colours, cursor, modes, hyperlinks and titles pass;
- the clipboard (OSC 52) is neither written nor read; files, notifications, fonts, keyboards
  and printers (OSC 9, 50, 777, 1337, DECUDK, MC, Kitty's APC) are not reached; a sequence that
  would be handed on unread (the pass-through of tmux and screen) is not, either;
- questions about the terminal pass where the answer is its kind, its size, its colours or the
  place of its cursor; not where the answer is text that the guest has chosen or that stands
  on the screen (title, answerback, XTGETTCAP, checksums of the screen, window placement).

`reset` undoes the modes that are on, so that a program which ends or is left behind does not
leave its mouse reports to the shell.

Bytes are UTF-8; what is none is shown as U+FFFD, as terminals do. C1 controls are dropped: in
UTF-8 nobody needs them, and not all terminals agree about them.

Sources: ECMA-48 (5th edition) 5.4 and 8.3; XTerm Control Sequences (invisible-island.net).
"""

from __future__ import annotations

import codecs
import re
from typing import Final

CSI_MAX: Final = 256  # characters of a control sequence
STRING_MAX: Final = 4_096  # of a control string that passes

_STOP: Final = re.compile("[\x05\x1b\x80-\x9f]")  # ENQ asks for the answerback
_CSI: Final = re.compile(r"\x1b\[([<-?]?)([0-9:;]*)([ -/]*)([@-~])", re.ASCII)
_CSI_OPEN: Final = re.compile(r"\x1b\[[<-?]?[0-9:;]*[ -/]*\Z", re.ASCII)
# Cursor saved and restored, keypad, lines, tab stops, reset; character sets by one letter;
# double lines.
_ESCAPE: Final = re.compile(r"\x1b(?:[78=>DEHMc]|[()*+][0-9A-Za-z<=>]|#[3-68])", re.ASCII)
_ESCAPE_OPEN: Final = re.compile(r"\x1b[()*+#]?\Z", re.ASCII)
_STRING: Final = re.compile(r"\x1b[\]PX^_k]", re.ASCII)  # OSC DCS SOS PM APC, and screen's title
_END: Final = re.compile("[\x00-\x1f\x7f-\x9f]")  # of a string: it holds no control

_TITLES: Final = frozenset(("0", "1", "2"))
_OSC: Final = frozenset(
    (*_TITLES, "4", "8", "10", "11", "12", "13", "14", "17", "19", "133")
    + ("104", "110", "111", "112", "113", "114", "117", "119")
)
_COLOURS: Final = {"4": "104", **{str(n): str(n + 100) for n in (10, 11, 12, 13, 14, 17, 19)}}
_SIZES: Final = frozenset(("14", "16", "18", "22", "23"))  # CSI t: sizes, and the stack of titles
# By private prefix and intermediates: the final bytes that pass.
_FINALS: Final = {
    ("", ""): frozenset("@ABCDEFGHIJKLMPSTXZ`abcdefghlmnrsux"),
    ("?", ""): frozenset("JKhlnu"),
    (">", ""): frozenset("cmnqu"),
    ("=", ""): frozenset("cu"),
    ("<", ""): frozenset("u"),
    ("", "!"): frozenset("p"),
    ("", " "): frozenset("@Aq"),
    ("", "$"): frozenset("p"),
    ("?", "$"): frozenset("p"),
    ("", '"'): frozenset("q"),
}
_ASKS: Final = frozenset(
    (("", "c"), (">", "c"), ("=", "c"), ("", "n"), ("?", "n"), (">", "q"), ("", "x"))
)
# Private modes that do not outlive what set them. Value: what is usual, and returned to.
_MODES: Final = {
    "1": False,  # cursor keys send SS3
    "5": False,  # reverse video
    "6": False,  # origin
    "7": True,  # wrap
    "9": False,  # mouse, as X10
    "25": True,  # cursor shown
    "45": False,  # reverse wrap
    "66": False,  # keypad
    "1000": False,  # mouse, and five more of it
    "1001": False,
    "1002": False,
    "1003": False,
    "1004": False,  # focus
    "1005": False,
    "1006": False,
    "1007": False,
    "1015": False,
    "1016": False,
    "2004": False,  # bracketed paste
    "2026": False,  # synchronised output
    "2031": False,  # reports of the colour scheme
    "2048": False,  # reports of the size
    "9001": False,  # keys as Windows has them
}
_SCREENS: Final = frozenset(("47", "1047", "1049"))
# Modes that may be set: those above, and a few that need no undoing.
_SETTABLE: Final = frozenset((*_MODES, *_SCREENS, "3", "4", "12", "69", "1048", "2027"))
_PLAIN_SETTABLE: Final = frozenset(("4", "20"))  # insert, new line


class Screen:
    """One terminal's filter.

    Attributes:
        asked: questions that have passed; their answers come as if they were typed.
        quiet: questions are dropped: what comes was put out before, when they were answered.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.asked = 0
        self.quiet = quiet
        self._forget()

    def _forget(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""  # the beginning of a sequence
        self._dropping = ""  # what ends the string that is being dropped: "osc" or "st"
        self._modes: dict[str, bool] = {}  # private ones that are not as usual
        self._plain: set[str] = set()
        self._alternate = ""  # the mode by which the other screen is shown
        self._kitty = 0  # how often the keyboard's flags were pushed
        self._touched: set[str] = set()  # keypad, keys, margins, cursor, charset, colours by code

    def feed(self, untrusted: bytes) -> bytes:
        """What may be shown of it, in order. The beginning of a sequence waits for its end."""
        text = self._decoder.decode(untrusted)
        if not self._rest and not self._dropping and _STOP.search(text) is None:
            self._shift(text)
            return text.encode()
        out: list[str] = []
        text, self._rest = self._rest + text, ""
        at = 0
        while at < len(text):
            if self._dropping:
                at = self._drop(text, at)
                continue
            stop = _STOP.search(text, at)
            end = len(text) if stop is None else stop.start()
            if end > at:
                self._shift(text[at:end])
                out.append(text[at:end])
            if stop is None:
                break
            at = self._escape(text, end, out) if text[end] == "\x1b" else end + 1
        return "".join(out).encode()

    def reset(self) -> bytes:
        """Brings the terminal back to what a shell expects, and forgets what was half read."""
        out = []
        for mode, is_on in self._modes.items():
            out.append(f"\x1b[?{mode}{'l' if is_on else 'h'}")
        for mode in sorted(self._plain):
            out.append(f"\x1b[{mode}l")
        if self._kitty:
            out.append(f"\x1b[<{self._kitty}u")
        if "kitty" in self._touched:
            out.append("\x1b[=0u")
        if "keys" in self._touched:
            out.append("\x1b[>4m")
        if "keypad" in self._touched:
            out.append("\x1b>")
        if "charset" in self._touched:
            out.append("\x0f\x1b(B")
        if "margins" in self._touched:  # which moves the cursor
            out.append("\x1b7\x1b[r\x1b8")
        if "style" in self._touched or self._alternate:
            out.append("\x1b[m")
        if self._alternate:
            out.append(f"\x1b[?{self._alternate}l\x1b[m")
        if "cursor" in self._touched:
            out.append("\x1b[0 q")
        for code, undo in _COLOURS.items():
            if code in self._touched:
                out.append(f"\x1b]{undo}\x1b\\")
        self._forget()
        return "".join(out).encode()

    # ------------------------------------------------------------------ sequences

    def _shift(self, text: str) -> None:
        if "\x0e" in text:  # SO: letters become lines
            self._touched.add("charset")

    def _escape(self, text: str, at: int, out: list[str]) -> int:
        """Looks at the sequence that begins here; gives where to go on."""
        csi = _CSI.match(text, at)
        if csi is not None and csi.end() - at <= CSI_MAX:
            if self._csi(*csi.groups()):
                out.append(csi[0])
            return csi.end()
        escape = _ESCAPE.match(text, at)
        if escape is not None:
            self._note_escape(escape[0])
            out.append(escape[0])
            return escape.end()
        if _STRING.match(text, at) is not None:
            return self._string(text, at, out)
        if _ESCAPE_OPEN.match(text, at) or (
            len(text) - at <= CSI_MAX and _CSI_OPEN.match(text, at)
        ):
            self._rest = text[at:]
            return len(text)
        if text.startswith("\x1b\\", at):  # the end of no string
            return at + 2
        return at + 1

    def _string(self, text: str, at: int, out: list[str]) -> int:
        """A control string: kept until it ends, when it may pass; else dropped as it comes."""
        kind = text[at + 1]
        end = _END.search(text, at + 2)
        body = text[at + 2 : len(text) if end is None else end.start()]
        if not self._may_pass(kind, body, whole=end is not None) or len(body) > STRING_MAX:
            self._dropping = "osc" if kind == "]" else "st"
            return at + 2
        if end is None or end[0] == "\x1b" and end.end() == len(text):
            self._rest = text[at:]
            return len(text)
        if end[0] == "\x1b" and text[end.end()] == "\\":
            after = end.end() + 1
        elif end[0] == "\x07" and kind == "]":
            after = end.end()
        else:  # cut off by something else
            return end.start() + (end[0] in "\x18\x1a\x9c")
        if self._note_string(kind, body):
            out.append(text[at:after])
        return after

    def _drop(self, text: str, at: int) -> int:
        """Drops a string up to its end; another escape sequence ends it as well."""
        for index in (found.start() for found in _END.finditer(text, at)):
            char = text[index]
            if char == "\x1b":
                self._dropping = ""
                if text.startswith("\\", index + 1):
                    return index + 2
                return index
            if char in "\x18\x1a\x9c" or (char == "\x07" and self._dropping == "osc"):
                self._dropping = ""
                return index + 1
        return len(text)

    # --------------------------------------------------------------------- policy

    def _csi(self, private: str, numbers: str, between: str, final: str) -> bool:
        """Whether a control sequence may pass; remembers what it does."""
        if (private, between, final) == ("", "", "t"):
            return numbers.split(";")[0] in _SIZES and self._question()
        if final not in _FINALS.get((private, between), ()):
            return False
        if final in "hl" and not between:
            return self._set_modes(private, numbers.split(";"), is_on=final == "h")
        asks = (private, between, final) == ("?", "", "u") or between == "$"
        if (asks or ((private, final) in _ASKS and not between)) and not self._question():
            return False
        if final == "u" and private:
            self._note_kitty(private, numbers)
        elif (private, final) == (">", "m"):
            self._touched.add("keys")
        elif (private, final) == ("", "m"):
            (self._touched.discard if numbers in ("", "0") else self._touched.add)("style")
        elif final == "r" and not private:
            self._touched.add("margins")
        elif between == " " and final == "q":
            self._touched.add("cursor")
        elif between == "!":  # the terminal has reset itself
            self._modes.clear()
            self._plain.clear()
        return True

    def _set_modes(self, private: str, numbers: list[str], *, is_on: bool) -> bool:
        if private == "":
            if not _PLAIN_SETTABLE.issuperset(numbers):
                return False
            (self._plain.update if is_on else self._plain.difference_update)(numbers)
            return True
        if not _SETTABLE.issuperset(numbers):
            return False
        for number in numbers:
            if number in _SCREENS:
                self._alternate = number if is_on else ""
            elif number in _MODES:
                if _MODES[number] is is_on:
                    self._modes.pop(number, None)
                else:
                    self._modes[number] = is_on
        return True

    def _note_kitty(self, private: str, numbers: str) -> None:
        count = int(numbers) if numbers.isdecimal() and len(numbers) < 4 else 1
        if private == ">":
            self._kitty = min(self._kitty + 1, 64)
        elif private == "<":
            self._kitty = max(0, self._kitty - count)
        elif private == "=":
            self._touched.add("kitty")

    def _note_escape(self, sequence: str) -> None:
        what = sequence[1]
        if what in "=>":
            (self._touched.add if what == "=" else self._touched.discard)("keypad")
        elif what in "()*+":
            self._touched.add("charset")
        elif what == "c":
            self._modes.clear()
            self._plain.clear()
            self._touched -= {"keypad", "charset", "margins", "keys"}
            self._alternate, self._kitty = "", 0

    def _may_pass(self, kind: str, body: str, *, whole: bool) -> bool:
        """Whether a string may still be one that passes. Raises nothing, whatever it holds."""
        if kind == "k":
            return True
        if kind == "P":  # DECRQSS: the answer is a setting
            return len(body) <= 4 and "$q"[: len(body)] == body[:2]
        if kind != "]":
            return False
        code, separator, rest = body.partition(";")
        if not separator and not whole:
            return len(code) <= 3 and (not code or code.isdecimal())
        if code not in _OSC:
            return False
        return code not in ("8", "133") or rest.isprintable()

    def _note_string(self, kind: str, body: str) -> bool:
        """Whether a string that may pass is not held back as a question."""
        code, _, rest = body.partition(";")
        if (kind == "P" or (code in _COLOURS and "?" in rest)) and not self._question():
            return False
        if kind == "]" and code in _COLOURS:
            self._touched.add(code)
        return True

    def _question(self) -> bool:
        """Whether a question may pass."""
        self.asked += not self.quiet
        return not self.quiet
