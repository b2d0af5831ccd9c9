# SPDX-License-Identifier: MIT OR Apache-2.0
"""supervise: a job from its start to its end, failures, signals and restarts included."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from ferrodist.backends.verdict import names_of_ranks
from ferrodist.deadline import Deadline
from ferrodist.launch.failures import Failure, first_of
from ferrodist.launch.leash import Leash
from ferrodist.launch.output.console import Console
from ferrodist.launch.output.logs import LogFiles
from ferrodist.launch.output.streams import Streams
from ferrodist.launch.part import Attempt, Part
from ferrodist.launch.processes import Crew, Order, Rank, sooner
from ferrodist.launch.reports import Begun, Failed
from ferrodist.launch.signals import Signals

INTERRUPT_GRACE = 1.5  # for all, after a Ctrl-C
_ANNOUNCE_SECONDS = 1.0  # after a failure; most jobs are over by then
LONGEST_WAIT = 0.2  # at one go: a signal that came just before is noticed after it


class Plan(NamedTuple):
    """What to run, and what to do when ranks fail.

    ``only_attempt``: another launcher counts the attempts, and this is the one to make.
    """

    command: Sequence[str]
    part: Part
    most_restarts: int = 0
    grace: float = 5.0
    keeps_survivors: bool = False
    binds: bool = False
    only_attempt: int | None = None

    @property
    def attempts(self) -> Sequence[int]:
        """The attempts that this launcher may make."""
        if self.only_attempt is not None:
            return [self.only_attempt]
        return range(self.most_restarts + 1)


def supervise(
    plan: Plan, console: Console, logs: LogFiles | None = None, leash: Leash | None = None
) -> int:
    """Run a job, and again while it fails and may be started again; return the exit code."""
    with Signals() as signals:
        for restarts in plan.attempts:
            attempt = Attempt(restarts, plan.most_restarts)
            job = _Job(plan, attempt, console, logs, signals, leash)
            job.run()
            if not job.failures or job.was_stopped or restarts == plan.attempts[-1]:
                break
            again = f"starting all again, restart {restarts + 1} of {plan.most_restarts}"
            _say(console, f"{first_of(job.failures)}; {again}")
        job.explain()
        code = job.exit_code
        console.finish(lambda: job.was_stopped)
        return code


def _say(console: Console, text: str) -> None:
    console.say(f"ferrodist run: {text}")


class _Job:
    """One attempt: all ranks, from start to end."""

    def __init__(
        self,
        plan: Plan,
        attempt: Attempt,
        console: Console,
        logs: LogFiles | None,
        signals: Signals,
        leash: Leash | None,
    ) -> None:
        self._plan = plan
        self._attempt = attempt
        self._console = console
        self._signals = signals
        self._logs = logs
        self._leash = leash
        self._deadline = Deadline(None)
        self._announcement = ""
        self._announce_at = math.inf
        self.failures: list[Failure] = []

    def run(self) -> None:
        """Start all ranks and wait until none is left."""
        plan, part = self._plan, self._plan.part
        self._streams = Streams(
            part.num_ranks,
            self._console,
            self._logs,
            attempt=self._attempt.restarts,
            first_rank=part.ranks.start,
        )
        if self._leash is not None:
            self._leash.report(Begun())
        with self._streams as streams:
            files = [streams.files(rank) for rank in part.ranks]
            orders = [Order(plan.command, **own._asdict()) for own in files]
            with Crew(orders, self._attempt, part=part, binds=plan.binds) as crew:
                streams.attach(crew)
                if self._leash is not None:
                    self._leash.attach(crew)
                self._signals.hand_on_to(crew, streams.let_terminal_go)
                try:
                    self._wait_for(crew)
                    for rank in crew.stop():
                        self._streams.rank_ended(rank.rank)
                        self._see_stopped(crew, rank)
                finally:
                    self._signals.hand_on_to_nobody()

    def _wait_for(self, crew: Crew) -> None:
        while crew.running and self._deadline.remaining() > 0:
            longest = min(LONGEST_WAIT, self._streams.wait_seconds(), self._deadline.remaining())
            for rank in crew.wait(longest):
                self._streams.rank_ended(rank.rank)
                self._see_end(crew, rank)
            self._streams.write_due()
            self._announce_if_due()
            self._heed_signals()

    def _see_end(self, crew: Crew, rank: Rank) -> None:
        """Take note of a rank that has ended; the others have a while if it failed."""
        if rank.process.returncode == 0 or self.was_stopped:
            return
        failure = _failure_of(crew, rank)
        if not self._announcement and not failure.is_consequence:
            self._announcement = f"{failure}; {self._what_others_may_do}"
            self._announce_at = time.monotonic() + _ANNOUNCE_SECONDS
        if not self._plan.keeps_survivors:
            self._deadline = sooner(self._deadline, Deadline(self._plan.grace))
        self._add(failure)

    def _see_stopped(self, crew: Crew, rank: Rank) -> None:
        """Take note of a rank that we have ended: it may be the one that began it all."""
        failure = _failure_of(crew, rank)
        if failure.words is not None and not failure.is_consequence and not self.was_stopped:
            self._add(failure._replace(code=1))  # as if it had ended in time

    def _add(self, failure: Failure) -> None:
        self.failures.append(failure)
        if self._leash is not None:
            facts = failure.rank, failure.exit_code, failure.is_consequence, str(failure)
            self._leash.report(Failed(*facts))

    def _announce_if_due(self) -> None:
        """Say what is waited for, unless the others end soon."""
        if time.monotonic() >= self._announce_at:
            self._announce_at = math.inf
            _say(self._console, self._announcement)

    @property
    def _what_others_may_do(self) -> str:
        if self._plan.keeps_survivors:
            return "the others go on"
        return f"the others have {self._plan.grace:g} s to end"

    def _heed_signals(self) -> None:
        """After a signal all have a while to end; after a second one, or for nobody, none."""
        received = self._signals.received
        if self._signals.are_urgent or self._console.is_broken or self._is_let_go:
            self._deadline = Deadline(0.0)
        elif received:
            grace = INTERRUPT_GRACE if received[0] is signal.SIGINT else self._plan.grace
            self._deadline = sooner(self._deadline, Deadline(grace))

    @property
    def was_stopped(self) -> bool:
        """True if somebody asked for the end."""
        return bool(self._signals.received) or self._console.is_broken or self._is_let_go

    @property
    def _is_let_go(self) -> bool:
        return self._leash is not None and self._leash.is_cut

    @property
    def exit_code(self) -> int:
        """That of the rank that failed first; 0 if none did."""
        if self.failures:
            return first_of(self.failures).exit_code
        if self._signals.received:
            return 128 + self._signals.received[0]
        if self._is_let_go:
            return 128 + signal.SIGHUP
        return 128 + signal.SIGPIPE if self._console.is_broken else 0

    def explain(self) -> None:
        """Show the traceback of the first rank that failed, as the last of all that is shown."""
        if self._console.is_broken and not isinstance(self._console.error, BrokenPipeError):
            _say(self._console, f"the output cannot be written: {self._console.error}")
        if error := self._streams.log_error():
            _say(self._console, f"the log files are not complete: {error}")
        if not self.failures:
            return
        first = first_of(self.failures)
        trace = first.traceback_in(self._streams.last_words(first.rank))
        if trace and not self._console.shows_at_end(trace):
            _say(self._console, f"{first} and failed first; its traceback:\n{trace}")
        elif not trace:
            others = sorted(failure.rank for failure in self.failures if failure is not first)
            then = f"; then {names_of_ranks(others)} failed" if others else ""
            _say(self._console, f"{first}{then}")


def _failure_of(crew: Crew, rank: Rank) -> Failure:
    process = rank.process
    words = crew.last_words(rank.rank)
    return Failure(rank.rank, process.pid, process.returncode, time.monotonic(), words)
