"""The engine's I/O: the helper, the monitors, the two dial sockets and the registry's journal.

It keeps nothing on disk. What runs is asked of the helper each time, and the number of a boot
is read from the name of its launch, so a new engine knows as much as the one that was killed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Literal, TypeVar
from weakref import WeakValueDictionary

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.handover import HandoverServer
from agent_box.bus.outbox import Outbox
from agent_box.bus.outcomes import Outcomes
from agent_box.bus.schema import Empty
from agent_box.bus.server import Call, Handler, StreamHandler
from agent_box.config.errors import ConfigError
from agent_box.config.load import load
from agent_box.config.model import Config
from agent_box.engine import chosen, core, hybrid, monitor
from agent_box.engine.contract import (
    Boot,
    Create,
    Dial,
    Gap,
    Instance,
    Observations,
    Observed,
    Probed,
    Vmm,
)
from agent_box.engine.helper import Helper, HelperLost, HelperRefused, State
from agent_box.engine.launches import boot_of, launch_id
from agent_box.process.skeleton import Context, Service
from agent_box.registry.contract import Fact, Note

AGAIN_S: Final = (0.1, 0.4, 1.0, 2.0)  # the helper is started again by its supervisor
LOOK_S: Final = 2.0  # between looks at a machine that nobody reports on
ASK_S: Final = 45.0  # for an operation with all its tries; the last may take its own time
SEEN_S: Final = 6.0  # for what is to be seen; then its state is unknown
NOTE_S: Final = 20.0
LAST_S: Final = 1.0  # at the end, for what is still to be noted
RECENT_MS: Final = 24 * 3600 * 1000  # an end that long ago was noted, or never will be
DIAL_MAX_S: Final = 120.0

T = TypeVar("T")


def build(context: Context) -> Service:
    """Makes the service."""
    return Engine(context)


class Engine:
    """One engine."""

    outcomes: Outcomes | None = None

    def __init__(self, context: Context) -> None:
        self._context = context
        paths = context.paths
        self._helper = Helper(
            paths.helper_sock,
            paths.helper_key,
            on_lost=lambda: self._helper_turned("helper-lost"),
            on_back=lambda: self._helper_turned("helper-back"),
        )
        # A VMM serves one monitor at a time. A lock lives as long as somebody has or wants it.
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._watched: dict[str, str] = {}  # instance -> launch
        self._stalled: dict[str, str] = {}  # the same, of those that wait for room on the disk
        self._notes: Outbox[Note] = Outbox(self._send, self._not_noted)
        self._stopping = False
        self._lost = False
        self._dials = [self._dial_server(role) for role in core.PORTS]
        self.handlers: Mapping[str, Handler | StreamHandler] = {
            "probe": self.probe,
            "create": self.create,
            "boot": self.boot,
            "pause": self.pause,
            "resume": self.resume,
            "kill": self.kill,
            "query": self.query,
            "list": self.every,
            "delete": self.delete,
        }

    async def start(self) -> None:
        for server in self._dials:
            server.start()
        self._context.tasks.spawn(self._notes.run(), name="notes")
        self._context.tasks.spawn(self._adopt(), name="adopt")

    async def stop(self) -> None:
        self._stopping = True
        for server in self._dials:
            server.close()
        await self._notes.flush(LAST_S)
        self._helper.close()

    # ------------------------------------------------------------------ methods

    async def probe(self, _request: Empty, _call: Call) -> Probed:
        accel = self._accel()
        engine: Literal["qemu", "firecracker"] = "qemu"
        gaps = []
        if self._config().defaults.engine == "firecracker":
            engine = "firecracker"
            gaps.append(Gap(name="engine-missing", text=core.NO_FIRECRACKER))
        if accel is None:
            gaps.append(Gap(name="engine-accel", text="no accelerator is chosen: run setup"))
        try:
            answer = await self._helper.probe()
        except (HelperLost, HelperRefused) as error:
            gaps.append(Gap(name="helper-missing", text=str(core.refusal(error))))
            return Probed(
                engine=engine, accel=accel, version=None, helper="user", protocol=None, gaps=gaps
            )
        gaps += [Gap(name=gap.name, text=gap.text) for gap in answer.gaps]
        if accel == "kvm" and not answer.kvm:
            gaps.append(Gap(name="no-kvm", text="/dev/kvm cannot be used, and kvm is configured"))
        return Probed(
            engine=engine,
            accel=accel,
            version=answer.qemu,
            helper="system" if answer.mode == "system" else "user",
            protocol=answer.protocol,
            gaps=gaps,
        )

    async def create(self, request: Create, _call: Call) -> Empty:
        instance = core.instance_id(request.instance)
        await self._ask(lambda: self._helper.allocate(instance, request.disk_bytes))
        return Empty()

    async def boot(self, request: Boot, _call: Call) -> Observed:
        instance = core.instance_id(request.instance)
        launch = launch_id(instance, core.boot_number(request.boot))
        profile = core.profile(request, self._accel(), self._config().defaults.engine)
        state = await self._ask(lambda: self._helper.launch(instance, launch, profile))
        self._started(state)
        return await self._observe(state)

    async def pause(self, request: Vmm, _call: Call) -> Observed:
        return await self._change(request, "stop")

    async def resume(self, request: Vmm, _call: Call) -> Observed:
        return await self._change(request, "cont")

    async def kill(self, request: Vmm, _call: Call) -> Observed:
        instance = core.instance_id(request.instance)
        launch = launch_id(instance, core.boot_number(request.boot))
        return core.observed(await self._ask(lambda: self._helper.kill(instance, launch)), None)

    async def query(self, request: Instance, _call: Call) -> Observed:
        return await self._query(core.instance_id(request.instance))

    async def _query(self, instance: str) -> Observed:
        for state in await self._states():
            if state.id == instance:
                return await self._observe(state)
        raise Refusal(Reason.NOT_FOUND, f"the helper holds no instance {instance}")

    async def every(self, _request: Empty, _call: Call) -> Observations:
        states = await self._states()
        seen = await asyncio.gather(*(self._observe(state) for state in states))
        return Observations(instances=seen)

    async def delete(self, request: Instance, _call: Call) -> Empty:
        instance = core.instance_id(request.instance)
        try:
            await self._ask(lambda: self._helper.release(instance))
        except Refusal as refusal:
            if refusal.reason is not Reason.NOT_FOUND:
                raise
        return Empty()

    # ------------------------------------------------------------------ the helper

    async def _ask(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Asks the helper, and again while its supervisor starts it again: every operation of
        its may be repeated.

        Raises:
            Refusal: the helper's answer, or HELPER_UNAVAILABLE.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + ASK_S
        for wait in (*AGAIN_S, None):
            try:
                return await ask()
            except HelperRefused as error:
                raise core.refusal(error) from None
            except HelperLost as error:
                if wait is None or loop.time() >= until:
                    raise core.refusal(error) from None
                await asyncio.sleep(wait)  # nothing tells when another process binds a path
        raise AssertionError("the last round returns or raises")

    async def _states(self) -> list[State]:
        """Raises:
        Refusal: STATE_UNKNOWN, the helper is silent.
        """
        try:
            async with asyncio.timeout(SEEN_S):
                return await self._ask(self._helper.instances)
        except TimeoutError:
            raise Refusal(Reason.STATE_UNKNOWN, "the helper does not answer") from None
        except Refusal as refusal:
            if refusal.reason is Reason.HELPER_UNAVAILABLE:
                raise Refusal(Reason.STATE_UNKNOWN, refusal.message) from None
            raise

    def _config(self) -> Config:
        try:
            return load(self._context.config)
        except ConfigError as error:
            raise Refusal(Reason.CONFIG_INVALID, str(error)) from None

    def _accel(self) -> Literal["kvm", "tcg"] | None:
        accel = self._config().engine.accel
        if accel is None:
            return chosen.read(chosen.file(self._context.paths))
        return "kvm" if accel == "kvm" else "tcg" if accel == "tcg" else None

    # ------------------------------------------------------------------ monitors

    async def _observe(self, state: State) -> Observed:
        found = await self._monitor_state(state)
        if found == "stalled" and self._stalled.get(state.id) != state.launch_id:
            assert state.launch_id is not None
            self._stalled[state.id] = state.launch_id
            self._put(os.urandom(16), state.id, "vmm-stalled", _facts(state))
        elif found == "running":
            self._stalled.pop(state.id, None)
        return core.observed(state, found)

    async def _monitor_state(self, state: State) -> monitor.VmState | None:
        if state.state != "running" or state.launch_id is None:
            return None
        try:
            async with asyncio.timeout(monitor.ANSWER_S * 2), self._alone(state.id):
                stream = await self._monitor(state.id, state.launch_id)
                return await monitor.state(stream)
        except (TimeoutError, HelperLost, HelperRefused):
            return "unreachable"

    async def _change(self, request: Vmm, command: Literal["stop", "cont"]) -> Observed:
        instance = core.instance_id(request.instance)
        launch = launch_id(instance, core.boot_number(request.boot))
        async with self._alone(instance):
            stream = await self._ask(lambda: self._monitor(instance, launch))
            await monitor.change(stream, command)
        found = await self._query(instance)
        if command == "cont" and found.state == "paused":
            why = "the host's disk is full: its VMM freezes it again; make room, then resume it"
            raise Refusal(Reason.DISK_FULL, why)
        return found

    def _alone(self, instance: str) -> asyncio.Lock:
        lock = self._asking.get(instance)
        if lock is None:
            lock = self._asking[instance] = asyncio.Lock()
        return lock

    async def _monitor(self, instance: str, launch: str) -> socket.socket:
        return _stream(await self._helper.monitor(instance, launch))

    # ------------------------------------------------------------------ dialling

    def _dial_server(self, role: str) -> HandoverServer[Dial]:
        async def serve(request: Dial) -> int:
            return await self._dial(request, core.PORTS[role])

        path = self._context.paths.runtime / "dial" / role / "sock"
        return HandoverServer(path, Dial, serve, self._context.tasks.hold)

    async def _dial(self, request: Dial, ports: frozenset[int]) -> int:
        instance = core.instance_id(request.instance)
        launch = launch_id(instance, core.boot_number(request.boot))
        if request.port not in ports:
            raise Refusal(Reason.DENIED, f"port {request.port} is not for this socket")
        deadline_s = min(max(request.deadline_ms, 0) / 1000, DIAL_MAX_S)
        stream = _stream(await self._ask(lambda: self._helper.dial(instance, launch)))
        try:
            await hybrid.connect(stream, request.port, deadline_s=deadline_s)
            return stream.detach()
        finally:
            stream.close()  # does nothing to one that was detached

    # ------------------------------------------------------------------ what happens unasked

    async def _adopt(self) -> None:
        """Watches what ran before this start, however long the helper takes to answer, and
        notes what ended while no engine was there to see it."""
        while not self._stopping:
            try:
                states = await self._helper.instances()
            except (HelperLost, HelperRefused):
                await asyncio.sleep(LOOK_S)
                continue
            for state in states:
                if state.state == "running":
                    monitor.prepare()
                    self._watch(state, "vmm-adopted")
                elif state.exit is not None and _recent(state.exit.at_ms):
                    self._note(state, "vmm-ended")
            return

    def _started(self, state: State) -> None:
        """After a launch, which may have been asked for before: each is noted once. One that
        ended at once is noted too, and both are told apart by their order."""
        if state.state == "running":
            self._watch(state, "vmm-started")
        elif state.exit is not None and self._watched.get(state.id) != state.launch_id:
            self._note(state, "vmm-started")
            self._note(state, "vmm-ended")

    def _watch(self, state: State, event: str) -> None:
        if state.launch_id is None or self._watched.get(state.id) == state.launch_id:
            return
        self._watched[state.id] = state.launch_id
        self._note(state, event)
        self._context.tasks.spawn(self._follow(state.id, state.launch_id), name="watch")

    async def _follow(self, instance: str, launch: str) -> None:
        """Until that launch ended, then says so. The pipe wakes us; the helper's list tells."""
        try:
            companions = True
            while not self._stopping:
                state = await self._wait(instance, launch)
                if state is None or state.launch_id != launch:
                    return
                if state.state not in ("starting", "running"):
                    self._note(state, "vmm-ended")
                    return
                if companions and not state.device:
                    companions = False
                    self._note(state, "companion-ended")
        finally:
            if self._watched.get(instance) == launch:
                del self._watched[instance]
            if self._stalled.get(instance) == launch:
                del self._stalled[instance]

    async def _wait(self, instance: str, launch: str) -> State | None:
        """The state after the next change; None when the helper no longer holds it."""
        try:
            state, pipe = await self._helper.watch(instance, launch)
        except (HelperLost, HelperRefused):
            # the helper is away, or the shim is, or it is over; what is not is looked at in turns
            found = await self._one(instance)
            if found is not None and found.launch_id == launch and found.exit is None:
                await asyncio.sleep(LOOK_S)
            return found
        try:
            if state.state == "running":
                await _readable(pipe)
        finally:
            os.close(pipe)
        return await self._one(instance)

    async def _one(self, instance: str) -> State | None:
        while True:
            try:
                return next((s for s in await self._helper.instances() if s.id == instance), None)
            except (HelperLost, HelperRefused):
                await asyncio.sleep(LOOK_S)

    def _helper_turned(self, event: str) -> None:
        if self._stopping or (event == "helper-back") != self._lost:
            return  # the first connection is no news
        self._lost = event == "helper-lost"
        self._put(os.urandom(16), None, event, {})

    def _note(self, state: State, event: str) -> None:
        """The id of an event is made of what it is about, so that the journal has it once,
        though two engines saw it, or one sent it twice. Adopted is each start's own."""
        own = self._context.epoch.hex() if event == "vmm-adopted" else ""
        made = hashlib.sha256(f"{event} {state.id} {state.launch_id} {own}".encode()).digest()
        self._put(made[:16], state.id, event, _facts(state))

    def _put(
        self, event_id: bytes, instance: str | None, kind: str, facts: dict[str, Fact]
    ) -> None:
        self._notes.put(
            Note(
                event_id=event_id,
                instance=instance,
                source="host-observed",
                kind=kind,
                facts=facts,
            )
        )

    async def _send(self, note: Note) -> None:
        await self._context.client("registry").call("note", note, deadline_s=NOTE_S)

    def _not_noted(self, note: Note, why: str) -> None:
        self._context.log.warning("a note was lost", kind=note.kind, why=why)


def _recent(at_ms: int) -> bool:
    """Whether an end was seen lately, or by nobody."""
    return at_ms == 0 or time.time_ns() // 1_000_000 - at_ms < RECENT_MS


def _stream(fd: int) -> socket.socket:
    stream = socket.socket(fileno=fd)
    stream.setblocking(False)
    return stream


def _facts(state: State) -> dict[str, Fact]:
    facts: dict[str, Fact] = {}
    boot = boot_of(state.id, state.launch_id)
    if boot is not None:
        facts["boot"] = boot
    if state.vmm is not None:
        facts["pid"] = state.vmm.pid
    if state.exit is not None:
        facts["by"] = state.exit.by
        if state.exit.code is not None:
            facts["status"] = state.exit.code
        if state.exit.signal is not None:
            facts["signal"] = state.exit.signal
    return facts


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(fd)
