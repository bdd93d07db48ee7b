"""The detach keys in what a person types. No terminal and no clock here.

A key is found however the terminal writes it: as its byte; as `CSI 112;5u` (the kitty keyboard
protocol, https://sw.kovidgoyal.net/kitty/keyboard-protocol/) or `CSI 27;5;112~` (xterm,
modifyOtherKeys), with Caps Lock and Num Lock or without, with events of keys going up or
without; and wherever a read cut it. Within a bracketed paste nothing is a key.

The beginning of the sequence is held back for `HOLD_S`, so that of keys that come together the
guest sees none; then it is passed on, because it may be meant for the guest. For `ARMED_S` the
rest still counts: a person is slower than a program.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

HOLD_S: Final = 0.05
ARMED_S: Final = 3.0
TOKEN_MAX: Final = 64  # bytes of one escape sequence that may name a key

_ESC: Final = 0x1B
_PASTE: Final = b"\x1b[200~"
_PASTED: Final = b"\x1b[201~"
_CSI: Final = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
_OPEN: Final = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*)?\Z")  # may go on to be one
_KITTY: Final = re.compile(
    rb"\x1b\[([0-9]{1,8})(?::[0-9:]*)?(?:;([0-9]{0,5})(?::([0-9]))?)?(?:;[0-9:]*)?u\Z"
)
_XTERM: Final = re.compile(rb"\x1b\[27;([0-9]{1,5});([0-9]{1,8})~\Z")
_SHIFT, _CTRL, _LOCKS = 1, 4, 64 | 128  # bits of the modifiers, less one
_OTHER: Final = 1 << 30  # a key that no sequence has
_UP: Final = b"3"  # the event type of a key that is let go
# Keys of the kitty protocol that are modifiers themselves: pressed on the way to the key.
_MODIFIERS: Final = frozenset((57358, 57360, *range(57441, 57455)))


class Detach:
    """Finds one sequence of keys.

    Args:
        keys: each as the byte that it sends; at least one.
    """

    def __init__(self, keys: Sequence[int]) -> None:
        if not keys:
            raise ValueError("a detach sequence has at least one key")
        self._keys = tuple(keys)
        self._rest = b""  # the beginning of an escape sequence
        self._matched: list[tuple[int, bytes]] = []  # keys that match, and how they came
        self._held = 0  # of those, the last so many are not passed on yet
        self._pasting = False
        self._pasted = b""  # the last bytes of the paste: its end may be cut by a read

    @property
    def holds(self) -> bool:
        """Whether something waits that `pass_on` should pass on after `HOLD_S`."""
        return bool(self._held or self._rest)

    @property
    def armed(self) -> bool:
        """Whether the beginning of the sequence was typed; `disarm` after `ARMED_S`."""
        return bool(self._matched)

    def feed(self, typed: bytes) -> tuple[bytes, bool]:
        """What goes to the guest, and whether the sequence is complete. What follows it is
        dropped: it was typed at a terminal that shows something else by then."""
        out = bytearray()
        data, self._rest = self._rest + typed, b""
        at = 0
        while at < len(data):
            if self._pasting:
                at = self._paste(data, at, out)
                continue
            token, at = self._token(data, at)
            if token is None:
                break
            if token == _PASTE:
                self._pasting, self._pasted = True, b""
            if self._take(token, out):
                return bytes(out), True
        return bytes(out), False

    def pass_on(self) -> tuple[bytes, bool]:
        """The time to hold back is over. As `feed`; the sequence may be complete when its last
        key is Escape itself."""
        out = bytearray()
        rest, self._rest = self._rest, b""
        for byte in rest:
            if self._take(bytes((byte,)), out):
                return bytes(out), True
        out += self._let_go()
        return bytes(out), False

    def disarm(self) -> None:
        """The sequence has to begin anew."""
        if not self.holds:
            self._matched.clear()

    def _paste(self, data: bytes, at: int, out: bytearray) -> int:
        """Passes on what is pasted, and gives where the paste ends: nothing is held back."""
        before = len(self._pasted)
        window = self._pasted + data[at:]
        found = window.find(_PASTED)
        if found < 0:
            out += data[at:]
            self._pasted = window[1 - len(_PASTED) :]
            return len(data)
        end = at + found + len(_PASTED) - before
        out += data[at:end]
        self._pasting = False
        return end

    def _token(self, data: bytes, at: int) -> tuple[bytes | None, int]:
        """One key, and where the next begins; None when it goes on in the next read."""
        if data[at] != _ESC:
            return data[at : at + 1], at + 1
        whole = _CSI.match(data, at)
        if whole is not None:
            return whole[0], whole.end()
        if len(data) - at <= TOKEN_MAX and _OPEN.match(data, at):
            self._rest = data[at:]
            return None, len(data)
        return data[at : at + 1], at + 1

    def _take(self, token: bytes, out: bytearray) -> bool:
        key = _key(token)
        if key is None:  # comes with keys and is none
            if self._held:
                self._matched.append((-1, token))
                self._held += 1
            else:
                out += token
            return False
        self._matched.append((key, token))
        self._held += 1
        while not self._fits():
            out += self._shorten()
        if sum(key >= 0 for key, _ in self._matched) == len(self._keys):
            self._matched.clear()
            self._held = 0
            return True
        return False

    def _fits(self) -> bool:
        typed = [key for key, _ in self._matched if key >= 0]
        return tuple(typed) == self._keys[: len(typed)]

    def _shorten(self) -> bytes:
        """Gives the first key up; what the guest has not seen of it yet, it sees now."""
        out = b""
        while self._matched:
            unseen = self._held == len(self._matched)
            key, token = self._matched.pop(0)
            if unseen:
                self._held -= 1
                out += token
            if key >= 0:
                break
        while self._matched and self._matched[0][0] < 0:
            unseen = self._held == len(self._matched)
            _, token = self._matched.pop(0)
            if unseen:
                self._held -= 1
                out += token
        return out

    def _let_go(self) -> bytes:
        held = self._matched[len(self._matched) - self._held :]
        self._held = 0
        return b"".join(token for _, token in held)


def _key(token: bytes) -> int | None:
    """The byte that the key sends where nothing else is asked for; `_OTHER` for a key that
    has none, None for what is no press of a key."""
    if len(token) == 1:
        return token[0]
    kitty = _KITTY.match(token)
    if kitty is not None:
        code = int(kitty[1])
        if kitty[3] == _UP or code in _MODIFIERS:
            return None
        return _byte(code, int(kitty[2] or b"1"))
    xterm = _XTERM.match(token)
    if xterm is not None:
        return _byte(int(xterm[2]), int(xterm[1]))
    return _OTHER


def _byte(code: int, modifiers: int) -> int:
    held = (modifiers - 1) & ~_LOCKS
    if held == 0 and 0x20 < code < 0x7F:
        return code
    if held in (0, _SHIFT) and code < 0x20:
        return code  # Tab, Enter and Escape, which have bytes of their own
    if held in (_CTRL, _CTRL | _SHIFT):
        if code in (0x20, 0x32):  # ctrl-space and ctrl-2 are ctrl-@
            return 0
        if 0x40 <= code < 0x7F:
            return code & 0x1F
    return _OTHER
