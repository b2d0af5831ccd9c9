# SPDX-License-Identifier: MIT OR Apache-2.0
"""supervise_hosts: a job on several hosts from its start to its end, restarts included.

Each host has a launcher of its own, which looks after its ranks. Here it is decided when all of
them end, and whether all are started again: only this process sees all hosts.
"""

from __future__ import annotations

import secrets
import shlex
import signal
import time
from functools import partial
from typing import NamedTuple

from ferrodist.deadline import Deadline
from ferrodist.launch.connections import Connection, Connections
from ferrodist.launch.output.console import Console
from ferrodist.launch.output.host_streams import AllHostStreams
from ferrodist.launch.part import Attempt
from ferrodist.launch.processes import KILL_SECONDS, sooner
from ferrodist.launch.remote import Remote
from ferrodist.launch.reports import Failed
from ferrodist.launch.signals import Signals
from ferrodist.launch.supervisor import INTERRUPT_GRACE, LONGEST_WAIT
from ferrodist.rendezvous.job import SECRET_NBYTES

_NETWORK_SECONDS = 1.0  # for words from host to host, on top of what the ranks may take
_SSH_FAILED = 255  # by ssh's manual


class HostsPlan(NamedTuple):
    """What to run where, and what to do when ranks fail."""

    remote: Remote
    most_restarts: int = 0
    grace: float = 5.0
    keeps_survivors: bool = False


class _Failure(NamedTuple):
    """A rank that has failed on some host, or a host itself."""

    is_consequence: bool
    when: float
    exit_code: int
    words: str
    is_final: bool = False  # to start again would not help


def supervise_hosts(plan: HostsPlan, console: Console) -> int:
    """Run a job on several hosts, and again while it fails and may; return the exit code."""
    with Signals() as signals:
        for restarts in range(plan.most_restarts + 1):
            attempt = _HostsAttempt(plan, Attempt(restarts, plan.most_restarts), console, signals)
            attempt.run()
            if restarts == plan.most_restarts or not attempt.may_be_repeated:
                break
            again = f"starting all again, restart {restarts + 1} of {plan.most_restarts}"
            console.say(f"ferrodist run: {attempt.first_failure.words}; {again}")
        attempt.explain()
        code = attempt.exit_code
        console.finish(lambda: attempt.was_stopped)
        return code


class _HostsAttempt:
    """One attempt: all hosts, from start to end."""

    def __init__(
        self, plan: HostsPlan, attempt: Attempt, console: Console, signals: Signals
    ) -> None:
        self._plan = plan
        self._attempt = attempt
        self._console = console
        self._signals = signals
        self._streams = AllHostStreams(console)
        self._failures: list[_Failure] = []
        self._deadline = Deadline(None)

    def run(self) -> None:
        """Start the launchers of all hosts and wait until none is left."""
        try:
            with Connections() as connections:
                self._start(connections)
                self._signals.hand_on_to(connections, lambda: None)
                try:
                    self._wait_for(connections)
                finally:
                    self._signals.hand_on_to_nobody()
                connections.stop()
        finally:
            self._streams.close()

    def _start(self, connections: Connections) -> None:
        remote, secret = self._plan.remote, secrets.token_bytes(SECRET_NBYTES)
        for node_rank, host in enumerate(remote.hosts):
            streams = self._streams.add(remote.job, partial(self._hear, host.name))
            command = remote.command(node_rank, self._attempt)
            connections.add(Connection(host, command, secret, streams))

    def _wait_for(self, connections: Connections) -> None:
        while connections.running and self._deadline.remaining() > 0:
            longest = min(LONGEST_WAIT, self._streams.wait_seconds(), self._deadline.remaining())
            for one in connections.wait(longest):
                self._see_end(one)
            self._streams.write_due()
            self._heed_signals()

    def _hear(self, host: str, report: Failed) -> None:
        """Take note of a rank that has failed; the others have a while, also on other hosts."""
        words = f"{report.words} on host {host}"
        self._add(_Failure(report.is_consequence, time.monotonic(), report.exit_code, words))
        if not self._plan.keeps_survivors:
            self._give(self._plan.grace + KILL_SECONDS)

    def _see_end(self, one: Connection) -> None:
        """Take note of a host whose ssh has ended, if it has not reported why."""
        code = one.process.returncode
        if code == 0:
            return
        exit_code = 128 - code if code < 0 else code
        if not one.streams.has_begun:
            words = self._why_not_begun(one, exit_code)
            self._add(_Failure(False, time.monotonic(), exit_code, words, is_final=True))
            self._give(0.0)
        elif not one.streams.has_failed:
            words = f"the connection to host {one.host.name} ended with exit code {exit_code}"
            self._add(_Failure(False, time.monotonic(), exit_code, words))
            self._give(self._plan.grace)

    def _why_not_begun(self, one: Connection, exit_code: int) -> str:
        said = one.streams.first_words() or "nothing was said"
        ssh = shlex.join([*self._plan.remote.ssh, one.host.name, "true"])
        if exit_code == _SSH_FAILED:
            return (
                f"host {one.host.name} cannot be reached by ssh: {said}\n'{ssh}' has to work "
                "without a password, from here and now"
            )
        return (
            f"host {one.host.name} did not start 'ferrodist run' (exit code {exit_code}): {said}\n"
            "the working directory, the script and the Python of this command have to be there "
            "too, at the same places"
        )

    def _add(self, failure: _Failure) -> None:
        if not self.was_stopped:
            self._failures.append(failure)

    def _give(self, seconds: float) -> None:
        """Let the hosts that are running go on for a while at most."""
        self._deadline = sooner(self._deadline, Deadline(seconds))

    def _heed_signals(self) -> None:
        received = self._signals.received
        if self._signals.are_urgent or self._console.is_broken:
            self._give(0.0)
        elif received:
            grace = INTERRUPT_GRACE if received[0] is signal.SIGINT else self._plan.grace
            self._give(grace + KILL_SECONDS + _NETWORK_SECONDS)

    @property
    def was_stopped(self) -> bool:
        """True if somebody asked for the end."""
        return bool(self._signals.received) or self._console.is_broken

    @property
    def first_failure(self) -> _Failure:
        """The failure that the others follow from, as far as one can tell."""
        return min(self._failures)

    @property
    def may_be_repeated(self) -> bool:
        """True if it has failed in a way that may pass."""
        is_final = any(failure.is_final for failure in self._failures)
        return bool(self._failures) and not is_final and not self.was_stopped

    @property
    def exit_code(self) -> int:
        """That of the host that failed first; 0 if none did."""
        if self._failures:
            return self.first_failure.exit_code
        if self._signals.received:
            return 128 + self._signals.received[0]
        return 128 + signal.SIGPIPE if self._console.is_broken else 0

    def explain(self) -> None:
        """Say which host failed first, as the last of all that is said."""
        if self._failures:
            self._console.say(f"ferrodist run: {self.first_failure.words}")
