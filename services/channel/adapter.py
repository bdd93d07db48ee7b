"""The channel as it runs: guests are provisioned, kept on time and powered off.

Terminals, commands and the harness are refused until they are built; `MISSING` says so.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Final

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.schema import Empty
from agent_box.bus.server import Call, Handler, StreamHandler
from agent_box.channel import guests
from agent_box.channel.contract import CONTRACT, Guest, Provision, Provisioned
from agent_box.channel.control import clock
from agent_box.channel.guests import Forged, Link
from agent_box.channel.keeper import EVERY_S, LOOK_S, Clock, Kept
from agent_box.guest.wire import FrameError
from agent_box.process.skeleton import Context, Service, Unbuilt
from agent_box.registry.contract import Fact, Note

MISSING: Final = "this version has no terminals and no harness yet"
TIME_S: Final = 5.0
SKEW_MS: Final = 500  # over this the clock is set once more
NOTE_S: Final = 20.0
MARGIN_S: Final = 1.0  # of a call's deadline, for the answer


def build(context: Context) -> Service:
    """Makes the service."""
    return Channel(context)


class Channel(Unbuilt):
    """One channel."""

    def __init__(self, context: Context) -> None:
        super().__init__(CONTRACT, MISSING)
        self._context = context
        self._kept = Kept(context.data)
        self._links: dict[str, Link] = {}
        self._dials = guests.dials(context.paths.runtime)
        self._clock = Clock(time.time_ns(), time.monotonic_ns())
        self.handlers: Mapping[str, Handler | StreamHandler] = {
            **self.handlers,
            "provision": self.provision,
            "set_time": self.set_time,
            "poweroff": self.poweroff,
        }

    async def start(self) -> None:
        self._context.tasks.spawn(self._keep_time(), name="time")

    async def stop(self) -> None:
        for link in self._links.values():
            guests.end(link)
        self._dials.close()

    async def provision(self, request: Provision, call: Call) -> Provisioned:
        """Waits for the guest as long as the caller does."""
        link = self._link(request.instance, request.boot)
        until = time.monotonic() + max(0.0, call.remaining_s() - MARGIN_S)
        try:
            hello = await link.hello(until - time.monotonic())
            if hello.disk != "ok":
                raise Refusal(
                    Reason.DISK_DAMAGED,
                    f"the guest cannot use its data disk: {hello.disk_text}",
                    facts={"disk": hello.disk},
                )
            environment = [{"name": v.name, "value": v.value} for v in request.environment]
            fields = {
                "boot": request.boot,
                "hostname": request.hostname,
                "environment": environment,
                "files": [],
                "harness": request.harness,
                "hook": None,
                "sudo": request.sudo,
            }
            began = time.time_ns()
            untrusted = await link.ask("provision", fields, until - time.monotonic())
            skew = _skew(untrusted, began)
            if abs(skew) > SKEW_MS:
                skew = await self._set(link, until - time.monotonic())
        except (Forged, FrameError) as error:
            raise self._forged(link, error) from None
        self._kept.add(request.instance, request.boot)
        self._note(request.instance, "guest-ready", {"boot": request.boot, "skew_ms": skew})
        return Provisioned(version=hello.guest, skew_ms=skew)

    async def set_time(self, request: Guest, call: Call) -> Provisioned:
        link = self._link(request.instance, request.boot)
        left = max(0.0, call.remaining_s() - MARGIN_S)
        try:
            skew = await self._set(link, left)
            hello = await link.hello(left)
        except (Forged, FrameError) as error:
            raise self._forged(link, error) from None
        return Provisioned(version=hello.guest, skew_ms=skew)

    async def poweroff(self, request: Guest, call: Call) -> Empty:
        link = self._link(request.instance, request.boot)
        self._kept.drop(request.instance, request.boot)
        try:
            await link.ask("poweroff", {}, max(0.0, call.remaining_s() - MARGIN_S))
        except (Forged, FrameError) as error:
            raise self._forged(link, error) from None
        return Empty()

    # ------------------------------------------------------------------

    def _link(self, instance: str, boot: int) -> Link:
        link = self._links.get(instance)
        if link is None or link.boot != boot:
            if link is not None:
                guests.end(link)
            link = self._links[instance] = Link(self._dials, instance, boot)
        return link

    @staticmethod
    async def _set(link: Link, seconds: float) -> int:
        began = time.time_ns()
        return _skew(await link.ask("time", {}, seconds), began)

    async def _keep_time(self) -> None:
        """Every minute, and when the host's clock jumped, each guest gets the time."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if self._clock.jumped(time.time_ns(), time.monotonic_ns()) or loop.time() >= due:
                due = loop.time() + EVERY_S
                boots = list(self._kept.boots.items())
                await asyncio.gather(*(self._keep_one(name, boot) for name, boot in boots))
            await asyncio.sleep(LOOK_S)

    async def _keep_one(self, instance: str, boot: int) -> None:
        link = self._link(instance, boot)
        try:
            await self._set(link, TIME_S)
        except (Forged, FrameError) as error:
            self._forged(link, error)
        except Refusal as refusal:
            if refusal.reason in (Reason.NOT_FOUND, Reason.CONFLICT):
                self._kept.drop(instance, boot)  # that boot is over
                guests.end(link)
            # paused, or busy: it gets the time when it is resumed, or in a minute

    def _forged(self, link: Link, error: Exception) -> Refusal:
        guests.end(link)
        self._note(link.instance, "forgery-refused", {"port": 5000, "why": str(error)[:200]})
        return Refusal(Reason.CONNECTION_LOST, "the guest sent what no box-guest sends")

    def _note(self, instance: str, kind: str, facts: dict[str, Fact]) -> None:
        note = Note(
            event_id=os.urandom(16),
            instance=instance,
            source="host-observed",
            kind=kind,
            facts=facts,
        )
        self._context.tasks.spawn(self._send(note), name="note")

    async def _send(self, note: Note) -> None:
        try:
            await self._context.client("registry").call("note", note, deadline_s=NOTE_S)
        except Refusal as refusal:
            self._context.log.warning("a note was lost", kind=note.kind, why=refusal.message)


def _skew(untrusted_reply: dict[str, object], began_ns: int) -> int:
    """The guest's clock against ours in ms, taking half of the round trip for the way."""
    return round((clock(untrusted_reply) - (began_ns + time.time_ns()) // 2) / 1e6)
