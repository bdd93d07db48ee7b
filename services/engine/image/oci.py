"""Fetches a published image from an OCI registry, by digest alone.

What a registry says is hostile until its digest is right: the manifest is what the reference
names, and each file is what a manifest names that a publisher whom we trust has signed. So a
registry can withhold an image and nothing else.

A published image is an OCI manifest whose config is our signed manifest and whose layers are
the files (OCI image specification 1.1, distribution specification 1.1). No credential is
ever sent: images are public; a registry that wants one for that gets an anonymous token.
A file that arrived in part stays below ``partial`` and is gone on with.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import http.client
import json
import os
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import quote, urlencode, urljoin, urlsplit

from agent_box.engine.image import blobs, manifest
from agent_box.engine.image.blobs import Part
from agent_box.engine.image.errors import DefinitionError, NotPublished, PullFailed, Untrusted
from agent_box.engine.image.manifest import Manifest, Signed, local_key, sign, store
from agent_box.engine.image.reference import Reference, is_loopback
from agent_box.process.paths import Paths

MEDIA_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
MEDIA_CONFIG: Final = "application/vnd.agent-box.manifest.v1+json"
MEDIA_FILE: Final = "application/vnd.agent-box.{}.v1"  # one for each file of an image
TIMEOUT_S: Final = 60.0  # without a byte
TRIES: Final = 5  # in a row that brought nothing
PIECE: Final = 1 << 20
REDIRECTS: Final = 5
SMALL_MAX: Final = 1 << 20  # bytes of a manifest, a token

Tell = Callable[[str], None]


def keys(config_dir: Path | None) -> dict[str, str]:
    """The publishers that the operator trusts: public key (64 hex digits) to name.

    They are the files ``image-keys/NAME.pub`` beside the config file.

    Raises:
        DefinitionError: a file holds no key.
    """
    found = {}
    if config_dir is None:
        return {}
    for file in sorted((config_dir / "image-keys").glob("*.pub")):
        text = file.read_text(encoding="ascii", errors="replace").strip()
        if re.fullmatch(r"[0-9a-f]{64}", text) is None:
            raise DefinitionError(str(file), "it holds no key of 64 hex digits")
        found[text] = file.stem
    return found


def pull(
    paths: Paths,
    reference: Reference,
    trusted: Mapping[str, str],
    *,
    name: str | None,
    tell: Tell,
) -> tuple[str, Manifest, int]:
    """Fetches an image and makes it the current one of its variant.

    Args:
        trusted: public keys of publishers, to their names.
        name: the variant that it must be; None takes the one that it says.

    Returns:
        The sha256 of our manifest, the manifest, and the bytes that had to be fetched.

    Raises:
        Untrusted: a digest or a signature is wrong, or it is an image of another variant.
        PullFailed: the registry cannot be reached, or does not have it.
        PathsError: the state directory cannot be used.
    """
    blobs.make(paths)
    registry = _Registry(reference)
    signed = _described(registry, reference)
    publisher = manifest.signed_by(signed, frozenset(trusted))
    if publisher is None:
        by = ", ".join(s.key for s in signed.signatures[:4]) or "nobody"
        raise Untrusted(
            f"{reference} is signed by {by}, and no file image-keys/NAME.pub beside the config "
            "file holds such a key"
        )
    image = signed.manifest
    if name is not None and image.name != name:
        raise Untrusted(f"{reference} is an image of {image.name}, not of {name}")
    fetched = 0
    with ExitStack() as held:  # the locks of what has arrived, until it is among the blobs
        arrived: dict[str, Path] = {}
        for what, part in image.parts.items():
            if part.sha256 in arrived or _whole(paths, part):
                continue
            file = paths.images / "partial" / part.sha256
            label = f"{image.name}: {what}"
            fetched += _fetch(registry, part, held.enter_context(_own(file, label)), label, tell)
            arrived[part.sha256] = file
        with blobs.locked(paths):
            for sha256, file in arrived.items():
                if blobs.add(paths, file).sha256 != sha256:
                    raise Untrusted(f"{file} was changed while it was fetched")
            for part in image.parts.values():
                os.stat(paths.blob(part.sha256))  # nobody has taken it away meanwhile
            ours = sign(image, local_key(paths))
            theirs = [s for s in signed.signatures if s.key in trusted and s.key != ours.key]
            sha256 = store(paths, Signed(manifest=image, signatures=[*theirs, ours]))
    return sha256, image, fetched


def _whole(paths: Paths, part: Part) -> bool:
    """Whether the cache has that file, as it should be; one that is not is removed."""
    file = paths.blob(part.sha256)
    try:
        if blobs.hash_file(file) == part:
            return True
    except FileNotFoundError:
        return False
    file.unlink()
    return False


def _described(registry: _Registry, reference: Reference) -> Signed:
    """The signed manifest that a reference leads to. Its digests agree with the registry's."""
    body = registry.small(f"manifests/sha256:{reference.digest}", MEDIA_MANIFEST)
    if hashlib.sha256(body).hexdigest() != reference.digest:
        raise Untrusted(f"{reference}: the registry gave something else")
    try:
        table: dict[str, Any] = json.loads(body)
        config = table["config"]
        if config["mediaType"] != MEDIA_CONFIG:
            raise ValueError(f"a config of the type {config['mediaType']!r}")
        digest = _digest(config["digest"])
        layers = {_digest(each["digest"]): each["size"] for each in table["layers"]}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise Untrusted(f"{reference} is no image of agent-box: {error}") from None
    text = registry.small(f"blobs/sha256:{digest}", MEDIA_CONFIG)
    if hashlib.sha256(text).hexdigest() != digest:
        raise Untrusted(f"{reference}: its manifest {digest} is not what the registry gave")
    try:
        signed = manifest.decode(text)
    except ValueError as error:
        raise Untrusted(f"{reference}: its manifest: {error}") from None
    wanted = {part.sha256: part.size for part in signed.manifest.parts.values()}
    if wanted != layers:
        raise Untrusted(f"{reference}: its layers are not the files that its manifest names")
    return signed


def _digest(untrusted: Any) -> str:
    if not isinstance(untrusted, str) or not untrusted.startswith("sha256:"):
        raise ValueError("a digest that is no sha256")
    return blobs.digest(untrusted.removeprefix("sha256:"))


# ------------------------------------------------------------------------------ a file


@contextmanager
def _own(file: Path, label: str) -> Iterator[BinaryIO]:
    """A file that is being fetched, or the beginning of it that is there; ours alone.

    Raises:
        PullFailed: somebody else fetches it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(file, flags, 0o600), "r+b") as target:
        try:
            fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PullFailed(f"{label}: another pull fetches it") from None
        yield target


def _fetch(registry: _Registry, part: Part, target: BinaryIO, label: str, tell: Tell) -> int:
    """Fetches a file to its end, going on where an earlier try stopped. Returns the bytes.

    Raises:
        Untrusted: it is not what its digest says; what came is removed.
        PullFailed
    """
    if target.seek(0, os.SEEK_END) > part.size:
        target.truncate(0)
    at = begun = target.seek(0, os.SEEK_END)
    if begun:
        tell(f"{label}: going on at {begun >> 20} of {part.size >> 20} MiB")
    barren = 0
    while at < part.size:
        try:
            after = _some(registry, part, target, at, label, tell)
            why = "the connection ended early"
        except http.client.HTTPException as error:
            after, why = target.seek(0, os.SEEK_END), _why(error)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            after, why = target.seek(0, os.SEEK_END), _why(error)
        barren = 0 if after > at else barren + 1
        if barren == TRIES:
            raise PullFailed(
                f"{label}: {why}, at {after} of {part.size} bytes; the same command goes on there"
            )
        at = after
    target.flush()
    target.seek(0)
    if blobs.hash_open(target) != part:
        target.truncate(0)
        raise Untrusted(f"{label}: what the registry gave is not {part.sha256}")
    return part.size - begun


def _some(
    registry: _Registry, part: Part, target: BinaryIO, at: int, label: str, tell: Tell
) -> int:
    """One request from `at` on, as far as it goes. Returns where the file ends then."""
    headers = {"Range": f"bytes={at}-"} if at else {}
    with registry.get(f"blobs/sha256:{part.sha256}", headers) as reply:
        if at and reply.status == 200:  # it cannot do ranges: from the beginning
            target.truncate(0)
            at = 0
        elif at and not (reply.getheader("Content-Range") or "").startswith(f"bytes {at}-"):
            raise PullFailed(f"{label}: the registry answered with another range")
        target.seek(at)
        told = time.monotonic()
        while at < part.size and (piece := reply.read(min(PIECE, part.size - at))):
            target.write(piece)
            at += len(piece)
            if time.monotonic() - told > 1:
                tell(f"{label}: {at >> 20} of {part.size >> 20} MiB")
                told = time.monotonic()
    return at


# ----------------------------------------------------------------------------- the way


class _Registry:
    """One repository of one registry."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        scheme = "http" if reference.loopback and not _speaks_tls(reference) else "https"
        host = f"[{reference.host}]" if ":" in reference.host else reference.host
        port = "" if reference.port is None else f":{reference.port}"
        self._base = f"{scheme}://{host}{port}/v2/{quote(reference.repository)}/"
        self._token: str | None = None

    def small(self, path: str, accept: str) -> bytes:
        """A document that fits into memory.

        Raises:
            PullFailed: it is not to be had, or too large.
        """
        try:
            with self.get(path, {"Accept": accept}) as reply:
                body: bytes = reply.read(SMALL_MAX + 1)
        except (OSError, http.client.HTTPException) as error:
            raise PullFailed(f"{self._reference}: {_why(error)}") from None
        if len(body) > SMALL_MAX:
            raise PullFailed(f"{self._reference}: {path} is larger than {SMALL_MAX} bytes")
        return body

    @contextmanager
    def get(self, path: str, headers: Mapping[str, str]) -> Iterator[http.client.HTTPResponse]:
        """The reply, 200 or 206, redirects followed.

        Raises:
            PullFailed: any other status, or a way that may not be gone.
            OSError, http.client.HTTPException: no reply.
        """
        url = urljoin(self._base, path)
        asked_token = False
        redirects = 0
        while True:
            sent = {"User-Agent": "agent-box", "Accept-Encoding": "identity", **headers}
            if self._token is not None and url.startswith(self._base):
                sent["Authorization"] = f"Bearer {self._token}"
            connection = _connect(url, self._reference)
            try:
                parts = urlsplit(url)
                target = parts.path + (f"?{parts.query}" if parts.query else "")
                connection.request("GET", target, headers=sent)
                reply = connection.getresponse()
                if reply.status in (200, 206):
                    yield reply
                    return
                if reply.status in (301, 302, 303, 307, 308) and redirects < REDIRECTS:
                    redirects += 1
                    url = self._next(url, reply.getheader("Location") or "")
                    continue
                challenge = reply.getheader("WWW-Authenticate") or ""
                if reply.status == 401 and not asked_token and url.startswith(self._base):
                    asked_token = True
                    self._token = self._anonymous(challenge)
                    continue
                said = f"{self._reference}: the registry answered {reply.status} for {path}"
                raise NotPublished(said) if reply.status == 404 else PullFailed(said)
            finally:
                connection.close()

    def _next(self, url: str, untrusted_location: str) -> str:
        try:
            return urljoin(url, untrusted_location)
        except ValueError:
            raise PullFailed(f"{self._reference}: the registry sends us nowhere") from None

    def _anonymous(self, untrusted_challenge: str) -> str:
        """A token for anybody, as the distribution specification has it: no credential goes."""
        fields = dict(re.findall(r'([a-z]+)="([^"]*)"', untrusted_challenge))
        realm = fields.get("realm", "")
        if not untrusted_challenge.lower().startswith("bearer ") or not realm:
            raise PullFailed(f"{self._reference}: the registry wants a login")
        query = urlencode(
            {
                "service": fields.get("service", ""),
                "scope": f"repository:{self._reference.repository}:pull",
            }
        )
        connection = _connect(realm, self._reference)
        try:
            parts = urlsplit(realm)
            connection.request("GET", f"{parts.path or '/'}?{query}")
            reply = connection.getresponse()
            body = reply.read(SMALL_MAX)
            table = json.loads(body) if reply.status == 200 else {}
            token = table.get("token") or table.get("access_token")
        except (ValueError, AttributeError) as error:
            raise PullFailed(f"{self._reference}: no token: {error}") from None
        finally:
            connection.close()
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]{1,16384}", token):
            raise PullFailed(f"{self._reference}: the registry wants a login")
        return token


def _connect(url: str, reference: Reference) -> http.client.HTTPConnection:
    """A connection to where a URL leads: by TLS, or to this machine.

    Raises:
        PullFailed: it leads over the network without TLS, or from the network to this host.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise PullFailed(f"{reference}: the registry sends us nowhere") from None
    if is_loopback(host) and not reference.loopback:
        raise PullFailed(f"{reference}: the registry sends us to this machine")
    if parts.scheme == "https" and host:
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
    if parts.scheme == "http" and is_loopback(host):
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    raise PullFailed(f"{reference}: plain http is for this machine alone")


def _speaks_tls(reference: Reference) -> bool:
    """Whether a registry of this machine speaks TLS; on its usual port it does."""
    return reference.port in (None, 443)


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate does not verify: {error.verify_message}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
