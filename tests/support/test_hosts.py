"""Pretended hosts: they reach each other, a pulled cable is silent, and nothing of them remains."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import hosts as module
from host_keeper import namespace_of
from hosts import Host, Hosts, HostsError, needs_hosts, why_no_hosts

pytestmark = [pytest.mark.timeout(60), needs_hosts]

ECHO = """
    import socket, sys
    host = sys.argv[1]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    print(listener.getsockname()[1], flush=True)
    one, peer = listener.accept()
    print(peer[0], flush=True)
    while data := one.recv(1 << 16):
        one.sendall(data)
"""
CONNECT = """
    import socket, sys
    one = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)
"""
EXCHANGE = """
    size = int(sys.argv[3])
    one.sendall(bytes(size))
    one.shutdown(socket.SHUT_WR)
    heard = 0
    while data := one.recv(1 << 16):
        heard += len(data)
    print(heard)
"""
LISTEN = """
    def listen(seconds):
        one.settimeout(seconds)
        try:
            return repr(one.recv(1))
        except OSError as error:
            return type(error).__name__

    print("connected", flush=True)
    sys.stdin.readline()
    one.sendall(b"are you there?")
    print(listen(0.5), flush=True)
    print(listen(20), flush=True)
"""


def start(host: Host, code: str, *arguments: object) -> subprocess.Popen[str]:
    """Run a program on a host and talk to it."""
    lines = "".join(textwrap.dedent(part) for part in code.split("---"))
    command = [sys.executable, "-S", "-c", lines, *map(str, arguments)]
    return host.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[Any]) -> str:
    """Wait for the next line of a process."""
    return process.stdout.readline().strip()


def exchange(one: Host, other: Host, size: int) -> int:
    """Send bytes to another host and back; say how many came."""
    server = start(other, ECHO, other.address)
    client = start(one, f"{CONNECT}---{EXCHANGE}", other.address, line(server), size)
    return int(client.communicate(timeout=30)[0])


def is_gone(pid: int) -> bool:
    """Wait for the end of a process that is not our child."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 20)[0])
    finally:
        os.close(process)


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def processes_in(namespaces: set[str]) -> list[str]:
    pids = [path.name for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if namespace_of(pid) in namespaces]


@pytest.mark.parametrize("family", ["address", "address6"])
def test_hosts_reach_each_other_from_their_own_addresses(family):
    with Hosts(3) as hosts:
        for one, other in ((0, 1), (2, 0)):
            server = start(hosts[one], ECHO, getattr(hosts[one], family))
            address = getattr(hosts[one], family), line(server)
            client = start(hosts[other], f"{CONNECT}---{EXCHANGE}", *address, 100_000)
            assert line(server) == getattr(hosts[other], family)
            assert client.communicate(timeout=30)[0] == "100000\n"


def test_every_host_has_its_own_name_loopback_and_abstract_sockets():
    meet = """
        import socket, sys
        with socket.socket(socket.AF_UNIX) as one, socket.create_server(("127.0.0.1", 0)) as two:
            one.bind("\\0the same name")
            print(socket.gethostname(), *[name for _, name in socket.if_nameindex()], flush=True)
            sys.stdin.readline()
    """
    ours = socket.gethostname(), interfaces()
    with Hosts(2) as hosts:
        both = [start(host, meet) for host in hosts]
        assert [line(one) for one in both] == ["host0 lo eth0", "host1 lo eth0"]
        assert (socket.gethostname(), interfaces()) == ours
        assert [host.name for host in hosts] == ["host0", "host1"]


def test_the_pid_of_a_process_is_the_one_of_the_command():
    with Hosts(1) as hosts:
        process = start(hosts[0], "import os; print(os.getpid(), flush=True); input()")
        assert line(process) == str(process.pid)
        process.send_signal(signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL


@pytest.mark.parametrize("end", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_pulled_cable_is_silent_until_it_is_back(end):
    with Hosts(2) as hosts:
        server = start(hosts[0], ECHO, hosts[0].address)
        client = start(hosts[1], f"{CONNECT}---{LISTEN}", hosts[0].address, line(server))
        assert line(client) == "connected"
        hosts[end].link_down()
        server.kill()  # its kernel says so, but nobody hears it
        server.wait(20)
        print(file=client.stdin, flush=True)
        assert line(client) == "TimeoutError"
        hosts[end].link_up()
        assert line(client) in ("b''", "ConnectionResetError")


@pytest.mark.slow
def test_a_limited_rate_is_kept_and_can_be_taken_away():
    size, rate = 400_000, 1_000_000
    with Hosts(2) as hosts:
        try:
            hosts[0].limit_rate(rate)
        except HostsError as error:
            pytest.skip(f"no limit of rates here: {error}")
        assert exchange(hosts[1], hosts[0], size) == size
        assert overlimits(hosts[0], "eth0") > 0  # packets had to wait
        hosts[0].limit_rate(None)
        assert overlimits(hosts[0], "eth0") == 0
        hosts[0].limit_rate(None)
        assert exchange(hosts[0], hosts[1], size) == size


def overlimits(host: Host, device: str) -> int:
    """Say how often the kernel held packets of a device back."""
    show = host.popen(
        ["tc", "-s", "qdisc", "show", "dev", device], stdout=subprocess.PIPE, text=True
    )
    words = show.communicate(timeout=20)[0].split()
    return int(words[words.index("overlimits") + 1]) if "overlimits" in words else 0


class Oops(Exception):
    """What a test that fails raises."""


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_whether_or_not_the_test_fails(fails):
    before = interfaces(), set(os.listdir("/proc/self/fd"))
    started, namespaces = [], set()
    try:
        with Hosts(2) as hosts:
            for host in hosts:
                daemon = host.popen(
                    ["sh", "-c", "setsid sleep 1000 & echo $!"], stdout=subprocess.PIPE
                )
                started.append(int(line(daemon)))
                ignorant = start(host, "import signal; signal.signal(15, signal.SIG_IGN); input()")
                started.append(ignorant.pid)
                namespaces.add(namespace_of(started[-2]))
            assert len(namespaces) == 2
            if fails:
                raise Oops
    except Oops:
        assert fails
    assert all(is_gone(pid) for pid in started)
    assert processes_in(namespaces) == []
    assert (interfaces(), set(os.listdir("/proc/self/fd"))) == before


@pytest.mark.slow
def test_nothing_is_left_of_a_test_run_that_is_killed():
    code = """
        import sys, time
        from hosts import Hosts
        with Hosts(1) as hosts:
            print(hosts[0].popen(["sleep", "1000"]).pid, hosts[0]._namespace.pid, flush=True)
            time.sleep(1000)
    """
    run = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    with run:
        pids = [int(word) for word in line(run).split()]
        assert len(pids) == 2
        run.kill()
        assert all(is_gone(pid) for pid in pids)


def test_what_cannot_be_made_leaves_nothing(monkeypatch):
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(module, "_IPV4", "no address {}")
    with pytest.raises(HostsError, match="ip: "), Hosts(2):
        pass
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_reason_says_what_is_not_allowed(monkeypatch):
    assert why_no_hosts() == ""
    monkeypatch.setattr("shutil.which", lambda command: None if command == "nsenter" else command)
    assert why_no_hosts.__wrapped__() == "needs the commands nsenter"
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert why_no_hosts.__wrapped__() == "needs root, to make network namespaces"


def test_the_reason_tells_of_a_root_that_may_not_make_namespaces():
    code = "from hosts import why_no_hosts; print(why_no_hosts())"
    done = subprocess.run(
        ["setpriv", "--bounding-set=-sys_admin", sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert "network namespaces do not work here: unshare" in done.stdout
    assert "not permitted" in done.stdout
