"""The verbs of an instance's network: forward and capture."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from agent_box.cli import link
from agent_box.cli.render import Failure, Render, Usage, clean, time_text

if TYPE_CHECKING:
    from agent_box.cli.packets import Filter
    from agent_box.cli.values import Forward
    from agent_box.netstack.contract import CaptureEnd

SNAP_SHOWN: Final = 1024  # bytes of a packet that is only printed
SNAP_WRITTEN: Final = 65535
LINKTYPE_RAW: Final = 101  # IP packets without a link layer
PCAP_HEAD: Final = struct.Struct("<IHHiIII")
PCAP_MAGIC: Final = 0xA1B2C3D4
PCAP_RECORD: Final = struct.Struct("<IIII")


def forward(
    out: Render,
    *,
    name: str,
    forward: Forward | None,
    public: bool,
    list: bool,
    remove: int | None,
) -> None:
    """Listens on the host for an instance, or shows or ends what listens."""
    from agent_box.bus.errors import Reason, Refusal
    from agent_box.netstack import contract as net

    instance = _live(out, name, "forward")
    with link.service("netstack", out) as netstack:
        if forward is not None:
            wanted = net.Forward(
                address=forward.address,
                host_port=forward.host,
                guest_port=forward.guest,
                public=public,
            )
            try:
                made = netstack.call(
                    "forward_add", net.ForwardAdd(instance=instance, forward=wanted)
                )
            except Refusal as refusal:
                if refusal.reason is not Reason.CONFLICT or forward.host == 0:
                    raise
                raise _taken(refusal.message, refusal.facts, forward.host) from None
            assert isinstance(made, net.Forward)
            shown = [made]
        else:
            if remove is not None:
                asked = net.ForwardRemove(instance=instance, host_port=remove)
                netstack.call("forward_remove", asked)
            told = netstack.call("forwards", net.Instance(instance=instance))
            assert isinstance(told, net.Forwards)
            shown = told.forwards
    result = {
        "name": name,
        "forwards": [
            {
                "address": each.address,
                "host_port": each.host_port,
                "guest_port": each.guest_port,
                "public": each.public,
            }
            for each in shown
        ],
    }
    lines = [
        f"{_address(each.address)}:{each.host_port} leads to {name}:{each.guest_port}"
        for each in shown
    ]
    if remove is not None:
        lines = [f"{remove} is removed", *lines]
    out.result(result, "\n".join(lines) or f"{name} has no forwards")


def capture(
    out: Render, *, name: str, write: str | None, filter: str | None, count: int | None
) -> None:
    """Prints or writes packets until it is interrupted, or there were so many."""
    from agent_box.cli import packets

    try:
        wanted = None if filter is None else packets.parse(filter)
    except packets.BadFilter as error:
        raise Usage(f"capture: --filter: {error}") from None
    instance = _live(out, name, "capture")
    with _file(write) as file:
        summary = None if write is not None else _summary()
        shown = 0
        try:
            for at_us, length, data in _packets(
                out, instance, wanted, count, SNAP_WRITTEN if write else SNAP_SHOWN
            ):
                shown += 1
                if file is not None:
                    seconds, rest = divmod(at_us, 1_000_000)
                    file.write(PCAP_RECORD.pack(seconds, rest, len(data), length) + data)
                    file.flush()
                elif summary is not None:
                    when, text = time_text(at_us // 1000), summary(data)
                    fields = {"time": when, "bytes": length, "summary": text}
                    out.item("packet", fields, f"{when} {length} {clean(text)}")
                if shown == count:
                    break
        except OSError as error:
            raise Failure(1, "output", f"{write}: {error.strerror}") from None
    out.streaming = True
    out.end(packets=shown)


def _packets(
    out: Render, instance: str, wanted: Filter | None, count: int | None, snap: int
) -> Iterator[tuple[int, int, bytes]]:
    """Microseconds since the epoch, whole length, and what there is of each packet."""
    from agent_box.cli.packets import facts
    from agent_box.netstack import contract as net

    asked = net.Capture(instance=instance, snap_bytes=snap, count=count if wanted is None else None)
    with link.service("netstack", out) as netstack:
        stream = netstack.stream("capture", asked)
        try:
            while (item := stream.recv()) is not None:
                assert isinstance(item, net.Packets)
                for at_us, length, data in _records(item.pcap):
                    if wanted is not None:
                        seen = facts(data)
                        if seen is None or not wanted(seen):
                            continue
                    yield at_us, length, data
            ended = stream.finish()
            assert isinstance(ended, net.CaptureEnd)
            _lost(out, ended)
        finally:
            stream.close()


def _records(pcap: bytes) -> Iterator[tuple[int, int, bytes]]:
    at = 0
    while at < len(pcap):
        seconds, rest, here, length = PCAP_RECORD.unpack_from(pcap, at)
        at += PCAP_RECORD.size
        yield seconds * 1_000_000 + rest, length, pcap[at : at + here]
        at += here


def _lost(out: Render, ended: CaptureEnd) -> None:
    if ended.dropped:
        out.warning(f"{ended.dropped} packets were not shown: this program was too slow for them")


def _summary() -> Any:
    """One line about a packet, by scapy, which takes long to be imported."""
    import logging

    logging.getLogger("scapy").setLevel(logging.CRITICAL)  # it warns of the host's network
    from scapy.layers import dns  # noqa: F401 - so that it knows them
    from scapy.layers.inet import IP

    def summary(untrusted: bytes) -> str:
        try:
            return str(IP(untrusted).summary())
        except Exception as error:  # noqa: BLE001 - a guest's bytes end no capture
            return f"{len(untrusted)} bytes that cannot be read: {type(error).__name__}"

    return summary


@contextmanager
def _file(path: str | None) -> Iterator[BinaryIO | None]:
    """A pcap file, for this account alone.

    Raises:
        Failure: exit 64; it cannot be written.
    """
    if path is None:
        yield None
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Failure(64, "usage", f"{path}: {error.strerror}") from None
    with os.fdopen(fd, "wb") as file:
        file.write(PCAP_HEAD.pack(PCAP_MAGIC, 2, 4, 0, 0, SNAP_WRITTEN, LINKTYPE_RAW))
        file.flush()
        yield file


def _live(out: Render, name: str, verb: str) -> str:
    """The id of an instance that runs.

    Raises:
        Failure: it does not, or nobody can say whether it does.
    """
    from agent_box.registry.contract import Instance, Name

    with link.service("registry", out) as registry:
        found = registry.call("inspect", Name(name=name))
    assert isinstance(found, Instance)
    state = found.row.state
    if state in ("running", "paused"):
        return found.id
    if state == "unknown":
        message = f"the state of {name} is unknown; {verb} needs running"
        raise Failure(12, "state-unknown", message, state=state)
    raise Failure(4, "wrong-state", f"{name} is {state}; {verb} needs running", state=state)


def _taken(message: str, facts: dict[str, str], port: int) -> Failure:
    """With who has it."""
    who = facts.get("holder")
    if who is None:
        from agent_box.cli.holders import holder

        who = holder(port)
        message = message if who is None else f"{message} by {who}"
    return Failure(5, "conflict", message, port=port, holder=who)


def _address(address: str) -> str:
    return f"[{address}]" if ":" in address else address
