"""What runs as PID 1 in a soaked machine: servers on vsock ports. Standard library only.

6000 echoes, also after a half-close. 6001 reads all and answers with the count and a hash.
6002 reads all and answers with the count alone. 6003 reads a line ``count chunk delay seed``
and sends that many bytes of `pattern`. 6004 reads slowly: a line ``pause chunk``, then what
comes, and answers as 6001. 6005 tries to connect to the host and tells what happened. 6006
powers off. 6007 resets: it reads a byte and closes with data unread.
"""

import ctypes
import hashlib
import os
import random
import socket
import threading
import time

BLOCK = 1000003  # prime, so that no whole buffer of it looks like another


def pattern(seed):
    return random.Random(seed).randbytes(BLOCK)


def line(s):
    b = b""
    while not b.endswith(b"\n"):
        x = s.recv(1)
        if not x:
            raise EOFError
        b += x
    return b.split()


def echo(s):
    while data := s.recv(1 << 18):
        s.sendall(data)


def digest(s):
    h = hashlib.sha256()
    n = 0
    b = bytearray(1 << 18)
    v = memoryview(b)
    while k := s.recv_into(b):
        h.update(v[:k])
        n += k
    s.sendall(b"%d %s\n" % (n, h.hexdigest().encode()))


def count(s):
    n = 0
    b = bytearray(1 << 18)
    while k := s.recv_into(b):
        n += k
    s.sendall(b"%d\n" % n)


def source(s):
    size, chunk, delay, seed = line(s)
    size, chunk, delay = int(size), int(chunk), float(delay)
    block = pattern(int(seed))
    data = memoryview(block * max(2, 2 + chunk // BLOCK))
    at = 0
    while at < size:
        start = at % BLOCK
        k = min(chunk, size - at)
        s.sendall(data[start : start + k])
        at += k
        if delay:
            time.sleep(delay)


def slow(s):
    pause, chunk = line(s)
    pause, chunk = float(pause), int(chunk)
    h = hashlib.sha256()
    n = 0
    while data := s.recv(chunk):
        h.update(data)
        n += len(data)
        time.sleep(pause)
    s.sendall(b"%d %s\n" % (n, h.hexdigest().encode()))


def outward(s):
    c = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    try:
        c.connect((2, 1234))
        said = "connected"
    except OSError as error:
        said = f"refused {error.errno}"
    c.close()
    s.sendall(said.encode())


def off(s):
    s.sendall(b"bye")
    s.close()
    os.sync()
    ctypes.CDLL(None).reboot(0x4321FEDC)


def rude(s):
    s.recv(1)


SERVERS = {
    6000: echo,
    6001: digest,
    6002: count,
    6003: source,
    6004: slow,
    6005: outward,
    6006: off,
    6007: rude,
}


def serve(s, server):
    try:
        server(s)
    except (OSError, EOFError):
        pass  # the client went away, and it knows
    finally:
        s.close()


def bind(port):
    listener = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    listener.bind((socket.VMADDR_CID_ANY, port))
    listener.listen(1024)
    return listener


def listen(listener, server):
    while True:
        s, _ = listener.accept()
        threading.Thread(target=serve, args=(s, server), daemon=True).start()


if __name__ == "__main__":
    threading.stack_size(256 << 10)
    # 6000 last: whoever is let in there finds all the others
    bound = [(bind(port), SERVERS[port]) for port in sorted(SERVERS, reverse=True)]
    threads = [threading.Thread(target=listen, args=item) for item in bound]
    for thread in threads:
        thread.start()
    os.write(2, b"peer is up\n")
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            threads[0].join()
