"""The addresses of this host are all found, and the right one is chosen and named."""

from __future__ import annotations

import socket
import subprocess

import pytest

from ferrodist import RendezvousError
from ferrodist.rendezvous import interfaces
from ferrodist.rendezvous.interfaces import (
    Interface,
    choose_address,
    is_loopback,
    list_interfaces,
    matches,
    source_address,
)

ETH = Interface("eth0", "10.1.0.2", socket.AF_INET, False)
IB = Interface("ib0", "10.2.0.2", socket.AF_INET, False)
ETH6 = Interface("eth0", "fd00::2", socket.AF_INET6, False)
LOCAL6 = Interface("eth0", "fe80::1%eth0", socket.AF_INET6, False)
LO = Interface("lo", "127.0.0.1", socket.AF_INET, True)
ALL = [LO, ETH, IB, ETH6, LOCAL6]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Give this host other interfaces, and routes: from where each place is reached."""
    routes = {"10.1.0.1": "10.1.0.2", "198.51.100.1": "10.1.0.2", "rank-0": "127.0.1.1"}

    def route(towards: str) -> str:
        if towards not in routes:
            raise OSError("no route")
        return routes[towards]

    monkeypatch.setattr(interfaces, "list_interfaces", lambda: ALL)
    monkeypatch.setattr(interfaces, "source_address", route)
    return routes


def test_loopback_is_among_the_interfaces():
    assert Interface("lo", "127.0.0.1", socket.AF_INET, True) in list_interfaces()


def test_all_addresses_that_the_system_lists_are_there():
    try:
        shown = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        pytest.skip("there is no 'ip' here to compare with")
    lines = (line.split() for line in shown.stdout.splitlines())
    expected = {(words[1], words[3].partition("/")[0]) for words in lines}
    found = {(one.name, one.address.partition("%")[0]) for one in list_interfaces()}
    assert found == expected


def test_every_address_that_is_listed_can_be_listened_at():
    for one in list_interfaces():
        with socket.socket(one.family) as listener:
            where = socket.getaddrinfo(one.address, 0, type=socket.SOCK_STREAM)[0][4]
            listener.bind(where)


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [
        ("", ["eth0", "eth1", "eth10", "ib0", "docker0", "lo"]),
        ("eth", ["eth0", "eth1", "eth10"]),
        ("eth1", ["eth1", "eth10"]),
        ("=eth1", ["eth1"]),
        ("=eth1,lo", ["eth1", "lo"]),
        ("ib,eth0", ["eth0", "ib0"]),
        ("ib, eth0", ["eth0", "ib0"]),
        ("^docker,lo", ["eth0", "eth1", "eth10", "ib0"]),
        ("^=eth1", ["eth0", "eth10", "ib0", "docker0", "lo"]),
        ("=eth", []),
    ],
)
def test_a_pattern_takes_what_nccl_would_take(pattern, taken):
    names = ["eth0", "eth1", "eth10", "ib0", "docker0", "lo"]
    assert [name for name in names if matches(pattern, name)] == taken


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_way_to_loopback_is_loopback(address):
    assert source_address(address) == address
    assert choose_address("", address) == ("lo", address)


def test_the_way_to_an_address_of_this_host_is_that_address():
    for one in list_interfaces():
        if not one.address.startswith("fe80:"):
            assert choose_address("", one.address) == (one.name, one.address)


def test_the_address_is_the_one_that_routes_to_rank_0(host):
    host["10.2.0.1"] = "10.2.0.2"
    assert choose_address("", "10.2.0.1") == ("ib0", "10.2.0.2")


@pytest.mark.parametrize("towards", ["rank-0", "no-route", ""])
def test_without_a_way_to_rank_0_it_is_that_of_the_default_route(host, towards):
    assert choose_address("", towards) == ("eth0", "10.1.0.2")


def test_without_any_route_it_is_an_address_that_is_not_loopback(host):
    host.clear()
    assert choose_address("", "10.1.0.1") == ("eth0", "10.1.0.2")


def test_a_pattern_wins_over_the_route(host):
    assert choose_address("ib", "10.1.0.1") == ("ib0", "10.2.0.2")
    assert choose_address("^eth,lo", "10.1.0.1") == ("ib0", "10.2.0.2")


def test_of_the_addresses_of_an_interface_the_one_like_rank_0s_is_taken(host):
    assert choose_address("=eth0", "10.9.0.1") == ("eth0", "10.1.0.2")
    assert choose_address("=eth0", "fd00::1") == ("eth0", "fd00::2")


def test_a_pattern_that_matches_nothing_names_what_there_is(host):
    with pytest.raises(RendezvousError) as caught:
        choose_address("wlan", "10.1.0.1")
    assert str(caught.value) == (
        "FERRODIST_SOCKET_IFNAME='wlan' matches no network interface of this host; there are: "
        "lo (127.0.0.1), eth0 (10.1.0.2), ib0 (10.2.0.2), eth0 (fd00::2), eth0 (fe80::1%eth0)"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "x.localhost"])
def test_loopback_is_known_by_any_of_its_names(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "fe80::1%eth0", "node-1", "localhost.example.org"])
def test_what_is_not_loopback_is_not_taken_for_it(host):
    assert not is_loopback(host)
