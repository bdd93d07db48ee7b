"""`python -I -m agent_box.registry.notices`: takes the supervisor's notices into the journal.

supervisord runs it when there are some and the registry runs. It speaks as the role
`supervisor`, which may call `registry.note` and nothing else, and of which the registry takes
one kind of event. It ends when all are told, or when the registry does not answer: what is left
is told by the next one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from agent_box.bus import keys
from agent_box.bus.client import Client
from agent_box.bus.errors import Code, Refusal
from agent_box.process import notices
from agent_box.process.paths import SUPERVISOR, Paths
from agent_box.registry.contract import CONTRACT, SERVICE_FATAL, Note

ANSWER_S: Final = 20.0


def tell(paths: Paths) -> int:
    """Tells what there is. Returns how many are on record now.

    Raises:
        Refusal: the registry does not answer, or cannot write now.
        KeysError: there are no keys.
    """
    found = notices.read(paths.notices)
    if not found:
        return 0
    with Client(
        SUPERVISOR,
        CONTRACT.service,
        sock=paths.sock(CONTRACT.service),
        secret=keys.load_secret(paths.keys(SUPERVISOR)),
        server_key=keys.load_public(paths.public_keys, CONTRACT.service),
        contract=CONTRACT,
    ) as registry:
        for notice in found:
            note = Note(
                event_id=notice.event_id,
                instance=None,
                source="host-observed",
                kind=SERVICE_FATAL,
                facts={
                    "service": notice.service,
                    "reason": notice.reason,
                    "at_ms": notice.at_ms,
                },
            )
            try:
                registry.call("note", note, deadline_s=ANSWER_S)
            except Refusal as refusal:
                if refusal.code is not Code.BAD_REQUEST:
                    raise
                # It will never be taken. It stands in this program's log, and others follow.
                print(f"refused: {notice.service}: {notice.reason}: {refusal.message}")
            notices.done(paths.notices, notice)
    return len(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtime", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    options = parser.parse_args()
    try:
        tell(Paths(options.runtime, options.state))
    except (Refusal, keys.KeysError) as error:
        print(f"not told yet: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
