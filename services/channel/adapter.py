"""The channel as it runs: guests are provisioned, kept on time and powered off, and whoever
may gets terminals and commands in them.

Runs of harnesses have a module of their own, `harness`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Mapping
from typing import Final, Literal

from agent_box.broker.contract import Nonce, Nonces, NoncesOf
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.outbox import Outbox
from agent_box.bus.outcomes import Outcomes
from agent_box.bus.schema import Empty
from agent_box.bus.server import Call, Handler, StreamHandler
from agent_box.channel import guests, provisioning
from agent_box.channel.contract import Guest, Provision, Provisioned
from agent_box.channel.control import TIMER_MOST, clock, hook_end
from agent_box.channel.events import Claim, Listener
from agent_box.channel.guests import Forged, Link
from agent_box.channel.harness import Harnesses
from agent_box.channel.keeper import EVERY_S, LOOK_S, Clocks, Jumps, Kept
from agent_box.channel.terminals import Desk
from agent_box.guest.wire import CONTROL_PORT, FrameError
from agent_box.process.skeleton import Context, Service
from agent_box.registry.contract import Fact, Note

TIME_S: Final = 5.0
NONCES_S: Final = 5.0
HOME: Final = "/home/agent"  # guest.disk.HOME
SKEW_MS: Final = 500  # over this the clock is set once more
NOTE_S: Final = 20.0
HOOK_S: Final = 330.0  # the guest ends it after 300
MARGIN_S: Final = 1.0  # of a call's deadline, for the answer
LAST_S: Final = 1.0  # at the end, for what is still to be noted
# In thousandths of its rate, what a guest's kernel may have taken its timer for. One that it takes
# for slower wakes it early, to look again; for faster, and all that waits does so too long.
TIMERS: Final = {"right": (700, 1150), "any": (1, TIMER_MOST)}
FORGED_S: Final = 60.0  # a guest's forgeries are noted once in this time, with their number
# What the engine says of a boot that is over, or never was.
GONE: Final = frozenset((Reason.NOT_FOUND, Reason.CONFLICT, Reason.WRONG_STATE, Reason.BAD_REQUEST))


def build(context: Context) -> Service:
    """Makes the service."""
    return Channel(context)


class Channel:
    """One channel.

    Args:
        clocks: the host's; tests turn them.
    """

    def __init__(self, context: Context, clocks: Clocks | None = None) -> None:
        self._context = context
        self._clocks = clocks or Clocks()
        self._kept = Kept(context.data, self._unkept)
        self._links: dict[str, Link] = {}
        self._keeping: dict[str, bool] = {}  # whether once more, when it is done
        self._forgeries: dict[str, tuple[float, int]] = {}  # instance: until when, how many
        self._dials = guests.dials(context.paths.runtime)
        self._desk = Desk(self, self._dials, context.tasks)
        self._listener = Listener(self._dials, context.tasks, self._on_record, self.forged)
        self._frozen: set[str] = set()  # instances that were paused under us
        self._harnesses = Harnesses(
            context.data, self._dials, self.boot_of, context.tasks, self._claimed, context.log
        )
        self._jumps = Jumps(self._clocks)
        self.outcomes: Outcomes | None = None
        self._notes: Outbox[Note] = Outbox(self._send, self._not_noted)
        self.handlers: Mapping[str, Handler | StreamHandler] = {
            **self._harnesses.handlers,
            "provision": self.provision,
            "set_time": self.set_time,
            "poweroff": self.poweroff,
            "release": self.release,
            "attach": self._desk.attach,
            "exec": self._desk.exec,
            "terminals": self._desk.terminals,
        }

    async def start(self) -> None:
        self._context.tasks.spawn(self._keep_time(), name="time")
        self._context.tasks.spawn(self._notes.run(), name="notes")
        self._harnesses.start()
        self._context.tasks.spawn(self._when_asked_to_end(), name="end")
        for instance, boot in self._kept.boots.items():
            self._listener.begin(instance, boot)
            # it may have ended while nobody was there to hear of it
            self._context.tasks.spawn(self._hooked_later(instance, boot), name="hook")

    async def _when_asked_to_end(self) -> None:
        await self._context.server.drain_asked.wait()
        self._desk.starts_again()

    async def stop(self) -> None:
        await self._notes.flush(LAST_S)
        for link in self._links.values():
            link.end()
        self._harnesses.stop()
        self._dials.close()

    async def provision(self, request: Provision, call: Call) -> Provisioned:
        """Waits for the guest as long as the caller does."""
        link = self._link(request.instance, request.boot)
        until = self._now() + max(0.0, call.remaining_s() - MARGIN_S)
        try:
            hello = await link.hello(until - self._now())
            least, most = TIMERS[request.timer]
            if hello.timer is not None and not least <= hello.timer <= most:
                raise Refusal(
                    Reason.BOOT_FAILED,
                    "the guest's kernel misjudged its timer, as it may on a busy host: it took "
                    f"{hello.timer / 10:.0f} % of the rate for the whole",
                    facts={"timer": str(hello.timer)},
                )
            if hello.disk != "ok":
                raise Refusal(
                    Reason.DISK_DAMAGED,
                    f"the guest cannot use its data disk: {hello.disk_text}",
                    facts={"disk": hello.disk},
                )
            hook = request.hook
            given = await self._provisions(request)
            given.environment.update((v.name, v.value) for v in request.environment)
            fields = {
                "boot": request.boot,
                "hostname": request.hostname,
                "environment": [{"name": n, "value": v} for n, v in given.environment.items()],
                "files": [vars(file) for file in given.files],
                "harness": request.harness,
                "hook": None if hook is None else {"path": hook.path, "expected": hook.expected},
                "sudo": request.sudo,
            }
            skew = await self._timed(link, "provision", fields, until - self._now())
            if abs(skew) > SKEW_MS:
                skew = await self._timed(link, "time", {}, until - self._now())
        except (Forged, FrameError) as error:
            raise self._forged(link, error) from None
        except Refusal:
            link.reset()  # what does not come up is ended next, and asked nothing more
            raise
        self._frozen.discard(request.instance)
        self._kept.add(request.instance, request.boot)
        ready: dict[str, Fact] = {"boot": request.boot, "skew_ms": skew}
        if hello.timer is not None:
            ready["timer"] = hello.timer
        self.note(request.instance, "guest-ready", ready)
        self._listener.begin(request.instance, request.boot)
        if hook is not None and hook.required:
            seconds = max(0.0, until - self._now())
            why = await self._hooked(request.instance, request.boot, seconds)
            if why is not None:
                raise Refusal(Reason.BOOT_FAILED, f"the project hook failed: {why}")
        elif hook is not None:
            later = self._hooked_later(request.instance, request.boot)
            self._context.tasks.spawn(later, name="hook")
        return Provisioned(version=hello.guest, skew_ms=skew)

    async def set_time(self, request: Guest, call: Call) -> Provisioned:
        link = self._link(request.instance, request.boot)
        until = self._now() + max(0.0, call.remaining_s() - MARGIN_S)
        self._frozen.discard(request.instance)
        try:
            skew = await self._set(link, until)
            hello = await link.hello(until - self._now())
        except (Forged, FrameError) as error:
            raise self._forged(link, error) from None
        return Provisioned(version=hello.guest, skew_ms=skew)

    async def poweroff(self, request: Guest, call: Call) -> Empty:
        link = self._link(request.instance, request.boot)
        self._kept.drop(request.instance, request.boot)
        self._frozen.discard(request.instance)
        self._listener.end(request.instance)
        self._desk.leave(request.instance)
        self._harnesses.left(request.instance)
        try:
            await link.ask("poweroff", {}, max(0.0, call.remaining_s() - MARGIN_S))
        except (Forged, FrameError) as error:
            raise self._forged(link, error) from None
        self._unlink(link)
        return Empty()

    def release(self, request: Guest, call: Call) -> Empty:
        """The guest is paused; until it gets the time again nobody is attached to it."""
        if self._kept.boots.get(request.instance) == request.boot:
            self._frozen.add(request.instance)
            self._desk.leave(request.instance)
        return Empty()

    def boot_of(self, instance: str) -> int | None:
        """The boot of a guest that is up and not paused."""
        return None if instance in self._frozen else self._kept.boots.get(instance)

    # ------------------------------------------------------------------

    async def _provisions(self, request: Provision) -> provisioning.Plan:
        """What the guest gets so that its tools can use its bindings."""
        found: list[Nonce] = []
        if request.bindings:
            ask = NoncesOf(instance=request.instance, boot=request.boot)
            reply = await self._context.client("broker").call("nonces", ask, deadline_s=NONCES_S)
            assert isinstance(reply, Nonces)
            found = reply.nonces
        return provisioning.plan(found, request.harness, HOME)

    async def _hooked(self, instance: str, boot: int, seconds: float) -> str | None:
        """Waits for the end of the hook, on a stream of its own; returns why it failed.

        Raises:
            Refusal: as `Link.ask`.
        """
        link = Link(self._dials, instance, boot, self._clocks)
        try:
            state, line = hook_end(await link.ask("hook", {}, seconds))
        except (Forged, FrameError) as error:
            raise self._forged(link, error) from None
        finally:
            link.end()
        facts: dict[str, Fact] = {"boot": boot, "claim": line}
        if state != "none":
            # the same of the same boot, so that a provisioning that is repeated tells it once
            event = hashlib.sha256(f"hook {instance} {boot}".encode()).digest()
            kind = f"hook-{state}"
            self.note(instance, kind, facts, source="guest-channel", event_id=event[:16])
        return line if state == "failed" else None

    async def _hooked_later(self, instance: str, boot: int) -> None:
        try:
            await self._hooked(instance, boot, HOOK_S)
        except Refusal:
            return  # the machine ended first, or hangs; both are noted by others

    def _now(self) -> float:
        return self._clocks.steady() / 1e9

    def _link(self, instance: str, boot: int) -> Link:
        """Raises:
        Refusal: CONFLICT, a later boot of it is known already. What is still to be done for an
            earlier one, such as keeping its time, must not end the later one's stream.
        """
        link = self._links.get(instance)
        if link is not None and boot < link.boot:
            raise Refusal(Reason.CONFLICT, "a later boot of the instance runs")
        if link is None or link.boot != boot:
            if link is not None:
                link.end()
            link = self._links[instance] = Link(self._dials, instance, boot, self._clocks)
        return link

    def _unlink(self, link: Link) -> None:
        link.end()
        if self._links.get(link.instance) is link:
            del self._links[link.instance]
            self._forgeries.pop(link.instance, None)

    async def _timed(self, link: Link, op: str, fields: dict[str, object], seconds: float) -> int:
        """Asks what sets the clock; returns the guest's against ours in ms, taking half of the
        round trip for the way."""
        began = self._clocks.wall()
        untrusted = await link.ask(op, fields, seconds)
        return round((clock(untrusted) - (began + self._clocks.wall()) // 2) / 1e6)

    async def _set(self, link: Link, until: float) -> int:
        """Sets the clock, and once more when the request lay somewhere on its way."""
        skew = await self._timed(link, "time", {}, until - self._now())
        if abs(skew) > SKEW_MS:
            skew = await self._timed(link, "time", {}, until - self._now())
        return skew

    # ------------------------------------------------------------------ keeping time

    async def _keep_time(self) -> None:
        """Every minute, and when the host's clock jumped, each guest gets the time. Nothing
        wakes us at a jump, so it is looked for."""
        due = self._now()
        while True:
            if self._jumps.jumped() or self._now() >= due:
                due = self._now() + EVERY_S
                for instance in self._kept.boots:
                    self._keep(instance)
            await asyncio.sleep(LOOK_S)

    def _keep(self, instance: str) -> None:
        """Each by itself: one that does not answer keeps no other from its time."""
        if instance in self._keeping:
            self._keeping[instance] = True
        else:
            self._keeping[instance] = True
            self._context.tasks.spawn(self._keep_one(instance), name="time")

    async def _keep_one(self, instance: str) -> None:
        try:
            while self._keeping[instance] and instance in self._kept.boots:
                self._keeping[instance] = False
                boot = self._kept.boots[instance]
                try:
                    link = self._link(instance, boot)
                except Refusal:  # it ended unseen, and the next one is not provisioned yet
                    self._kept.drop(instance, boot)
                    continue
                try:
                    await self._set(link, self._now() + TIME_S)
                except (Forged, FrameError) as error:
                    self._forged(link, error)
                except Refusal as refusal:
                    if refusal.reason in GONE:
                        self._kept.drop(instance, link.boot)
                        self._unlink(link)
                    # paused, or busy: it gets the time when it is resumed, or in a minute
        finally:
            del self._keeping[instance]

    # ------------------------------------------------------------------ what is told

    def _forged(self, link: Link, error: Exception) -> Refusal:
        link.reset()
        return self.forged(link.instance, CONTROL_PORT, error)

    def forged(self, instance: str, port: int, error: Exception) -> Refusal:
        """Each ends its stream and is counted; one that forges all day fills no journal."""
        until, count = self._forgeries.get(instance, (0.0, 0))
        count += 1
        if self._now() >= until:
            facts: dict[str, Fact] = {"port": port, "count": count, "why": str(error)[:200]}
            self.note(instance, "forgery-refused", facts)
            until, count = self._now() + FORGED_S, 0
        self._forgeries[instance] = (until, count)
        return Refusal(Reason.CONNECTION_LOST, "the guest sent what no box-guest sends")

    def note(
        self,
        instance: str,
        kind: str,
        facts: dict[str, Fact],
        *,
        source: Literal["host-observed", "guest-channel"] = "host-observed",
        event_id: bytes | None = None,
    ) -> None:
        self._notes.put(
            Note(
                event_id=event_id or os.urandom(16),
                instance=instance,
                source=source,
                kind=kind,
                facts=facts,
            )
        )

    def _claimed(self, instance: str, id: bytes, kind: str, facts: dict[str, Fact]) -> None:
        """What a harness says, and what came of it."""
        self._notes.put(
            Note(event_id=id, instance=instance, source="agent-reported", kind=kind, facts=facts)
        )

    async def _on_record(self, instance: str, claim: Claim, event_id: bytes) -> None:
        """Raises Refusal: it is not on record, and the guest shall keep it."""
        note = Note(
            event_id=event_id,
            instance=instance,
            source="guest-channel",
            kind=claim.kind,
            facts=dict(claim.facts),
        )
        try:
            await self._send(note)
        except Refusal as refusal:
            raise Refusal(Reason.UNAVAILABLE, refusal.message) from None

    async def _send(self, note: Note) -> None:
        await self._context.client("registry").call("note", note, deadline_s=NOTE_S)

    def _not_noted(self, note: Note, why: str) -> None:
        self._context.log.warning("a note was lost", kind=note.kind, why=why)

    def _unkept(self, error: OSError) -> None:
        self._context.log.warning("guests are not kept over a restart", why=error.strerror)
