"""The broker as it runs: endpoints for the instances that the registry says are running.

What a boot was started with (its bindings as the config had them then, their CA files) is kept
in the broker's own database, so a start of the broker opens the same endpoints again and asks
nobody. A directory that is gone says that its machine is gone too.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from agent_box.broker import gate, kinds, nonces, prices
from agent_box.broker import key as keys
from agent_box.broker import ledger as ledgers
from agent_box.broker.contract import (
    Instance,
    InstanceUp,
    Nonce,
    Nonces,
    NoncesOf,
    Usage,
    UsageOf,
    Used,
)
from agent_box.broker.endpoint import SOCKET, Endpoint
from agent_box.broker.ledger import DAY_MS, Ledger
from agent_box.broker.limits import LIMITS, Limits
from agent_box.broker.notes import WINDOW_S, Notes
from agent_box.broker.prices import Prices
from agent_box.broker.session import Boot, Desk
from agent_box.broker.upstream import Resolve, resolve
from agent_box.broker.vault import ASK_S, Vault
from agent_box.bus.durable import Damaged
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.outbox import Outbox
from agent_box.bus.schema import Empty
from agent_box.bus.server import Call, Handler, StreamHandler
from agent_box.config.egress import BROKER_ZONE
from agent_box.config.errors import ConfigError
from agent_box.config.load import ca_path, load
from agent_box.config.model import Binding
from agent_box.process.skeleton import CannotServe, Context, Service
from agent_box.process.tasks import TaskSet
from agent_box.registry.contract import Note
from agent_box.store.contract import Reveal, Revealed

DATABASE: Final = "broker.db"
ROOMS: Final = ("vm", "broker")  # below the runtime directory, with a directory per instance
NOTE_S: Final = 20.0
LAST_S: Final = 1.0  # at the end, for what is still to be noted
TEND_S: Final = 5.0  # between looks at kept connections and held-back events
CA_MAX: Final = 1 << 20  # bytes of a CA file
_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A boot as the database keeps it."""

    name: str
    bindings: list[Binding]
    ca: dict[str, str]  # text of each `ca_file`, by its name


def build(context: Context) -> Service:
    """Makes the service.

    Raises:
        CannotServe: its key or its database cannot be used.
    """
    try:
        return Broker(context, keys.load(context.data), Ledger(context.data / DATABASE))
    except (keys.KeyRefused, Damaged) as error:
        raise CannotServe(str(error)) from None
    except (OSError, sqlite3.Error) as error:
        raise CannotServe(f"{context.data} cannot be used: {error}") from None


class Broker:
    """One broker.

    Args:
        key: of which nonces are made.
        limits, resolver: tests give others.
    """

    def __init__(
        self,
        context: Context,
        key: bytes,
        ledger: Ledger,
        limits: Limits = LIMITS,
        resolver: Resolve = resolve,
    ) -> None:
        self._context: Final = context
        self._key: Final = key
        self._ledger: Final = ledger
        self._notes: Final[Outbox[Note]] = Outbox(self._send, self._not_noted)
        self._told: Final = Notes(self._notes.put, time.monotonic)
        self._boots: dict[str, Boot] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._turn: Final = asyncio.Lock()
        self._prices: tuple[float, Prices] | None = None
        self._desk: Final = Desk(
            limits=limits,
            vault=Vault(self._reveal),
            ledger=ledger,
            notes=self._told,
            prices=self._price_table,
            day=lambda: time.time_ns() // 1_000_000 // DAY_MS,
            resolve=resolver,
            log=context.log,
            tasks=TaskSet(context.log),  # a defect ends one exchange, and is logged
        )
        self.outcomes = None
        self.handlers: Mapping[str, Handler | StreamHandler] = {
            "instance_up": self.instance_up,
            "instance_down": self.instance_down,
            "nonces": self.nonces,
            "usage": self.usage,
        }

    async def start(self) -> None:
        self._context.problem = self._ledger.damage
        await self._adopt()
        self._context.tasks.spawn(self._notes.run(), name="notes")
        self._context.tasks.spawn(self._tend(), name="tend")

    async def stop(self) -> None:
        for endpoint in self._endpoints.values():
            await endpoint.close()
        for boot in self._boots.values():
            boot.close()
        self._told.flush()
        await self._notes.flush(LAST_S)
        self._ledger.close()

    # ------------------------------------------------------------------ methods

    async def instance_up(self, request: InstanceUp, call: Call) -> Empty:
        """Again for the same boot, it changes nothing: a boot keeps what it was started with."""
        instance = _id(request.instance)
        async with self._turn:
            old = self._boots.get(instance)
            if old is not None and old.running.boot == request.boot:
                if sorted(old.running.declared) != sorted(request.bindings):
                    raise Refusal(
                        Reason.CONFLICT, f"boot {request.boot} was begun with other bindings"
                    )
                return Empty()
            if old is not None and old.running.boot > request.boot:
                raise Refusal(Reason.CONFLICT, f"boot {old.running.boot} was begun already")
            kept = await asyncio.to_thread(self._configured, request)
            body = msgspec.json.encode(kept)
            self._ledger.put_boot(
                ledgers.Boot(instance=instance, number=request.boot, body=body), request.name
            )
            await self._down(instance)
            await self._up(instance, request.boot, kept)
        return Empty()

    async def instance_down(self, request: Instance, call: Call) -> Empty:
        """No request of the boot is served from here on, even when a full disk remembers it:
        then this raises, and asking again ends the rest."""
        instance = _id(request.instance)
        async with self._turn:
            await self._down(instance)
            self._ledger.remove_boot(instance)
        return Empty()

    def nonces(self, request: NoncesOf, call: Call) -> Nonces:
        boot = self._boots.get(request.instance)
        if boot is None or boot.running.boot != request.boot:
            raise Refusal(Reason.NOT_FOUND, "this boot of the instance has no endpoints")
        running = boot.running
        return Nonces(
            nonces=[
                Nonce(
                    binding=name,
                    kind=running.bindings[name].kind,
                    endpoint=f"http://{name}.{BROKER_ZONE}",
                    nonce=running.nonces[name],
                    place=_place(running.bindings[name]),
                    repos=[repo.name for repo in running.bindings[name].repos],
                    upstream=_origin(running.bindings[name]),
                )
                for name in sorted(running.declared)
            ]
        )

    def usage(self, request: UsageOf, call: Call) -> Usage:
        rows = self._ledger.rows(request.instance, request.since_day)
        return Usage(
            currency=self._price_table().currency,
            refused_nonces=self._told.refused,
            used=[
                Used(
                    instance=row.instance,
                    name=row.name,
                    binding=row.binding,
                    day=row.day,
                    **vars(row.count),
                )
                for row in rows
            ],
        )

    # ------------------------------------------------------------------ boots

    async def _adopt(self) -> None:
        """Opens again what was open when the broker ended."""
        for boot in self._ledger.boots():
            if not self._room(boot.instance).is_dir():
                self._ledger.remove_boot(boot.instance)
                continue
            try:
                kept = msgspec.json.decode(boot.body, type=Kept)
                await self._up(boot.instance, boot.number, kept)
            except (msgspec.DecodeError, Refusal) as error:
                # One that cannot be read is one instance without endpoints, and says so.
                self._context.log.error("a boot was not adopted", error=error)
                self._context.problem = f"the endpoints of {boot.instance} could not be opened"
        above = self._context.paths.runtime.joinpath(*ROOMS)
        rooms = [room.name for room in above.iterdir()] if above.is_dir() else []
        for instance in set(filter(_ID.fullmatch, rooms)) - self._boots.keys():
            await self._down(instance)

    async def _up(self, instance: str, number: int, kept: Kept) -> None:
        bindings = {binding.name: binding for binding in kept.bindings}
        running = gate.Running(
            instance=instance,
            name=kept.name,
            boot=number,
            declared=tuple(bindings),
            bindings=bindings,
            nonces={name: nonces.make(self._key, instance, name, number) for name in bindings},
        )
        endpoint = Endpoint(
            self._room(instance), instance, lambda: self._boots.get(instance), self._desk
        )
        try:
            await endpoint.open()
        except OSError as error:
            raise Refusal(
                Reason.EXHAUSTED, f"the endpoint's socket cannot be made: {error.strerror}"
            ) from error
        self._boots[instance] = Boot(running, kept.ca, self._desk)
        self._endpoints[instance] = endpoint
        self._context.log.info("up", instance=instance, boot=number, bindings=sorted(bindings))

    async def _down(self, instance: str) -> None:
        """Ends what runs of a boot. A socket that a killed broker left goes as well."""
        boot = self._boots.pop(instance, None)
        endpoint = self._endpoints.pop(instance, None)
        if endpoint is not None:
            await endpoint.close()
        (self._room(instance) / SOCKET).unlink(missing_ok=True)
        if boot is not None:
            boot.close()
            self._context.log.info("down", instance=instance, boot=boot.running.boot)

    def _room(self, instance: str) -> Path:
        return self._context.paths.runtime.joinpath(*ROOMS, instance)

    def _configured(self, request: InstanceUp) -> Kept:
        """The bindings as the config file has them now.

        Raises:
            Refusal: the file cannot be read, lacks one, or has one that is not built yet.
        """
        found: list[Binding] = []
        ca: dict[str, str] = {}
        try:
            config = load(self._context.config)
            for name in request.bindings:
                binding = config.bindings.get(name)
                if binding is None:
                    raise Refusal(
                        Reason.NOT_FOUND, f"the config has no binding {name}", facts={"name": name}
                    )
                if binding.kind in kinds.UNBUILT:
                    raise Refusal(
                        Reason.ENGINE_UNAVAILABLE,
                        f"binding {name} is of kind {binding.kind}, which is not built yet",
                    )
                found.append(binding)
                path = None
                if self._context.config is not None:
                    path = ca_path(binding, self._context.config)
                if path is not None and binding.ca_file is not None:
                    ca[binding.ca_file] = _ca_text(path)
        except ConfigError as error:
            raise Refusal(Reason.CONFIG_INVALID, str(error)) from None
        except OSError as error:
            raise Refusal(Reason.CONFIG_INVALID, f"a ca_file cannot be read: {error}") from None
        return Kept(name=request.name, bindings=found, ca=ca)

    # ------------------------------------------------------------------ the rest

    def _price_table(self) -> Prices:
        """The table as it is on the disk, looked at again after some seconds."""
        now = time.monotonic()
        if self._prices is None or now > self._prices[0]:
            try:
                table = prices.load(self._context.config)
            except ConfigError as error:
                self._context.log.warning("the price table is not read", why=str(error))
                table = prices.NONE if self._prices is None else self._prices[1]
            self._prices = (now + TEND_S, table)
        return self._prices[1]

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(min(TEND_S, WINDOW_S))
            self._told.sweep()
            for boot in self._boots.values():
                boot.prune()

    async def _reveal(self, request: Reveal) -> Revealed:
        reply = await self._context.client("store").call("reveal", request, deadline_s=ASK_S)
        assert isinstance(reply, Revealed)
        return reply

    async def _send(self, note: Note) -> None:
        await self._context.client("registry").call("note", note, deadline_s=NOTE_S)

    def _not_noted(self, note: Note, why: str) -> None:
        self._context.log.warning("a note was lost", kind=note.kind, why=why)


def _id(untrusted: str) -> str:
    """An instance's id, which becomes the name of a directory."""
    if not _ID.fullmatch(untrusted):
        raise Refusal(Reason.BAD_REQUEST, "an instance's id has 32 hexadecimal digits")
    return untrusted


def _ca_text(path: Path) -> str:
    text = path.read_bytes()[: CA_MAX + 1]
    if len(text) > CA_MAX or b"-----BEGIN CERTIFICATE-----" not in text:
        raise Refusal(Reason.CONFIG_INVALID, f"{path} holds no certificate")
    return text.decode("ascii", "replace")


def _place(binding: Binding) -> str:
    """The name of what carries the nonce, for kinds where the config names it."""
    return binding.header or binding.query or binding.basic_user or ""


def _origin(binding: Binding) -> str:
    upstream = binding.upstream
    usual = {"https": 443, "http": 80}[upstream.scheme]
    host = f"[{upstream.host}]" if ":" in upstream.host else upstream.host
    return f"{upstream.scheme}://{host}" + ("" if upstream.port == usual else f":{upstream.port}")
