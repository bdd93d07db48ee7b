"""A guest's connection from its first byte to its last: each request through the gate.

This is the one place that calls the gate and the one place that begins an exchange. A request
is judged twice: by what it says itself, before anything is opened for it, and again when the
upstream is connected to and the store has answered.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import h11
import msgspec

from agent_box.broker import gate, git, lfs, usage
from agent_box.broker import head as heads
from agent_box.broker.exchange import Broken, Cut, Exchange, Refused, Rewrite, Stale
from agent_box.broker.guest import Gone, Guest
from agent_box.broker.head import Framing, Head
from agent_box.broker.ledger import Count, Ledger
from agent_box.broker.limits import Limits
from agent_box.broker.notes import Notes, Told
from agent_box.broker.prices import Prices
from agent_box.broker.refusal import Reason, Refuse
from agent_box.broker.tally import Ended, Tally
from agent_box.broker.upstream import Connection, Resolve, Unreachable, Upstream
from agent_box.broker.vault import Vault
from agent_box.bus.errors import Refusal
from agent_box.config.egress import BROKER_ZONE
from agent_box.config.model import METERED
from agent_box.process.log import Log
from agent_box.process.tasks import TaskSet

_serials: Final = itertools.count(1)
# Asking again changes nothing at the upstream (RFC 9110 section 9.2.2).
_REPEATABLE: Final = ("GET", "HEAD", "OPTIONS")
_UNCOUNTED: Final = Refuse(Reason.BUDGET, 503, "the request could not be counted")
_UPSTREAMS_MAX: Final = 64  # of a boot
_TOO_LONG: Final = Refuse(Reason.PUSH_COMMANDS, 413, "the push is too large")
_TOO_SLOW: Final = Refuse(Reason.PUSH_COMMANDS, 408, "what the body does was not told in time")


@dataclass(frozen=True, kw_only=True)
class Desk:
    """What all sessions of the broker share. `day` is today, in days since 1970 (UTC)."""

    limits: Limits
    vault: Vault
    ledger: Ledger
    notes: Notes
    prices: Callable[[], Prices]
    day: Callable[[], int]
    resolve: Resolve
    log: Log
    tasks: TaskSet


class Boot:
    """A running instance, and its connections to upstreams.

    Args:
        ca: text of each binding's `ca_file`, by the name of the file.
    """

    def __init__(self, running: gate.Running, ca: dict[str, str], desk: Desk) -> None:
        self.running: Final = running
        self.links: Final = lfs.Links(
            running.instance, running.boot, lambda: secrets.token_urlsafe(24)
        )
        self._ca: Final = ca
        self._desk: Final = desk
        self._upstreams: dict[tuple[str, gate.Way], Upstream] = {}

    def upstream(self, binding: str, way: gate.Way) -> Upstream:
        key = (binding, way)
        upstream = self._upstreams.get(key)
        if upstream is None:
            if len(self._upstreams) >= _UPSTREAMS_MAX:  # links of git-lfs lead to many hosts
                self._upstreams.pop(next(iter(self._upstreams))).close()
            pem = None if way.ca_file is None else self._ca[way.ca_file]
            desk = self._desk
            upstream = Upstream(way, pem, desk.limits, desk.resolve)
            self._upstreams[key] = upstream
        return upstream

    def prune(self) -> None:
        for upstream in self._upstreams.values():
            upstream.prune()

    def close(self) -> None:
        for upstream in self._upstreams.values():
            upstream.close()


class Session:
    """Args:
    socket: id of the instance whose socket the connection came in on.
    boot: of that instance now, None when it does not run.
    """

    def __init__(
        self, guest: Guest, socket: str, boot: Callable[[], Boot | None], desk: Desk
    ) -> None:
        self._guest: Final = guest
        self._socket: Final = socket
        self._boot: Final = boot
        self._desk: Final = desk
        self._binding = ""  # of the request under way, when it is known
        self._route = ""
        self._kept: list[bytes] = []  # of its body, what was read before it was sent on
        self._continued = False

    async def run(self) -> None:
        """Serves until the guest is done or has to be cut off."""
        try:
            while await self._one():
                pass
            await self._guest.finish()
        except (Gone, Broken, h11.LocalProtocolError):
            self._guest.flush()  # what was in order; then it sees a reset
        except Cut as cut:
            self._note("reply-cut", f"reply-{cut.why}")
        finally:
            self._guest.close()

    async def _one(self) -> bool:
        """One request. Whether another may follow."""
        self._binding = self._route = ""
        self._kept, self._continued = [], False
        raw = await self._guest.head()
        if raw is None:
            return False
        if isinstance(raw, Refuse):
            return await self._refuse(raw, None)
        head = heads.parse(raw, next(_serials))
        if isinstance(head, Refuse):
            return await self._refuse(head, None)
        event = self._guest.begin(raw)
        if event is None or not heads.agrees(head, event):
            return await self._refuse(heads.DISAGREE, head)
        try:
            refused = await self._gated(head)
        except Refused as error:
            refused = error.refuse
        except Cut as cut:
            if self._guest.answered:
                raise
            self._note("reply-cut", f"reply-{cut.why}")
            refused = Refuse(Reason.REPLY_BAD, 502, "the upstream's reply was held back")
        if refused is not None:
            return await self._refuse(refused, head)
        return head.keep_alive and self._guest.again

    # ------------------------------------------------------------------ the gate

    async def _gated(self, head: Head) -> Refuse | None:
        """Judges, and has the exchange when it may be. None: the reply is complete."""
        boot = self._boot()
        facts = gate.Facts(
            socket=self._socket,
            running=None if boot is None else boot.running,
            peer=None,
            answer=None,
            commands=None,
            issued=None if boot is None else boot.links.find(head.target, time.monotonic()),
        )
        step = gate.judge(head, facts)
        if isinstance(step, Refuse):
            if boot is not None:
                self._binding = _named(head, boot.running)
            return step
        if isinstance(step, gate.Inject) or boot is None:
            raise AssertionError("leave was given before anything was known")
        self._binding, self._route = step.binding.name, _route(step)
        refused = self._budget(step)
        if refused is None and step.wants_commands:
            try:
                async with asyncio.timeout(self._desk.limits.transfer_s):
                    commands = await self._commands(head, step)
            except TimeoutError:
                commands = _TOO_SLOW
            if isinstance(commands, Refuse):
                return commands
            facts = msgspec.structs.replace(facts, commands=commands)
            judged = gate.judge(head, facts)
            refused = judged if isinstance(judged, Refuse) else None
        if refused is not None:
            return refused
        return await self._asked(head, facts, step, boot)

    async def _asked(
        self, head: Head, facts: gate.Facts, step: gate.Later, boot: Boot
    ) -> Refuse | None:
        upstream = boot.upstream(step.binding.name, step.way)
        again = False
        while True:
            try:
                connection = await upstream.take(fresh=again)
            except Unreachable as error:
                return error.refuse
            try:
                answer = await self._desk.vault.answer(head.serial, step.binding.credential)
                if isinstance(answer, Refuse):
                    return answer
                if self._boot() is not boot:
                    return Refuse(Reason.NOT_RUNNING, 503, "the instance was stopped")
                leave = gate.judge(head, facts.with_upstream(connection.peer, answer))
                if isinstance(leave, Refuse):
                    return leave
                if not isinstance(leave, gate.Inject):
                    raise AssertionError("all is known, and the gate wants to know more")
                if not again and (refused := self._counted(step)) is not None:
                    return refused
                exchange = self._exchange(head, leave, connection, _rewriting(boot, facts, leave))
                try:
                    await exchange.run()
                finally:
                    leave.credential.wipe()
                if exchange.reusable:
                    upstream.give(connection)
                return None
            except Stale:
                if again or head.framing is not Framing.NONE or head.method not in _REPEATABLE:
                    return Refuse(Reason.UPSTREAM_GARBAGE, 502, "the upstream hung up")
                again = True
            finally:
                if not upstream.holds(connection):
                    connection.close()

    def _counted(self, step: gate.Later) -> Refuse | None:
        """Counts the request, when it is within the budget still: others that were judged
        with it may have been counted meanwhile."""
        refused = self._budget(step)
        if refused is None and not self._count(Count(requests=1)):
            return _UNCOUNTED
        return refused

    def _budget(self, step: gate.Later) -> Refuse | None:
        if not usage.limited(step.binding):
            return None  # as nearly every one
        total = self._desk.ledger.total(self._socket, step.binding.name)
        spent = usage.Spent(
            requests=total.requests,
            tokens=total.tokens_in + total.tokens_out,
            cost=total.cost,
        )
        return usage.allowed(step.binding, spent, self._desk.prices())

    async def _commands(self, head: Head, step: gate.Later) -> git.Commands | lfs.Batch | Refuse:
        """Reads as much of a body as tells what it does, and keeps it."""
        if head.length is not None and head.length > git.PACK_MAX:
            return _TOO_LONG
        if head.expects_continue:
            await self._guest.send(h11.InformationalResponse(status_code=100, headers=[]))
            self._continued = True
        reader = gate.reader(head, step)
        while True:
            try:
                event = await self._guest.body()
            except h11.RemoteProtocolError:
                return Refuse(Reason.BODY_BAD, 400, "the body is not framed as its head says")
            if isinstance(event, h11.EndOfMessage):
                return reader.finish()
            part = bytes(event.data)
            self._kept.append(part)
            found = reader.feed(part)
            if found is not None:
                return found

    def _exchange(
        self, head: Head, leave: gate.Inject, connection: Connection, rewrite: Rewrite | None
    ) -> Exchange:
        return Exchange(
            head,
            leave,
            self._guest,
            connection,
            rewrite=rewrite,
            kept=self._kept,
            continued=self._continued,
            body_max=git.PACK_MAX if self._kept else None,
            tally=Tally(
                self._count,
                lambda meter, ended: self._measured(leave.binding.kind, head.method, meter, ended),
            ),
            limits=self._desk.limits,
            tasks=self._desk.tasks,
        )

    # ------------------------------------------------------------------ what is told

    async def _refuse(self, refuse: Refuse, head: Head | None) -> bool:
        kind = "nonce-refused" if refuse.reason.startswith("nonce-") else "request-refused"
        self._note(kind, str(refuse.reason))
        if self._binding:
            self._count(Count(refused=1))
        keep = (
            head is not None
            and head.framing is Framing.NONE
            and head.keep_alive
            and refuse is not heads.DISAGREE
        )
        method = "GET" if head is None else head.method
        if keep:
            keep = await self._guest.skip()
        await self._guest.refuse(refuse, method, keep=keep)
        if not keep:
            await self._guest.linger()
        return keep

    def _note(self, kind: str, reason: str) -> None:
        self._desk.notes.add(Told(self._socket, kind, self._binding, reason, self._route))

    def _count(self, count: Count) -> bool:
        """Whether it could be written."""
        try:
            self._desk.ledger.add(self._socket, self._binding, self._desk.day(), count)
        except Refusal as refusal:
            self._desk.log.warning("usage was not counted", why=refusal.message)
            return False
        return True

    def _measured(self, kind: str, method: str, meter: usage.Meter | None, ended: Ended) -> Count:
        """The tokens of an exchange, and what they cost. One that was left early has cost
        something all the same."""
        if meter is None and (ended.whole or kind not in METERED):
            return Count()
        told = usage.UNKNOWN if meter is None else meter.tokens()
        tokens = usage.charged(told, method, ended.bytes_up, ended.bytes_down)
        cost = self._desk.prices().cost(kind, tokens)
        total_in = tokens.input + tokens.cache_read + tokens.cache_write
        return Count(
            tokens_in=total_in,
            tokens_out=tokens.output,
            cost=cost or 0,
            unpriced=total_in + tokens.output if cost is None else 0,
        )


def _named(head: Head, running: gate.Running) -> str:
    """The binding whose endpoint a refused request called; empty when there is none."""
    hosts = head.get(b"host")
    names = {f"{name}.{BROKER_ZONE}".encode(): name for name in running.bindings}
    return names.get(hosts[0].lower(), "") if len(hosts) == 1 else ""


def _rewriting(boot: Boot, facts: gate.Facts, leave: gate.Inject) -> Rewrite | None:
    """How a reply has to be changed: that to a batch call of git-lfs, and no other."""
    batch, nonce = facts.commands, leave.running.nonces[leave.binding.name]
    if not isinstance(batch, lfs.Batch):
        return None
    return lambda body: boot.links.rewrite(body, batch, leave.binding, nonce, time.monotonic())


def _route(step: gate.Later) -> str:
    """The route as it is declared; nothing of it comes from the guest."""
    if isinstance(step.access, git.Access):
        repo = "" if step.access.repo is None else f"{step.access.repo.name} "
        return f"{repo}{step.access.service}"
    return step.access.path
