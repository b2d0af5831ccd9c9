"""Pretended separate hosts: network namespaces joined by a switch, each with a name of its own.

Nothing of it has a name or an interface on the machine itself: a namespace lives as long as its
keeper (host_keeper.py), and the switch, a bridge, is in one too. So test runs cannot collide,
whatever addresses they use, and one that is killed leaves nothing. Processes see the files and pids
of the machine, but of sockets, abstract Unix ones included, only those of their host.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

_KEEPER = Path(__file__).parent / "host_keeper.py"
_COMMANDS = ("ip", "tc", "unshare", "nsenter")
_IPV4, _IPV6 = "10.213.87.{}", "fd5a:e1d2:87::{}"
_LIMIT = 20.0  # seconds for what takes milliseconds


class HostsError(RuntimeError):
    """Namespaces, or something in them, cannot be had here; the text says what."""


class _Namespace:
    """A network namespace with a host name of its own, for as long as its keeper runs."""

    def __init__(self, name: str) -> None:
        command = ["unshare", "--net", "--uts", sys.executable, "-IS", str(_KEEPER), name]
        pipe = subprocess.PIPE
        self._keeper = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._started: list[subprocess.Popen[Any]] = []
        self.pid = self._keeper.pid
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != "ready\n":
            raise HostsError(self._keeper.communicate(timeout=_LIMIT)[1].strip())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        """Kill whatever runs in here and came of it, and let the namespace go."""
        for process in self._started:
            process.kill()  # also one that is not inside yet
        self._keeper.communicate("end\n", timeout=_LIMIT)
        for process in self._started:
            process.wait(_LIMIT)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command in here. nsenter becomes the command, so the pid is the command's."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--"]
        process = subprocess.Popen([*enter, *command], **options)
        self._started.append(process)
        return process

    def configure(self, program: str, *lines: str) -> None:
        """Run some lines of ip or tc."""
        pipe = subprocess.PIPE
        command = [program, "-batch", "-"]
        process = self.start(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        errors = process.communicate("\n".join(lines), timeout=_LIMIT)[1]
        if process.returncode:
            raise HostsError(f"{program}: {errors.strip()}")


class Host:
    """One pretended host; ``address`` and ``address6`` are how the others reach it."""

    def __init__(self, number: int, namespace: _Namespace, switch: _Namespace) -> None:
        self.name = f"host{number}"
        self.address = _IPV4.format(number + 1)
        self.address6 = _IPV6.format(number + 1)
        self._port = f"port{number}"
        self._namespace, self._switch = namespace, switch
        self._is_limited = False
        switch.configure(
            "ip",
            f"link add {self._port} type veth peer name eth0 netns {namespace.pid}",
            f"link set {self._port} master switch up",
        )
        namespace.configure(
            "ip",
            "link set lo up",
            f"addr add {self.address}/24 dev eth0",
            f"addr add {self.address6}/64 dev eth0 nodad",
            "link set eth0 up",
        )

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on this host, as subprocess.Popen would; it is killed with the hosts."""
        return self._namespace.start(command, **options)

    def link_down(self) -> None:
        """Pull the cable: nothing comes or goes any more, and nobody is told."""
        self._switch.configure("ip", f"link set {self._port} down")

    def link_up(self) -> None:
        """Put the cable back."""
        self._switch.configure("ip", f"link set {self._port} up")

    def limit_rate(self, bytes_per_second: int | None) -> None:
        """Let no more than this through, each way; None takes the limit away."""
        for where, device in ((self._namespace, "eth0"), (self._switch, self._port)):
            if bytes_per_second is not None:
                where.configure("tc", _rate_line(device, bytes_per_second))
            elif self._is_limited:
                where.configure("tc", f"qdisc del dev {device} root")
        self._is_limited = bytes_per_second is not None


def _rate_line(device: str, bytes_per_second: int) -> str:
    burst = max(5_000, bytes_per_second // 50)  # a few packets at least; what passes in 20 ms
    limits = f"rate {bytes_per_second}bps burst {burst} latency 200ms"  # to tc, bps are bytes
    return f"qdisc replace dev {device} root tbf {limits}"


class Hosts:
    """So many hosts on one switch, until the end of the ``with`` block."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._hosts: list[Host] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            switch = stack.enter_context(_Namespace("switch"))
            switch.configure(
                "ip", "link add switch type bridge mcast_snooping 0", "link set switch up"
            )
            for number in range(self._number):
                namespace = stack.enter_context(_Namespace(f"host{number}"))
                self._hosts.append(Host(number, namespace, switch))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)


@functools.cache
def why_no_hosts() -> str:
    """Say what stands against hosts here; nothing if they can be had."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if missing := [command for command in _COMMANDS if shutil.which(command) is None]:
        return f"needs the commands {', '.join(missing)}"
    try:
        with Hosts(1):
            return ""
    except HostsError as error:
        return f"network namespaces do not work here: {error}"


needs_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts work here")
