"""netstack as it runs: one connection to the worker of each machine, forwards, captures, and
the registry's journal.

It keeps nothing on disk. What a worker was told, it says itself when it is connected to, so a
new service knows as much as the one that was killed; and what the registry wanted meanwhile,
it says again when it hears that this service has started.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
from collections.abc import Mapping
from typing import Final

from agent_box.bus.errors import Code, Reason, Refusal
from agent_box.bus.handover import HandoverClient
from agent_box.bus.outcomes import Outcomes
from agent_box.bus.schema import Empty
from agent_box.bus.server import Call, Handler, StreamHandler, StreamIO
from agent_box.netstack import control, forwardbind
from agent_box.netstack.contract import (
    Applied,
    Apply,
    Capture,
    CaptureEnd,
    Check,
    Counters,
    Forward,
    ForwardAdd,
    ForwardRemove,
    Forwards,
    Instance,
    InstanceUp,
    Packets,
    Verdict,
)
from agent_box.netstack.own import own
from agent_box.netstack.policy import PolicyInvalid, load
from agent_box.netstack.worker import RECORD
from agent_box.netstack.workers import ROOMS, Held, Wanted
from agent_box.process.skeleton import Context, Service
from agent_box.registry.contract import Note

NOTE_S: Final = 20.0
AGAIN_S: Final = (0.5, 1.0, 2.0, 5.0)  # between tries to note something
MARGIN_S: Final = 1.0  # of a call's deadline, for the answer
PACKETS_BYTES: Final = 256 << 10  # in one item of a capture
PCAP_RECORD: Final = struct.Struct("<IIII")  # seconds, microseconds, bytes here, bytes in all
_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)


def build(context: Context) -> Service:
    """Makes the service."""
    return Netstack(context)


class Netstack:
    """One service."""

    outcomes: Outcomes | None = None

    def __init__(self, context: Context) -> None:
        self._context = context
        runtime = context.paths.runtime
        self._rooms = runtime.joinpath(*ROOMS)
        self._dials = HandoverClient(runtime / "dial" / "netstack" / "sock")
        self._held: dict[str, Held] = {}
        self._adding = asyncio.Lock()
        self.handlers: Mapping[str, Handler | StreamHandler] = {
            "check": self.check,
            "instance_up": self.instance_up,
            "instance_down": self.instance_down,
            "apply": self.apply,
            "counters": self.counters,
            "forward_add": self.forward_add,
            "forwards": self.forwards,
            "forward_remove": self.forward_remove,
            "capture": self.capture,
        }

    async def start(self) -> None:
        """Connects to what runs already."""
        for room in self._rooms.iterdir() if self._rooms.is_dir() else ():
            if _ID.fullmatch(room.name):
                self._hold(room.name)
        self._context.tasks.spawn(
            self.noted(None, "netstack-started", {}, self._context.epoch), name="started"
        )

    async def stop(self) -> None:
        for held in self._held.values():
            held.close()
        self._dials.close()

    # ------------------------------------------------------------------ the registry's

    def check(self, request: Check, _call: Call) -> Verdict:
        """What the policy says about a flow, by the function that enforces it."""
        try:
            return load(request.policy).decide(request.flow, own=own())
        except PolicyInvalid as error:
            raise Refusal(Reason.BAD_REQUEST, f"the policy cannot be enforced: {error}") from None

    async def instance_up(self, request: InstanceUp, call: Call) -> Applied:
        _loadable(request.policy)
        wanted = Wanted(request.boot, request.name, request.policy)
        held = self._hold(_id(request.instance))
        before = held.wanted
        applied = await held.up(wanted, call.remaining_s() - MARGIN_S)
        newer = before is not None and before.policy.generation != applied.generation
        if newer and before is not None and before.boot == wanted.boot:
            self._tell_applied(request.instance, applied)
        return applied

    async def instance_down(self, request: Instance, _call: Call) -> Empty:
        held = self._held.get(_id(request.instance))
        if held is not None:
            ended = list(held.forwards)
            await held.down()
            for forward in ended:
                self._tell(request.instance, "forward-closed", forward)
        return Empty()

    async def apply(self, request: Apply, call: Call) -> Applied:
        _loadable(request.policy)
        held = self._there(request.instance)
        applied = await held.apply(request.policy, call.remaining_s() - MARGIN_S)
        self._tell_applied(request.instance, applied)
        return applied

    def _tell_applied(self, instance: str, applied: Applied) -> None:
        facts: dict[str, control.Fact] = {
            "generation": applied.generation,
            "revoked": applied.revoked,
        }
        work = self.noted(instance, "policy-applied", facts, os.urandom(16))
        self._context.tasks.spawn(work, name="note")

    async def counters(self, request: Instance, call: Call) -> Counters:
        held = self._there(request.instance)
        return await held.counters(min(2.0, call.remaining_s() - MARGIN_S))

    # ------------------------------------------------------------------ forwards

    async def forward_add(self, request: ForwardAdd, call: Call) -> Forward:
        """The same again is the same: a port that this instance has already is told again."""
        held = self._there(request.instance)
        wanted = forwardbind.checked(request.forward)
        async with self._adding:
            await held.connected(call.remaining_s() - MARGIN_S)
            if held.wanted is None:
                raise Refusal(Reason.WRONG_STATE, "the instance has no network: it does not run")
            for each in held.forwards:
                if _is_same(each, wanted):
                    return each
            if len(held.forwards) >= forwardbind.FORWARDS_MAX:
                most = forwardbind.FORWARDS_MAX
                raise Refusal(Reason.EXHAUSTED, f"the instance has {most} forwards")
            try:
                made, listeners = forwardbind.bind(wanted)
            except Refusal as refusal:
                raise self._with_holder(refusal, wanted) from None
            await held.listen(made, listeners)
        self._tell(request.instance, "forward-opened", made)
        return made

    def forwards(self, request: Instance, _call: Call) -> Forwards:
        held = self._held.get(_id(request.instance))
        return Forwards(forwards=[] if held is None else list(held.forwards))

    async def forward_remove(self, request: ForwardRemove, call: Call) -> Empty:
        held = self._there(request.instance)
        await held.connected(call.remaining_s() - MARGIN_S)
        gone = [each for each in held.forwards if each.host_port == request.host_port]
        if not gone:
            raise Refusal(Reason.NOT_FOUND, f"the instance has no forward of {request.host_port}")
        await held.unlisten(request.host_port)
        self._tell(request.instance, "forward-closed", gone[0])
        return Empty()

    async def bind(self, forward: Forward) -> list[socket.socket]:
        """For a worker that was started anew."""
        return forwardbind.bind(forward)[1]

    def _with_holder(self, refusal: Refusal, wanted: Forward) -> Refusal:
        """The refusal with the instance that has the port, if it is one of ours."""
        if refusal.reason is not Reason.CONFLICT:
            return refusal
        for held in self._held.values():
            for each in held.forwards:
                if each.host_port == wanted.host_port and held.wanted is not None:
                    name = held.wanted.name
                    return Refusal(
                        refusal.reason,
                        f"{refusal.message}: it leads to {name}:{each.guest_port}",
                        facts={**refusal.facts, "holder": name},
                    )
        return refusal

    def _tell(self, instance: str, kind: str, forward: Forward) -> None:
        facts: dict[str, control.Fact] = {
            "address": forward.address,
            "host_port": forward.host_port,
            "guest_port": forward.guest_port,
            "public": forward.public,
        }
        self._context.tasks.spawn(self.noted(instance, kind, facts, os.urandom(16)), name="note")

    # ------------------------------------------------------------------ captures

    async def capture(self, request: Capture, _call: Call, io: StreamIO) -> CaptureEnd:
        """Whole records of a pcap file with raw IP packets. Whoever reads slowly loses some at
        the worker, which goes on."""
        held = self._there(request.instance)
        if not 1 <= request.snap_bytes <= control.SNAP_MAX:
            raise Refusal(Reason.BAD_REQUEST, f"snap_bytes is from 1 to {control.SNAP_MAX}")
        await held.connected(MARGIN_S)
        source = await held.capture(request.snap_bytes)
        left, seen, lost = request.count, 0, 0
        try:
            while left is None or left > 0:
                records, lost, ended = await _batch(source, left, lost)
                if records:
                    seen += len(records)
                    left = None if left is None else left - len(records)
                    await io.send(Packets(pcap=b"".join(records)))
                if ended:
                    break
            return CaptureEnd(packets=seen, dropped=lost)
        finally:
            source.close()

    # ------------------------------------------------------------------ below

    async def noted(
        self, instance: str | None, kind: str, facts: dict[str, control.Fact], id: bytes
    ) -> None:
        """Returns when the registry has it, or refuses it for good."""
        note = Note(
            event_id=id, instance=instance, source="host-observed", kind=kind, facts=dict(facts)
        )
        tries = 0
        while True:
            try:
                await self._context.client("registry").call("note", note, deadline_s=NOTE_S)
                return
            except Refusal as refusal:
                if refusal.code not in (Code.UNAVAILABLE, Code.DEADLINE, Code.UNKNOWN_OUTCOME):
                    self._context.log.warning("a note was lost", kind=kind, why=refusal.message)
                    return
            await asyncio.sleep(AGAIN_S[min(tries, len(AGAIN_S) - 1)])
            tries += 1

    def _hold(self, instance: str) -> Held:
        held = self._held.get(instance)
        if held is None or held.over:
            hold = self._context.tasks.hold
            held = Held(instance, self._rooms / instance, self._dials, self, hold)
            self._held[instance] = held
            self._context.tasks.spawn(self._run(held), name="worker")
        return held

    async def _run(self, held: Held) -> None:
        try:
            await held.run()
        finally:
            if self._held.get(held.instance) is held:
                del self._held[held.instance]

    def _there(self, untrusted_instance: str) -> Held:
        held = self._held.get(_id(untrusted_instance))
        if held is None:
            raise Refusal(Reason.WRONG_STATE, "the instance has no network: it does not run")
        return held


def _is_same(there: Forward, wanted: Forward) -> bool:
    return (there.address, there.guest_port) == (wanted.address, wanted.guest_port) and (
        wanted.host_port in (0, there.host_port)
    )


def _id(untrusted: str) -> str:
    if _ID.fullmatch(untrusted) is None:
        raise Refusal(Reason.BAD_REQUEST, "an instance is named by 32 hexadecimal digits")
    return untrusted


def _loadable(policy: object) -> None:
    try:
        load(policy)  # type: ignore[arg-type]
    except PolicyInvalid as error:
        raise Refusal(Reason.BAD_REQUEST, f"the policy cannot be enforced: {error}") from None


async def _batch(
    source: socket.socket, most: int | None, lost: int
) -> tuple[list[bytes], int, bool]:
    """What has come, at least one packet unless it has ended; how many were lost; and whether
    it has ended."""
    loop = asyncio.get_running_loop()
    records: list[bytes] = []
    size = 0
    data = await loop.sock_recv(source, RECORD.size + control.SNAP_MAX)
    while data:
        at_ns, length, lost = RECORD.unpack_from(data)
        packet = data[RECORD.size :]
        seconds, rest = divmod(at_ns, 1_000_000_000)
        records.append(PCAP_RECORD.pack(seconds, rest // 1000, len(packet), length) + packet)
        size += len(records[-1])
        if size >= PACKETS_BYTES or len(records) == most:
            return records, lost, False
        try:
            data = source.recv(RECORD.size + control.SNAP_MAX)
        except BlockingIOError:
            return records, lost, False
    return records, lost, True
