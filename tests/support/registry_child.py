"""A process that writes into a registry's database until it is killed, and says what it wrote.

python -m support.registry_child PATH START
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import msgspec
from support.registries import CONFIG, create

from agent_box.registry import journal, record
from agent_box.registry.database import Database
from agent_box.registry.journal import New


def main(path: Path, start: int) -> None:
    database = Database(path)
    profile = CONFIG.profiles["rust"]
    policy = CONFIG.policies[profile.policy]
    kept = record.draft(create(), profile, policy, id="1" * 32, now_ms=1)
    for number in count(start):
        kept = msgspec.structs.replace(kept, boots=number)
        event = New(
            kind="booted",
            by="registry",
            source="host-observed",
            instance=kept.id,
            name=kept.name,
            facts={"n": number, "record": journal.record_hash(record.pack(kept))},
        )
        database.commit(put=kept, events=[event], time_ms=number)
        print(number, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
