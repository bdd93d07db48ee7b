"""The host's own addresses, from what kernels write."""

from __future__ import annotations

import socket
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from agent_box.netstack.own import local_v4, local_v6, own

FIB_TRIE = """\
Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 192.0.2.0/24 2 0 2
           |-- 192.0.2.0
              /24 link UNICAST
           |-- 192.0.2.2
              /32 host LOCAL
        |-- 192.0.2.255
           /32 link BROADCAST
Local:
     +-- 127.0.0.0/8 2 0 2
           |-- 127.0.0.0
              /8 host LOCAL
           |-- 127.0.0.1
              /32 host LOCAL
     |-- 198.51.100.0
        /24 link BROADCAST
        /25 host LOCAL
"""
IPV6_ROUTE = """\
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe8000000000000000000000000000fe 00000400 00000001 00000000 00000003     eth0
00000000000000000000000000000001 80 00000000000000000000000000000000 00 00000000000000000000000000000000 00000000 00000004 00000000 80200001       lo
20010db8000000000000000000000000 80 00000000000000000000000000000000 00 00000000000000000000000000000000 00000000 00000001 00000000 00100001     eth0
20010db8000000000000000000000002 80 00000000000000000000000000000000 00 00000000000000000000000000000000 00000000 00000001 00000000 80200001     eth0
ff000000000000000000000000000000 08 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000002 00000000 00000001     eth0
"""  # noqa: E501


def test_local_v4() -> None:
    assert local_v4(FIB_TRIE) == {
        ip_network("192.0.2.2/32"),
        ip_network("127.0.0.0/8"),
        ip_network("127.0.0.1/32"),
        ip_network("198.51.100.0/25"),
    }


def test_local_v6() -> None:
    assert local_v6(IPV6_ROUTE) == {
        ip_network("::1/128"),
        ip_network("2001:db8::/128"),
        ip_network("2001:db8::2/128"),
    }


def test_this_kernel_knows_loopback_and_the_address_that_it_would_use() -> None:
    found = own()
    assert any(ip_address("127.0.0.1") in net for net in found if net.version == 4)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; only chooses a source address
        except OSError:
            return  # no route: loopback is all there is
        mine = ip_address(probe.getsockname()[0])
    assert any(mine in net for net in found if net.version == 4)


def test_a_kernel_that_does_not_tell_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "fib_trie").mkdir()
    with pytest.raises(OSError):
        own(tmp_path)
    (tmp_path / "fib_trie").rmdir()
    (tmp_path / "fib_trie").write_text(FIB_TRIE)
    assert own(tmp_path) == local_v4(FIB_TRIE)
