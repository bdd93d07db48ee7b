"""`git http-backend` behind aiohttp, as an upstream, and a git client before a broker's socket."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from aiohttp import web
from support.upstreams import Asked

BACKEND = Path("/usr/lib/git-core/git-http-backend")
# Nobody's settings but ours.
PLAIN = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.com",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.com",
    "LC_ALL": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
}


class Backend:
    """Answers for all repositories below `root`, to whoever shows `authorization`."""

    def __init__(self, root: Path, authorization: str) -> None:
        self._root = root
        self._authorization = authorization

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        if asked.get("authorization") != [self._authorization]:
            return web.Response(status=401)
        variables = {
            **PLAIN,
            "GIT_PROJECT_ROOT": str(self._root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "REMOTE_USER": "a",
            "REQUEST_METHOD": request.method,
            "PATH_INFO": request.path,
            "QUERY_STRING": request.query_string,
            "CONTENT_TYPE": request.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(asked.body)),
            "HTTP_CONTENT_ENCODING": request.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": request.headers.get("Git-Protocol", ""),
            "HOME": str(self._root),
        }
        process = await asyncio.create_subprocess_exec(
            BACKEND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=variables,
        )
        out, _ = await process.communicate(asked.body)
        head, _, body = out.partition(b"\r\n\r\n")
        status, headers = 200, {}
        for line in head.decode().split("\r\n"):
            name, _, value = line.partition(": ")
            if name == "Status":
                status = int(value.split()[0])
            else:
                headers[name] = value
        return web.Response(status=status, headers=headers, body=body)


async def doorway(sock: Path) -> tuple[asyncio.Server, int]:
    """A port of loopback that leads to a Unix socket, as the network worker does for a guest."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # a reset on one side is one on the other
        finally:
            writer.close()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(sock)
        await asyncio.gather(relay(reader, inner_writer), relay(inner_reader, writer))

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def git(directory: Path, *words: str, home: Path, **variables: str) -> tuple[int, str]:
    """Runs git; its exit code, and all that it said."""
    process = await asyncio.create_subprocess_exec(
        "git",
        *words,
        cwd=directory,
        env={**PLAIN, "HOME": str(home), **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), 100)
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode is not None
    return process.returncode, said.decode(errors="replace") + os.linesep
