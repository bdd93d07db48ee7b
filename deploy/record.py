"""Records a command as it runs in a terminal of 120 columns, as an asciinema cast (version 2).

    python3 deploy/record.py FILE TITLE COMMAND...

The times are those of the run; nothing is cut or put in, but a player is asked to wait for
nothing longer than a few seconds. The exit status is the command's.
"""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import pty
import struct
import sys
import termios
import time
from typing import Final

SIZE: Final = (32, 120)  # rows and columns
WAIT_S: Final = 3  # at most between two lines, when it is played


def main(file: str, title: str, *command: str) -> int:
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", *SIZE, 0, 0))
        os.execvp(command[0], command)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    begun = time.monotonic()
    with open(file, "w", encoding="utf-8") as cast:
        head = {
            "version": 2, "width": SIZE[1], "height": SIZE[0], "title": title,
            "idle_time_limit": WAIT_S,
        }  # fmt: skip
        cast.write(json.dumps(head) + "\n")
        while True:
            try:
                data = os.read(terminal, 1 << 16)
            except OSError:  # EIO: the last who had the terminal is gone
                break
            if not data:
                break
            os.write(1, data)
            said = [round(time.monotonic() - begun, 3), "o", decoder.decode(data)]
            cast.write(json.dumps(said, ensure_ascii=False) + "\n")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
