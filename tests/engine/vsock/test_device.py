"""The device as it runs: its own sealed process, a driver over shared memory, and clients."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.vsockguest import Backend, Guest, GuestStream, Vmm

ECHO = 5000


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Backend]:
    with Backend(tmp_path) as started:
        yield started


@pytest.fixture
def guest(backend: Backend) -> Iterator[Guest]:
    vmm = Vmm(backend.vmm_end)
    made = Guest(vmm)
    made.listen(ECHO)
    made.up()
    yield made
    made.down()
    vmm.close()


def pair(backend: Backend, guest: Guest) -> tuple[socket.socket, GuestStream]:
    client = backend.dial(ECHO)
    return client, guest.accept(ECHO)


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def read_all(client: socket.socket) -> bytes:
    data = bytearray()
    while piece := client.recv(1 << 20):
        data += piece
    return bytes(data)


def test_hello_both_ways(backend: Backend, guest: Guest) -> None:
    client, inside = pair(backend, guest)
    client.sendall(b"question")
    assert inside.recv() == b"question"
    inside.sendall(b"answer")
    assert client.recv(100) == b"answer"
    client.close()
    assert inside.recv() == b""
