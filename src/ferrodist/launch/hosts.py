# SPDX-License-Identifier: MIT OR Apache-2.0
"""``ferrodist run --hosts``: a job on several hosts, by one ssh each.

Here are the list of hosts, the command that ssh runs on each, and the job from its start to its
end. Each host has a launcher of its own, which looks after its ranks. When all of them end, and
whether all are started again, is decided here: only this process sees all hosts.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click

from ferrodist.config import environment, variable
from ferrodist.errors import InvalidArgument
from ferrodist.launch.nodes import HostOptions, parse_endpoint, parse_name
from ferrodist.launch.output.console import Console
from ferrodist.launch.output.streams import StreamSet
from ferrodist.launch.processes import KILL_SECONDS, Attempt, random_port
from ferrodist.launch.ssh import Connection, Connections, HostStreams, RankFailed
from ferrodist.launch.supervisor import (
    Failure,
    FailurePolicy,
    JobAttempt,
    Signals,
    run_attempts,
)
from ferrodist.rendezvous.find_job import NO_SETTINGS
from ferrodist.rendezvous.interfaces import is_loopback
from ferrodist.rendezvous.job import SECRET_NBYTES, Endpoint, number

# A password cannot be typed: all hosts would ask at once. A host that is away is noticed soon.
DEFAULT_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15"

_IGNORED = ("max_slots", "max-slots")  # of mpirun: how far it may go beyond the slots
_LOOKS_SECRET = ("SECRET", "TOKEN", "PASSWORD", "PASSWD", "KEY", "CREDENTIAL")
_NETWORK_SECONDS = 1.0  # for messages from host to host, on top of what the ranks may take
_SSH_FAILED = 255  # by ssh's manual

_OURS = variable("")  # what the names of our variables begin with
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STAY_HERE = NO_SETTINGS | {variable("secret_file")}


@dataclass(frozen=True, slots=True)
class Remote:
    """What all hosts of a job have in common."""

    hosts: Sequence[SshHost]
    ssh: Sequence[str]
    sizes: Sequence[int]
    endpoint: Endpoint
    job: str
    variables: Mapping[str, str]
    options: Sequence[str]  # of this command, passed on
    script: Sequence[str]  # and its arguments

    def command(self, node_rank: int, attempt: Attempt) -> list[str]:
        options = {
            "--nnodes": len(self.hosts),
            "--node-rank": node_rank,
            "--rdzv-endpoint": self.endpoint,
            "--rdzv-id": self.job,
            "--nproc-per-node": ",".join(map(str, self.sizes)),
            "--max-restarts": attempt.most_restarts,
            "--only-attempt": attempt.restarts,
        }
        words = [f"{name}={value}" for name, value in self.variables.items()]
        words += [sys.executable, "-m", "ferrodist", "run", "--held-by-ssh"]
        words += [str(word) for pair in options.items() for word in pair]
        words += [*self.options, "--", *self.script]
        there = f"cd {shlex.quote(_folder())} && exec env {shlex.join(words)}"
        return [*self.ssh, self.hosts[node_rank].name, there]


def find_remote(
    options: HostOptions,
    sizes: tuple[int, ...] | None,
    passed_on: Sequence[str],
    script: Sequence[str],
) -> Remote:
    """Return what to run on which hosts; ``sizes`` is what -n says, None if nothing."""
    if options.hosts is not None and options.hostfile is not None:
        raise click.UsageError("--hosts and --hostfile exclude each other")
    given = {
        "--nnodes": options.nnodes is not None,
        "--node-rank": options.node_rank is not None,
        "--standalone": options.standalone,
    }
    name = "--hosts" if options.hosts is not None else "--hostfile"
    for other, is_given in given.items():
        if is_given:
            raise click.UsageError(f"{name} and {other} exclude each other: the hosts are listed")
    if sizes is not None and len(sizes) > 1:
        raise click.UsageError("with --hosts say A:2,B:4 for hosts that differ, not -n 2,4")
    try:
        path = options.hostfile
        hosts = parse_hosts(options.hosts or "") if path is None else read_hostfile(path)
        return Remote(
            hosts=hosts,
            ssh=ssh_command(options.ssh),
            sizes=sizes_of(hosts, None if sizes is None else sizes[0]),
            endpoint=_endpoint(options, hosts),
            job=parse_name(options.rdzv_id) or f"run-{os.getpid()}-{secrets.token_hex(8)}",
            variables=variables_for(options.export),
            options=passed_on,
            script=script,
        )
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error


def introduce(remote: Remote, console: Console) -> None:
    if console.stderr.terminal is not None:
        where = f"rank 0 on {remote.hosts[0].name}"
        if len(remote.hosts) > 1:
            where += f", where it listens at {remote.endpoint}"
        hosts = f"{len(remote.hosts)} host(s)"
        console.say(f"ferrodist run: {sum(remote.sizes)} ranks on {hosts}, {where}")
    secret = [name for name in remote.variables if any(word in name for word in _LOOKS_SECRET)]
    if secret:
        console.say(
            f"ferrodist run: {', '.join(secret)} is in command lines on all hosts, where their "
            "users can read it; for a secret, name a file that the ranks read"
        )


def _endpoint(options: HostOptions, hosts: Sequence[SshHost]) -> Endpoint:
    if options.rdzv_endpoint is not None:
        return parse_endpoint(options.rdzv_endpoint)
    first = hosts[0]
    if is_loopback(first.address) and not all(is_loopback(host.address) for host in hosts):
        raise InvalidArgument(
            f"rank 0 would listen at {first.address}, where the other hosts cannot reach it: give "
            "the name by which they know this host, or --rdzv-endpoint HOST:PORT"
        )
    return Endpoint(first.address, random_port())


def variables_for(names: Sequence[str]) -> dict[str, str]:
    """Return the variables that go to all hosts: ours, and those with these names."""
    here = environment()
    for name in names:
        if not _NAME.fullmatch(name):
            raise InvalidArgument(f"{name!r} is not the name of a variable")
        if name not in here:
            raise InvalidArgument(f"{name} is not set here")
    found = {name for name in here if _NAME.fullmatch(name) and name.startswith(_OURS)}
    return {name: here[name] for name in sorted((found - _STAY_HERE) | set(names))}


def ssh_command(option: str | None) -> list[str]:
    text = (option or environment().get(variable("ssh")) or "").strip() or DEFAULT_SSH
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InvalidArgument(f"{text!r} is not a command: {error}") from error


def _folder() -> str:
    """Return the working directory, by the path with which it was entered, if that is known."""
    here, named = Path.cwd(), environment().get("PWD", "")
    is_it = os.path.isabs(named) and os.path.exists(named) and os.path.samefile(named, here)
    return named if is_it else str(here)


# -- the list of hosts ----------------------------------------------------------------------------


class SshHost(NamedTuple):
    """A host as ssh knows it, and how many ranks it has, if that is given with it."""

    name: str
    slots: int | None = None

    @property
    def address(self) -> str:
        return self.name.rpartition("@")[2]


def parse_hosts(text: str) -> list[SshHost]:
    """Read hosts by commas, ``a,user@b:2,[fe80::1]:4``; the numbers are slots."""
    return _checked([_parse_host(word.strip()) for word in text.split(",")])


def read_hostfile(path: Path) -> list[SshHost]:
    """Read a file as mpirun's: a host per line, ``b slots=2``, and comments after ``#``."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from error
    hosts = []
    for line_number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            try:
                hosts.append(_parse_line(words))
            except InvalidArgument as error:
                raise InvalidArgument(f"{path}:{line_number}: {error}") from error
    if not hosts:
        raise InvalidArgument(f"{path} names no host")
    return _checked(hosts)


def sizes_of(hosts: Sequence[SshHost], num_ranks: int | None) -> tuple[int, ...]:
    """Return how many ranks each host has; ``num_ranks`` is for those without slots."""
    bare = [host.name for host in hosts if host.slots is None]
    if num_ranks is None and bare:
        raise InvalidArgument(
            f"how many ranks should {', '.join(bare)} have? Give -n N for every host, or "
            f"{bare[0]}:N for this one"
        )
    if num_ranks is not None and not bare:
        raise InvalidArgument(
            f"-n {num_ranks} is for hosts that are given without slots, but all have them: omit "
            f"-n, and the job has {sum(host.slots or 0 for host in hosts)} ranks"
        )
    return tuple(host.slots or num_ranks or 0 for host in hosts)


def _parse_line(words: Sequence[str]) -> SshHost:
    host = _parse_host(words[0])
    for word in words[1:]:
        name, _, value = word.partition("=")
        if name == "slots":
            host = host._replace(slots=_parse_slots(value, word))
        elif name not in _IGNORED:
            raise InvalidArgument(f"{word!r} is not understood; expected 'host slots=N'")
    return host


def _parse_host(text: str) -> SshHost:
    name, colon, slots = text.rpartition(":")
    is_bracketed = name.endswith("]")
    if not colon or (":" in name and not is_bracketed):  # a name, or a bare IPv6 address
        name, colon = text, ""
    name = name.replace("[", "").replace("]", "")
    is_word = name.isprintable() and not set(name) & set(" ,'\"/\\;|&$`<>()")
    if not name or not is_word or name.startswith("-") or name.endswith("@"):
        raise InvalidArgument(f"{text!r} is not a host name; expected names as in a,b or a:2,b:2")
    return SshHost(name, _parse_slots(slots, text) if colon else None)


def _parse_slots(text: str, shown: str) -> int:
    if number(text) < 1:
        raise InvalidArgument(f"{shown!r}: slots must be a number above zero")
    return number(text)


def _checked(hosts: list[SshHost]) -> list[SshHost]:
    """Refuse a host that is listed twice: two of its ranks would have the same local rank."""
    (name, count), *_ = Counter(host.name for host in hosts).most_common(1)
    if count > 1:
        raise InvalidArgument(
            f"host {name!r} is named twice; its ranks are counted by slots, as in {name}:2"
        )
    return hosts


# -- the job --------------------------------------------------------------------------------------


def supervise_hosts(remote: Remote, policy: FailurePolicy, console: Console) -> int:
    return run_attempts(partial(_HostsAttempt, remote, policy, console), policy, console)


class _HostsAttempt(JobAttempt):
    """The launchers of all hosts."""

    extra_grace = KILL_SECONDS + _NETWORK_SECONDS

    def __init__(
        self,
        remote: Remote,
        policy: FailurePolicy,
        console: Console,
        attempt: Attempt,
        signals: Signals,
    ) -> None:
        super().__init__(policy, sum(remote.sizes), console, signals)
        self._remote = remote
        self._attempt = attempt
        self._streams = StreamSet(console)

    def run(self) -> None:
        with self._streams, Connections() as connections:
            self._start(connections)
            with self._signals.forwarded_to(connections):
                self._wait_for(connections, self._streams, self._see_end)
            connections.stop()

    def _start(self, connections: Connections) -> None:
        remote, secret = self._remote, secrets.token_bytes(SECRET_NBYTES)
        for node_rank, host in enumerate(remote.hosts):
            on_failure = partial(self._see_failure, host.name)
            is_first = node_rank == 0
            streams = HostStreams(self._console, remote.job, on_failure, is_first=is_first)
            self._streams.members.append(streams)
            command = remote.command(node_rank, self._attempt)
            connections.add(Connection(host.name, command, secret, streams))

    def _see_failure(self, host: str, report: RankFailed) -> None:
        text = f"{report.words} on host {host}"
        facts = report.is_consequence, time.monotonic(), report.exit_code, text, report.rank
        self._add(Failure(*facts))
        if not self._policy.keeps_survivors:
            self._end_within(self._policy.grace + KILL_SECONDS)

    def _see_end(self, one: Connection) -> None:
        code = one.process.returncode
        if code == 0:
            return
        exit_code = 128 - code if code < 0 else code
        if not one.streams.has_started:
            text = self._why_not_started(one, exit_code)
            self._add(Failure(False, time.monotonic(), exit_code, text, is_final=True))
            self._end_within(0.0)
        elif not one.streams.has_failed:
            text = f"the connection to host {one.host} ended with exit code {exit_code}"
            self._add(Failure(False, time.monotonic(), exit_code, text))
            self._end_within(self._policy.grace)

    def _why_not_started(self, one: Connection, exit_code: int) -> str:
        said = one.streams.startup_output() or "there was no output"
        ssh = shlex.join([*self._remote.ssh, one.host, "true"])
        if exit_code == _SSH_FAILED:
            return (
                f"host {one.host} cannot be reached by ssh: {said}\n'{ssh}' must work "
                "from here, without a password"
            )
        return (
            f"host {one.host} did not start 'ferrodist run' (exit code {exit_code}): {said}\n"
            "the working directory, the script and the Python of this command must exist there "
            "too, at the same paths"
        )

    def _add(self, failure: Failure) -> None:
        if not self.was_stopped:
            self.failures.append(failure)

    @property
    def may_be_repeated(self) -> bool:
        return super().may_be_repeated and not any(one.is_final for one in self.failures)

    def explain(self) -> None:
        if self.failures:
            self.say(str(self.first_failure))
