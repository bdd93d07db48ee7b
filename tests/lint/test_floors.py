"""The rooms of the house and who may know of whom: imports go downward, and in no circle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.source import Module, module_name, ours

# What a room may import of other rooms, besides contracts (ground floor wherever they lie).
# A service knows another service by its contract alone.
FLOORS: dict[str, set[str]] = {
    "cli": {"bus", "process", "config"},
    "registry": {"bus", "process", "config"},
    "netstack": {"bus", "process", "config"},
    "channel": {
        "bus",
        "process",
        "config",
        "guest.wire",
        "guest.streams",
        "guest.claims",
    },  # both ends cut the same frames
    "store": {"bus", "process", "config"},
    "engine": {"bus", "process", "config"},
    "broker": {"bus", "process", "config"},
    "process": set(),
    "config": set(),
    "bus": set(),
    "guest": set(),  # runs in the guest: the standard library only
    "helper": set(),  # may run as root: the standard library only
}
# Single modules that may look further, each for a reason: at a room, or one module of it.
WINDOWS: dict[str, set[str]] = {
    # what every service's __main__ calls: it joins the life of a process to the bus
    "agent_box.process.skeleton": {"bus"},
    # seals values as the store opens them, and asks those who keep its master key, whom
    # the store cannot reach from behind its wall
    "agent_box.cli.secrets": {
        *("store.rules", "store.seal", "store.custody", "store.files", "store.keepers"),
    },
    # speaks with the helper, in the helper's own words
    "agent_box.engine.helper": {
        *("helper.contract", "helper.link", "helper.proof", "helper.wire"),
    },
    # builds, fetches and judges images in the operator's own process, never in a service
    "agent_box.cli.images": {"engine.image"},
    # says which files an image is when an instance is made of it
    "agent_box.cli.instances": {"engine.image"},
    # builds the first image, and keeps what a guest really ran with where the engine looks
    "agent_box.cli.setup": {"engine.image", "engine.chosen"},
    "agent_box.cli.doctor": {"engine.chosen"},
    "agent_box.cli.values": {"engine.image"},
    # tries the data plane as it is, in the operator's own process
    "agent_box.cli.egress": {"netstack.plane"},
    # lays everything out before the services start: keys, and whether the config is one
    "agent_box.process.daemon": {"bus", "config"},
    # builds walls from contracts, so it has to know their words
    "agent_box.process.confine": {"bus.schema"},
}
ALONE = {"guest", "helper"}


def upward(module: Module) -> Iterator[str]:
    """Imports of `module` that its floor does not allow."""
    allowed = FLOORS[module.room] | WINDOWS.get(module.name, set()) | {module.room}
    for name, line, _ in module.imports:
        parts = name.split(".")
        if parts[0] != "agent_box" or len(parts) < 2:
            continue
        contract = len(parts) > 2 and parts[2] == "contract" and module.room not in ALONE
        seen = parts[1] in allowed or ".".join(parts[1:3]) in allowed
        if parts[1] in FLOORS and not seen and not contract:
            # `from agent_box.store import contract` tells the package first: harmless
            rest = [n for n, at, _ in module.imports if at == line and n.startswith(f"{name}.")]
            if len(parts) == 2 and rest:
                continue
            if module.file == "contract.py" and name.startswith("agent_box.bus"):
                continue  # what a contract may import is a rule of its own
            yield f"{module.path}:{line}: {name}"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("services/bus/x.py", "from agent_box.process import paths"),
        ("services/store/x.py", "from agent_box.registry import core"),
        ("services/store/x.py", "from agent_box.registry.core import A"),
        ("services/process/x.py", "import agent_box.bus.wire"),
        ("services/process/x.py", "from ..bus import wire"),
        ("services/registry/x.py", "def f():\n  from agent_box.cli.main import main"),
        ("guest/x.py", "from agent_box.engine.contract import CONTRACT"),
    ],
)
def test_an_upward_import_is_noticed(path: str, text: str) -> None:
    assert list(upward(Module(module_name(path), path, text)))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("cli/x.py", "from agent_box.store import contract"),
        ("services/registry/x.py", "from agent_box.engine.contract import CONTRACT"),
        ("services/process/skeleton.py", "from agent_box.bus.server import Server"),
    ],
)
def test_a_downward_import_is_not(path: str, text: str) -> None:
    assert not list(upward(Module(module_name(path), path, text)))


def test_imports_go_downward() -> None:
    rooms = [m for m in ours() if m.room]
    assert {m.room for m in rooms} <= set(FLOORS)
    assert [finding for m in rooms for finding in upward(m)] == []


def test_imports_make_no_circle() -> None:
    graph = {m.name: set() for m in ours()}
    for module in ours():
        for name, _, _ in module.imports:
            if name in graph and name != module.name:
                # importing a name of a package that is not a module of its own
                graph[module.name].add(name)
    while leaves := [name for name, needs in graph.items() if not needs & graph.keys()]:
        for leaf in leaves:
            del graph[leaf]
    # what is left imports, directly or not, itself; packages without code are not to blame
    assert sorted(graph) == []
