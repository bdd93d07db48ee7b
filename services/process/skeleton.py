"""The life of a service: what every `__main__` calls.

    skeleton.run(CONTRACT, build)

In this order: refuse uid 0, close the inner walls, be alone, read keys and policy, build,
bind, start, say ready. Then wait for the end, which is one of four:
- SIGTERM or a call of `drain`: nothing new is taken, what has begun is finished, exit 0;
- a defect outside of a call (a task that failed, a callback that raised): logged under an
  id, exit 1, and the supervisor starts it again;
- the end of the supervisor, at once and whatever is under way (`lifeline`);
- something that no new start can mend (root, no wall, no keys, a bad policy): one line, exit
  71, and the supervisor leaves it down.

How often a service died is counted where it is seen, in the supervisor (`watch`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

from agent_box.bus import base, policy
from agent_box.bus.aclient import AsyncClient
from agent_box.bus.keys import KeyPair, KeysError, load_all_public, load_secret
from agent_box.bus.outcomes import Outcomes
from agent_box.bus.schema import Contract
from agent_box.bus.server import Handler, Server, StreamHandler
from agent_box.bus.wire import EPOCH_BYTES
from agent_box.process import confine, inside, lifeline
from agent_box.process.log import Log, install
from agent_box.process.paths import ROLES, Paths, PathsError
from agent_box.process.tasks import TaskSet

EXIT_FAILED: Final = 1
EXIT_FATAL: Final = 71  # starting it again cannot help
DRAIN_SECONDS: Final = 6.0  # less than the supervisor waits before it kills
CLOSE_SECONDS: Final = 2.0
# A caller with ZMQ_IMMEDIATE loses what it has received and not yet read when the connection
# ends (measured: always when it is slow, a third of the time on a busy host). So the last
# answers get a moment to be read; nothing tells when they were.
LAST_WORDS_SECONDS: Final = 0.15
ALONE_SECONDS: Final = 5.0  # for the last process of the same service to be gone
LOCK_FILE: Final = "lock"


class CannotServe(Exception):
    """No new start of this service can help. One line for a person; exit code 71."""


class Service(Protocol):
    """What `build` gives: one service, not yet at work.

    Attributes:
        handlers: one for each method and stream of the contract.
        outcomes: needed when the contract has a `Kind.ONCE` method.
    """

    @property
    def handlers(self) -> Mapping[str, Handler | StreamHandler]: ...

    @property
    def outcomes(self) -> Outcomes | None: ...

    async def start(self) -> None:
        """Gets to where it can work. When it returns, `Hello.ready` is true and the calls
        that came meanwhile begin. It must not wait for other services for ever."""

    async def stop(self) -> None:
        """Closes what it holds. Called once, after the last call ended, even when `start`
        did not end well."""


class Context:
    """What a service is given.

    Attributes:
        paths: where everything lies; the service sees its own part of it.
        config: the config file, None when there is none or the wall shows it none.
        options: further options of the command line, by name without dashes.
        epoch: 16 random bytes, new at each start.
        log: its log.
        tasks: where its background work runs; the failure of one ends the process.
        secret: the key pair of its role.
        public_keys: of all roles.
    """

    def __init__(
        self,
        contract: Contract,
        paths: Paths,
        config: Path | None,
        options: Mapping[str, str],
        log: Log,
        tasks: TaskSet,
        secret: KeyPair,
        public_keys: Mapping[str, bytes],
    ) -> None:
        self.contract = contract
        self.paths = paths
        self.config = config
        self.options = options
        self.epoch = os.urandom(EPOCH_BYTES)
        self.log = log
        self.tasks = tasks
        self.secret = secret
        self.public_keys = public_keys
        self._server: Server | None = None
        self._clients: dict[str, AsyncClient] = {}
        self._problem: str | None = None

    @property
    def data(self) -> Path:
        """The only directory in which it may keep anything."""
        return self.paths.data(self.contract.service)

    @property
    def server(self) -> Server:
        """The bus server; there is one from `Service.start` on.

        Raises:
            RuntimeError: it is asked for in `build`.
        """
        if self._server is None:
            raise RuntimeError("there is no server yet: use it from start() on")
        return self._server

    @property
    def problem(self) -> str | None:
        """One line for `hello`: why it does not work, or works in part. None: all is well."""
        return self._problem

    @problem.setter
    def problem(self, line: str | None) -> None:
        self._problem = line
        if self._server is not None:
            self._server.problem = line

    def client(self, service: str) -> AsyncClient:
        """The client of another service, made at first use; there is one from `start` on.

        Raises:
            ValueError: the wall does not declare that this service calls that one.
        """
        if service not in self.contract.wall.calls:
            raise ValueError(f"the wall of {self.contract.service} shows no {service}")
        server = self.server
        if service not in self._clients:
            callee: Contract = import_module(f"agent_box.{service}.contract").CONTRACT
            self._clients[service] = AsyncClient(
                self.contract.service,
                service,
                sock=self.paths.sock(service),
                secret=self.secret,
                server_key=self.public_keys[service],
                contract=callee,
                context=server.gate.context,
            )
        return self._clients[service]

    def close_clients(self) -> None:
        for client in self._clients.values():
            client.close()

    def serve(self, server: Server) -> None:
        """Called by the skeleton."""
        self._server = server
        server.problem = self._problem


Build = Callable[[Context], Service]


@dataclass(frozen=True)
class Arguments:
    paths: Paths
    config: Path | None
    inner_filter: int
    options: Mapping[str, str]


def parse(words: Sequence[str]) -> Arguments:
    """Reads what `confine.arguments` wrote: pairs of ``--name value``.

    Raises:
        CannotServe: a pair is torn, stands twice or is missing.
    """
    names, values = words[0::2], words[1::2]
    options = {name[2:]: value for name, value in zip(names, values, strict=False)}
    if len(names) != len(values) or len(options) != len(names):
        raise CannotServe("the command line is not made of pairs, each once")
    if not all(name.startswith("--") and name[2:] for name in names):
        raise CannotServe("the command line is not made of --name value")
    try:
        runtime, state = options.pop("runtime"), options.pop("state")
        inner_filter = int(options.pop("inner-filter"))
        paths = Paths.checked(Path(runtime), Path(state))
    except KeyError as missing:
        raise CannotServe(f"--{missing.args[0]} is missing") from None
    except (ValueError, PathsError) as error:
        raise CannotServe(str(error)) from None
    config = options.pop("config", None)
    return Arguments(paths, None if config is None else Path(config), inner_filter, options)


def run(contract: Contract, build: Build) -> NoReturn:
    """Lives the life of a service, and ends the process.

    Args:
        contract: the service's own.
        build: makes it from its context. It may raise `CannotServe`.
    """
    asked = _Asked()
    log = Log(service=contract.service)
    install(log)
    try:
        sys.exit(_live(contract, build, asked, log))
    except CannotServe as error:
        log.error("cannot serve", why=str(error))
        sys.exit(EXIT_FATAL)


class _Asked:
    """Notices SIGTERM from the first moment on; until now it was ignored."""

    def __init__(self) -> None:
        self.stop = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _note(self, _number: int, _frame: object) -> None:
        self.stop = True


def _live(contract: Contract, build: Build, asked: _Asked, log: Log) -> int:
    if 0 in (os.getuid(), os.geteuid()):
        raise CannotServe("nothing that serves runs as root: run agent-box as an ordinary user")
    os.umask(0o077)
    arguments = parse(sys.argv[1:])
    try:
        wanted = confine.profile(contract, arguments.paths, arguments.config)
        entered = inside.enter(wanted, arguments.inner_filter)
        _lock = lifeline.alone(
            arguments.paths.data(contract.service) / LOCK_FILE, seconds=ALONE_SECONDS
        )
        keys = load_secret(arguments.paths.keys(contract.service))
        public_keys = load_all_public(arguments.paths.public_keys, ROLES)
        grants = policy.load(None, (contract,))
    except (confine.ConfineError, inside.EnterError, KeysError, policy.PolicyError) as error:
        raise CannotServe(str(error)) from error
    except lifeline.Busy as error:
        log.error("not alone", why=str(error))
        return EXIT_FAILED
    with asyncio.Runner() as runner:
        return runner.run(
            _serve(contract, build, arguments, asked, log, keys, public_keys, grants, entered)
        )


async def _serve(
    contract: Contract,
    build: Build,
    arguments: Arguments,
    asked: _Asked,
    log: Log,
    keys: KeyPair,
    public_keys: Mapping[str, bytes],
    grants: policy.Policy,
    entered: inside.Entered,
) -> int:
    end = _End(log)
    end.listen(asked)
    tasks = TaskSet(log, end.task_failed)
    context = Context(
        contract,
        arguments.paths,
        arguments.config,
        arguments.options,
        log,
        tasks,
        keys,
        public_keys,
    )
    service = build(context)
    try:
        server = Server(
            contract,
            sock=arguments.paths.sock(contract.service),
            secret=keys,
            public_keys=public_keys,
            policy=grants,
            epoch=context.epoch,
            handlers=service.handlers,
            outcomes=service.outcomes,
            log=log,
            confinement=lambda: base.Confinement(**inside.facts(entered)),
        )
    except ValueError as error:  # handlers and contract do not belong together
        raise CannotServe(str(error)) from error
    context.serve(server)
    await server.start()
    log.info("started", epoch=context.epoch.hex(), landlock_abi=entered.landlock_abi)

    async def start() -> None:
        await service.start()
        if not server.draining:
            server.set_ready()
            log.info("ready", problem=context.problem)

    async def drain_when_asked() -> None:
        await server.drain_asked.wait()
        end.asked()

    starting = tasks.hold(start(), name="start")
    tasks.spawn(drain_when_asked(), name="drain")
    failed = await end.reached()
    server.drain()
    if not failed and not await _within(DRAIN_SECONDS, server.drained()):
        log.warning("what was under way did not end in time", seconds=DRAIN_SECONDS)
    starting.cancel()
    if not failed:
        await asyncio.sleep(LAST_WORDS_SECONDS)
    if not await _within(CLOSE_SECONDS, service.stop()):
        log.warning("the service did not stop in time", seconds=CLOSE_SECONDS)
    await tasks.cancel()
    context.close_clients()
    await server.close()
    log.info("ended", failed=failed)
    return EXIT_FAILED if failed else 0


class _End:
    """Which of the ends comes first."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._reached = self._loop.create_future()

    def listen(self, asked: _Asked) -> None:
        """Takes the signals over from `asked`, without a gap, and the loop's complaints."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.asked)
        if asked.stop:
            self.asked()
        if lifeline.hangs_on_it():
            self._loop.add_reader(lifeline.STDIN, self._lifeline)
        self._loop.set_exception_handler(self._loop_failed)

    def asked(self) -> None:
        self._reach(failed=False)

    def task_failed(self, _name: str, _error: BaseException) -> None:
        self._reach(failed=True)

    async def reached(self) -> bool:
        """Waits for the end. True: because of a defect."""
        return bool(await self._reached)

    def _reach(self, *, failed: bool) -> None:
        if not self._reached.done():
            self._reached.set_result(failed)

    def _lifeline(self) -> None:
        if not os.read(lifeline.STDIN, 4096):
            os._exit(EXIT_FAILED)  # nobody reads our log any more

    def _loop_failed(self, _loop: asyncio.AbstractEventLoop, what: dict[str, Any]) -> None:
        message = what.get("message", "")
        error = what.get("exception")
        if "transport" in what or "protocol" in what:
            # One connection, which asyncio has closed: no reason to end all others.
            self._log.error("a connection failed", error=error, what=message)
            return
        self._log.error("uncaught exception in the loop", error=error, what=message)
        self._reach(failed=True)


async def _within(seconds: float, work: Any) -> bool:
    """Whether `work` ended in time; it is cancelled when not."""
    try:
        await asyncio.wait_for(work, seconds)
    except TimeoutError:
        return False
    return True
