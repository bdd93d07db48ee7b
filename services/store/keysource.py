"""`python -I -m agent_box.store.keysource --keys DIR -- COMMAND...`: before every start.

Runs outside the wall, as the supervisor's child. When custody says that the OS keyring or
systemd-creds has the key, it fetches it and leaves it in a pipe (`handing`); in every case
it then becomes COMMAND, the confined store. So the key is fetched anew at each start, and
nobody holds it in between. It never fails: a key that cannot be had is a reason in the pipe,
and the store comes up locked and tells it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from agent_box.store.custody import HANDED
from agent_box.store.files import FileRefused, KeyDirectory
from agent_box.store.handing import Handed, pipe_with


def main(words: list[str]) -> NoReturn:
    """Becomes the command in `words`.

    Raises:
        SystemExit: 1, `words` are not what the supervisor was told.
    """
    if len(words) < 4 or words[0] != "--keys" or words[2] != "--":
        sys.exit("keysource: --keys DIR -- COMMAND... is what it takes")
    _hand(KeyDirectory(Path(words[1])))
    command = words[3:]
    os.execv(command[0], command)


def _hand(keys: KeyDirectory) -> None:
    try:
        custody = keys.custody()
    except FileRefused:
        return  # the store finds the same and tells it
    if custody is None or custody.protection not in HANDED:
        return
    from agent_box.store import keepers  # most stores have no keeper: 15 ms at each start

    try:
        handed = Handed(keepers.fetch(custody), None)
    except keepers.KeeperError as error:
        handed = Handed(None, str(error))
    pipe_with(handed)


if __name__ == "__main__":
    main(sys.argv[1:])
