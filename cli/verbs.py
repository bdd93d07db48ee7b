"""Every verb, its arguments and whether it is built: the one list.

The parser, the help, the completion and docs/cli.md come from this table, so none of them
can know a verb or a flag that another does not. `--json` and `--help` are every verb's and
are not repeated. To add a verb, see the top of `main`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from agent_box.cli import values
from agent_box.cli.render import Usage

SERVICES: Final = ("registry", "store", "broker", "netstack", "channel", "engine")
PROGRAMS: Final = (*SERVICES, "helper")


class Arg(NamedTuple):
    """One argument. `flag` is empty for a positional; `parse` is None for a switch."""

    dest: str  # the keyword of the body
    flag: str
    metavar: str
    parse: values.Parser | None
    help: str
    required: bool = False
    many: bool = False  # positional: any number of words; option: may be repeated
    default: str | None = None  # as if it had been written
    complete: str = ""  # whose names complete it: a key of `completion`, or "files"
    private: bool = False  # a refusal does not repeat what was given


class Verb(NamedTuple):
    """One verb.

    Attributes:
        name: with its group, e.g. ``policy show``.
        section: the heading in `agent-box --help`.
        summary: one line, at most 60 characters.
        body: ``module:function`` in `agent_box.cli`, or empty.
        entry: the capability that is missing while there is no body; then the verb exits 70.
        check: refuses combinations that the single arguments allow, with `Usage`.
        detail: more paragraphs for the verb's own help.
        streams: with `--json`, one object per line and an end line, instead of one object:
            ``always``, or with ``--follow`` alone (``follow``).
    """

    name: str
    section: str
    summary: str
    args: tuple[Arg, ...] = ()
    body: str = ""
    entry: str = ""
    check: Callable[[Mapping[str, Any]], None] | None = None
    detail: str = ""
    streams: str = ""


def positional(
    metavar: str,
    parse: values.Parser,
    help: str,
    *,
    dest: str = "",
    optional: bool = False,
    many: bool = False,
    complete: str = "",
) -> Arg:
    return Arg(
        dest or metavar.lower(),
        "",
        metavar,
        parse,
        help,
        required=not optional,
        many=many,
        complete=complete,
    )


def option(
    flag: str,
    metavar: str,
    parse: values.Parser,
    help: str,
    *,
    many: bool = False,
    default: str | None = None,
    complete: str = "",
) -> Arg:
    dest = flag.strip("-").replace("-", "_")
    return Arg(dest, flag, metavar, parse, help, many=many, default=default, complete=complete)


def switch(flag: str, help: str) -> Arg:
    return Arg(flag.strip("-").replace("-", "_"), flag, "", None, help)


# ---------------------------------------------------------------- combinations


def _attach(given: Mapping[str, Any]) -> None:
    if given["user"] == "root" and not given["shell"]:
        raise Usage("attach: --user root needs --shell")
    if given["list"] and (given["shell"] or given["terminal"] is not None):
        raise Usage("attach: --list stands alone")
    if given["shell"] and given["terminal"] is not None:
        raise Usage("attach: --shell opens a new terminal, --terminal joins one; give one of them")
    if given["env"] and not given["shell"]:
        raise Usage("attach: --env goes with --shell")


def _run(given: Mapping[str, Any]) -> None:
    ways = (given["prompt"] is not None, given["follow"], given["list"])
    if sum(ways) != 1:
        raise Usage("run: give one of --prompt TEXT, --follow and --list")
    if given["list"] and (given["start"] or given["session"] or given["timeout"] is not None):
        raise Usage("run: --list stands alone")
    if given["follow"] and (given["start"] or given["session"] is not None):
        raise Usage("run: --follow takes neither --start nor --session")
    if given["follow"] and given["timeout"] is not None:
        raise Usage("run: a run has its --timeout from its beginning; --follow takes none")


def _forward(given: Mapping[str, Any]) -> None:
    ways = (given["forward"] is not None, given["list"], given["remove"] is not None)
    if sum(ways) != 1:
        raise Usage("forward: give one of [ADDR:]HOSTPORT:GUESTPORT, --list and --remove")
    if given["forward"] is None:
        if given["public"]:
            raise Usage("forward: --public goes with [ADDR:]HOSTPORT:GUESTPORT")
        return
    address = given["forward"].address
    if not given["public"] and address != "::1" and not address.startswith("127."):
        raise Usage(f"forward: {address} is not a loopback address; it needs --public")


def _policy_set(given: Mapping[str, Any]) -> None:
    changes = bool(given["mode"] or given["allow"] or given["remove"])
    ways = (given["policy"] is not None, changes, given["file"] is not None, given["reset"])
    if sum(ways) != 1:
        raise Usage(
            "policy set: give one of POLICY, --file, --reset, or changes by --mode, --allow "
            "and --remove"
        )


def _logs(given: Mapping[str, Any]) -> None:
    if given["verify"] or given["head"]:
        if given["verify"] and given["head"]:
            raise Usage("logs: give one of --verify and --head")
        if given["follow"] or given["since"] is not None or given["tail"] is not None:
            raise Usage("logs: --verify and --head look at the whole journal; no other flag")


def _uninstall(given: Mapping[str, Any]) -> None:
    if given["system"] and (given["purge"] or given["delete_instances"]):
        raise Usage("uninstall: --purge and --delete-instances are of the user part")


def _setup(given: Mapping[str, Any]) -> None:
    if given["user"] is not None and not given["system"]:
        raise Usage("setup: --user goes with --system")
    for flag in ("no_pull", "no_unit"):
        if given[flag] and given["system"]:
            raise Usage(f"setup: --{flag.replace('_', '-')} is of the user part")


# ------------------------------------------------------------------- the table

NAME: Final = positional("NAME", values.name, "the instance", complete="instances")
NEW: Final = positional("NAME", values.name, "the name of the new instance")
TARGET: Final = positional(
    "NAME[:/path]",
    values.place,
    "the instance, and a directory in it",
    dest="target",
    complete="instances",
)
VARIANTS: Final = positional(
    "VARIANT", values.name, "image variants", dest="variants", optional=True, many=True
)
CREDENTIAL: Final = positional(
    "NAME", values.credential, "the credential", complete="credentials"
)._replace(private=True)  # who types the value here by mistake shall not find it in a log
SERVICE: Final = positional("NAME", values.OneOf(*SERVICES), "the service")

INSTANCES: Final = "Instances"
WORK: Final = "Work in an instance"
NETWORK: Final = "Network and policy"
CREDENTIALS: Final = "Credentials"
IMAGES: Final = "Images"
HOST: Final = "This host"

VERBS: Final[tuple[Verb, ...]] = (
    # -- instances
    Verb(
        "create",
        INSTANCES,
        "Creates an instance; does not start it.",
        (
            NEW,
            option(
                "--profile",
                "P",
                values.name,
                "template; else [defaults] profile, else default",
                complete="profiles",
            ),
            option("--cpus", "N", values.integer(1, 64), "virtual CPUs"),
            option("--memory", "SIZE", values.memory, "memory, e.g. 4G"),
            option("--disk", "SIZE", values.disk, "data disk, sparse, e.g. 30G"),
        ),
        body="instances:create",
    ),
    Verb("list", INSTANCES, "One row per instance.", body="instances:list_instances"),
    Verb(
        "inspect",
        INSTANCES,
        "The full record of an instance.",
        (NAME,),
        body="instances:inspect",
    ),
    Verb(
        "start",
        INSTANCES,
        "Cold boot from the data disk.",
        (NAME, switch("--no-hook", "do not run the project hook this time")),
        body="lifecycle:start",
    ),
    Verb(
        "stop",
        INSTANCES,
        "Powers the guest off; kills it when the grace passes.",
        (
            NAME,
            option(
                "--grace", "SECONDS", values.integer(0, 3600), "else [daemon] stop_grace_seconds"
            ),
        ),
        body="lifecycle:stop",
    ),
    Verb("pause", INSTANCES, "Freezes the vCPUs; memory stays.", (NAME,), body="lifecycle:pause"),
    Verb("resume", INSTANCES, "Unfreezes the vCPUs.", (NAME,), body="lifecycle:resume"),
    Verb(
        "hibernate",
        INSTANCES,
        "Writes a snapshot to disk and stops.",
        (NAME,),
        entry="snapshot",
    ),
    Verb(
        "delete",
        INSTANCES,
        "Removes an instance and verifies each absence.",
        (NAME, switch("--force", "also when it is running, paused or unknown")),
        body="lifecycle:delete",
    ),
    Verb(
        "logs",
        INSTANCES,
        "The event log: of an instance, or of everything.",
        (
            positional(
                "NAME",
                values.name,
                "only of this instance",
                optional=True,
                complete="instances",
            ),
            switch("--follow", "go on with new events until interrupted"),
            option("--since", "TIME", values.moment, "RFC 3339, or so long ago: 90s, 15m, 2h, 7d"),
            option("--tail", "N", values.integer(0, 1_000_000), "only the last N"),
            option("--source", "SOURCE", values.OneOf(*values.SOURCES), ", ".join(values.SOURCES)),
            switch("--verify", "check the hash chain of the journal"),
            switch("--head", "print the head of the chain, to be kept elsewhere"),
        ),
        body="logs:logs",
        check=_logs,
        streams="follow",
        detail="With --json it prints one object; with --follow, one object per line.",
    ),
    # -- work
    Verb(
        "attach",
        WORK,
        "A terminal in the instance.",
        (
            TARGET,
            switch("--shell", "a new login shell instead of the harness's own program"),
            option(
                "--user",
                "USER",
                values.OneOf("agent", "root"),
                "agent or root; root needs --shell",
                default="agent",
            ),
            option(
                "--detach-keys",
                "KEYS",
                values.detach_keys,
                "keys joined by commas",
                default=values.DEFAULT_DETACH_KEYS,
            ),
            option("--terminal", "ID", values.terminal, "join this terminal"),
            switch("--list", "list the terminals"),
            option(
                "--env", "K=V", values.environment, "set a variable; may be repeated", many=True
            ),
        ),
        body="terminal:attach",
        check=_attach,
        detail=(
            "Exits with the status of the program, 128 plus the signal, or 0 when detached; a "
            "terminal that was left goes on, and --terminal joins it. Without --shell it opens "
            "the harness's own program for terminals, where it has one."
        ),
    ),
    Verb(
        "exec",
        WORK,
        "Runs a command without a terminal.",
        (
            TARGET,
            option(
                "--user", "USER", values.OneOf("agent", "root"), "agent or root", default="agent"
            ),
            option(
                "--env", "K=V", values.environment, "set a variable; may be repeated", many=True
            ),
            option("--timeout", "SECONDS", values.integer(1, 31_536_000), "then exit 124"),
            switch("--tty", "give the command a terminal"),
            positional(
                "CMD", values.argument, "the command and its arguments", dest="command", many=True
            ),
        ),
        body="command:exec_command",
        streams="always",
        detail=(
            "Exits with the status of the command, or 128 plus the signal that ended it; stdin, "
            "stdout and stderr are its own, and signals are passed on."
        ),
    ),
    Verb(
        "run",
        WORK,
        "Sends one prompt to the harness; streams its events.",
        (
            TARGET,
            option("--prompt", "TEXT", values.text, "the prompt; - reads stdin"),
            option(
                "--timeout", "SECONDS", values.integer(1, 31_536_000), "then cancel and exit 21"
            ),
            option("--session", "ID", values.session, "go on with this session"),
            switch("--start", "start a stopped instance first"),
            switch("--follow", "rejoin the live run"),
            switch("--list", "list the runs that are kept, and their sessions"),
        ),
        body="run:run",
        check=_run,
        streams="always",
        detail=(
            "The reply goes to stdout, tool calls to stderr. Ctrl-C cancels. A run goes on when "
            "this program or the channel service ends; --follow shows it from its beginning."
        ),
    ),
    Verb(
        "usage",
        WORK,
        "Requests, bytes, tokens and cost.",
        (
            NAME._replace(required=False),
            option("--since", "TIME", values.moment, "RFC 3339, or so long ago: 90s, 15m, 2h, 7d"),
        ),
        body="usage:show",
        detail="Whole days, in UTC. Costs need a prices.toml beside the config file.",
    ),
    # -- network
    Verb(
        "policy show",
        NETWORK,
        "The effective egress policy of an instance.",
        (NAME,),
        body="policy:show",
    ),
    Verb(
        "policy set",
        NETWORK,
        "Changes the policy of an instance, live.",
        (
            NAME,
            positional(
                "POLICY",
                values.name,
                "a policy of the config file",
                optional=True,
                complete="policies",
            ),
            option(
                "--mode",
                "MODE",
                values.OneOf("deny", "allowlist", "open"),
                "deny, allowlist or open",
            ),
            option(
                "--allow",
                "RULE",
                values.rule,
                "HOST[:PORTS][/udp] or CIDR[:PORTS][/udp]; may be repeated",
                many=True,
            ),
            option(
                "--remove",
                "RULE",
                values.removal,
                "take away what allows it, or the rule of that id; may be repeated",
                many=True,
            ),
            option("--file", "FILE", values.text, "a TOML file with one policy", complete="files"),
            switch("--allow-open", "yes, mode open"),
            switch("--allow-reserved", "yes, a rule into a reserved range"),
            switch("--reset", "drop all changes; the config's policy applies"),
        ),
        body="policy:set_policy",
        check=_policy_set,
    ),
    Verb(
        "policy check",
        NETWORK,
        "Whether a destination is allowed: exit 0, else 1.",
        (
            NAME,
            positional(
                "HOST[:PORT]", values.destination, "port 443 when left out", dest="destination"
            ),
        ),
        body="policy:check",
    ),
    Verb(
        "forward",
        NETWORK,
        "A port of this host leads into the instance.",
        (
            NAME,
            positional(
                "[ADDR:]HOSTPORT:GUESTPORT",
                values.forward,
                "HOSTPORT 0: a free one",
                dest="forward",
                optional=True,
            ),
            switch("--public", "listen on an address that is not loopback"),
            switch("--list", "list the forwards"),
            option("--remove", "HOSTPORT", values.integer(1, 65535), "remove a forward"),
        ),
        body="network:forward",
        check=_forward,
    ),
    Verb(
        "capture",
        NETWORK,
        "Shows or writes the packets of an instance.",
        (
            NAME,
            Arg("write", "-w", "FILE", values.text, "write a pcap file", complete="files"),
            option("--filter", "EXPR", values.line, "only packets that match"),
            option("--count", "N", values.integer(1, 1_000_000_000), "end after N packets"),
        ),
        body="network:capture",
        streams="always",
        detail=(
            "EXPR is made of tcp, udp, icmp, [src|dst] host ADDRESS, [src|dst] net CIDR, "
            "[src|dst] port N, not, and, or, and brackets. What the guest sends to the broker is "
            "shown as zeros."
        ),
    ),
    # -- credentials
    Verb(
        "secret set",
        CREDENTIALS,
        "Stores one value, read from stdin.",
        (CREDENTIAL,),
        body="secrets:set_secret",
        detail="Reads to the end, strips one final line feed. Nothing is echoed on a terminal.",
    ),
    Verb(
        "secret list",
        CREDENTIALS,
        "Names and the bindings that use each; never a value.",
        body="secrets:list_secrets",
    ),
    Verb("secret rm", CREDENTIALS, "Removes one credential.", (CREDENTIAL,), body="secrets:rm"),
    Verb(
        "secret import",
        CREDENTIALS,
        "Takes over the login of another tool.",
        (
            positional(
                "TOOL",
                values.OneOf("claude", "codex", "opencode", "gh", "copilot"),
                "claude, codex, opencode, gh or copilot",
            ),
        ),
        entry="secret-import",
    ),
    Verb(
        "secret unlock", CREDENTIALS, "Opens a store kept by a passphrase.", body="secrets:unlock"
    ),
    Verb(
        "secret protect",
        CREDENTIALS,
        "Changes how the master key is kept.",
        (
            positional(
                "PROTECTION",
                values.OneOf("key-file", "keyring", "systemd-creds", "passphrase"),
                "key-file, keyring, systemd-creds or passphrase",
            ),
        ),
        body="secrets:protect",
    ),
    # -- images
    Verb(
        "image pull",
        IMAGES,
        "Downloads and verifies images.",
        (
            positional(
                "IMAGE",
                values.image,
                "a variant, or HOST/REPOSITORY@sha256:DIGEST",
                dest="sources",
                optional=True,
                many=True,
            ),
        ),
        body="images:pull",
        detail=(
            "Without an image: the variant of the default profile. A variant is pulled from "
            "where `pull` in its file says. Its publisher's key must be in the directory "
            "image-keys beside the config file."
        ),
    ),
    Verb(
        "image build",
        IMAGES,
        "Builds an image from Debian packages.",
        (
            positional(
                "VARIANT", values.name, "else base", dest="variants", optional=True, many=True
            ),
            option("--mirror", "URL", values.line, "instead of the mirrors of this host's apt"),
            switch("--guest", "only the drive with agent-box's own code, of images that exist"),
            option("--harness", "NAME", values.name, "the layer of this harness"),
        ),
        body="images:build",
        detail=(
            "Variants are base, python, node, rust, and the files variants/NAME.toml beside the "
            "config file. With --harness and no variant, only the layer is built."
        ),
    ),
    Verb("image list", IMAGES, "The cached images and who uses them.", body="images:list_images"),
    Verb(
        "image verify",
        IMAGES,
        "Hashes the cache again; removes what is corrupt.",
        (VARIANTS,),
        body="images:verify",
    ),
    Verb("image gc", IMAGES, "Removes images that no instance records.", body="images:gc"),
    # -- host
    Verb(
        "setup",
        HOST,
        "Installs what this host needs.",
        (
            switch("--system", "the part that needs root; not built yet"),
            option("--user", "NAME", values.line, "the operator, with --system"),
            switch("--no-pull", "do not make an image when there is none"),
            switch("--no-unit", "no systemd user unit: verbs start the daemon on demand"),
        ),
        body="setup:setup",
        check=_setup,
        detail=(
            "Needed once, before the first start: builds an image when there is none, and runs a "
            "guest to find an accelerator when the config names none."
        ),
    ),
    Verb(
        "uninstall",
        HOST,
        "Removes what setup installed.",
        (
            switch("--system", "the part that needs root; not built yet"),
            switch("--purge", "also state, images and credentials"),
            switch("--delete-instances", "delete each instance first"),
        ),
        body="setup:uninstall",
        check=_uninstall,
    ),
    Verb(
        "doctor",
        HOST,
        "Runs every probe and prints the report.",
        (switch("--strict", "exit 1 when there is a gap"),),
        body="doctor:doctor",
    ),
    Verb(
        "daemon",
        HOST,
        "Runs the services in the foreground.",
        (switch("--stop", "end the daemon that runs; instances go on"),),
        body="services:daemon",
    ),
    Verb(
        "service list", HOST, "One row per service and the helper.", body="services:list_services"
    ),
    Verb(
        "service restart",
        HOST,
        "Drains and restarts a service.",
        (
            positional(
                "NAME",
                values.OneOf(*PROGRAMS, "all"),
                "the service, or helper, or all, one after another",
            ),
        ),
        body="services:restart",
    ),
    Verb(
        "service logs",
        HOST,
        "The log of a service.",
        (
            positional(
                "NAME", values.OneOf(*PROGRAMS, "daemon"), "the service, or helper, or daemon"
            ),
            switch("--follow", "go on with new lines until interrupted"),
            option("--tail", "N", values.integer(0, 1_000_000), "only the last N lines"),
        ),
        body="services:logs",
        streams="follow",
        detail="With --json it prints one object; with --follow, one object per line.",
    ),
    Verb(
        "service inspect",
        HOST,
        "The confinement in force, beside what is declared.",
        (SERVICE,),
        body="services:inspect",
    ),
    Verb("demo config", HOST, "Prints an example of the config file.", body="demo:config"),
    Verb(
        "completion",
        HOST,
        "Prints the completion script of a shell.",
        (positional("SHELL", values.OneOf("bash", "zsh", "fish"), "bash, zsh or fish"),),
        body="completion:script",
    ),
)

BY_NAME: Final[dict[str, Verb]] = {verb.name: verb for verb in VERBS}
GROUPS: Final[frozenset[str]] = frozenset(
    verb.name.partition(" ")[0] for verb in VERBS if " " in verb.name
)
