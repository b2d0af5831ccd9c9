# SPDX-License-Identifier: MIT OR Apache-2.0
"""supervise: a job from its start to its end, failures, signals and restarts included."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, Self

from ferrodist.backends.failures import CRASHES, died, names_of_ranks
from ferrodist.deadline import Deadline
from ferrodist.launch.output.console import Console
from ferrodist.launch.output.logs import LogFiles, is_at_end, traceback_in
from ferrodist.launch.output.streams import Streams, StreamSet
from ferrodist.launch.processes import (
    FORWARDED_SIGNALS,
    KILL_SECONDS,
    Attempt,
    NodeSpec,
    ProcessSet,
    ProcessSpec,
    Worker,
    WorkerGroup,
    sooner,
)
from ferrodist.launch.reaper import ENDING_SIGNALS, become_subreaper
from ferrodist.launch.ssh import ControlPipe, RankFailed, Started
from ferrodist.rendezvous.watch import describe_exit

_INTERRUPT_GRACE = 1.5  # for all, after a Ctrl-C
_INSIST_SECONDS = 1.0  # a signal again after so long is a second request
_ANNOUNCE_SECONDS = 1.0  # after a failure; most jobs are over by then
_LONGEST_WAIT = 0.2  # at once: a signal that came just before is noticed after it
_MOST_CHARACTERS = 120  # of an error that its rank has shown as a whole
_SIGNAL_CODES = 128  # exit codes above it stand for signals, as in a shell
_MOST_NAMES = 5  # of processes that ranks have left
_SETTLE_SECONDS = 0.5  # for what ranks have left to end by itself, as helpers of multiprocessing do


class FailurePolicy(NamedTuple):
    """What to do when ranks fail, and with what they leave.

    ``grace`` is how long the others may go on, and what ranks have started at a normal end unless
    ``keeps_children`` leaves it alone. ``only_attempt``: another launcher counts the attempts, and
    this is the one to make.
    """

    most_restarts: int = 0
    grace: float = 5.0
    keeps_survivors: bool = False
    keeps_children: bool = False
    only_attempt: int | None = None

    @property
    def attempts(self) -> list[Attempt]:
        one, most = self.only_attempt, self.most_restarts
        return [Attempt(number, most) for number in (range(most + 1) if one is None else [one])]


class JobSpec(NamedTuple):
    """What to run on this host."""

    command: Sequence[str]
    node: NodeSpec
    policy: FailurePolicy = FailurePolicy()
    binds: bool = False


def supervise(
    spec: JobSpec,
    console: Console,
    logs: LogFiles | None = None,
    control: ControlPipe | None = None,
) -> int:
    """Run a job, and again while it fails and may be started again; return the exit code."""
    make = partial(_LocalAttempt, spec, console, logs, control)
    return run_attempts(make, spec.policy, console)


def run_attempts(
    make: Callable[[Attempt, Signals], JobAttempt], policy: FailurePolicy, console: Console
) -> int:
    """Make attempts until one does not fail, or may not be repeated; return the exit code."""
    with Signals() as signals:
        for attempt in policy.attempts:
            job = make(attempt, signals)
            job.run()
            if attempt == policy.attempts[-1] or not job.may_be_repeated:
                break
            again = f"starting all again, restart {attempt.restarts + 1} of {attempt.most_restarts}"
            job.say(f"{_in_short(job.first_failure)}; {again}")
        job.explain()
        if job.has_survived:
            job.say("the other ranks ended well, so the exit code is 0 (--keep-survivors)")
        code = job.exit_code
        console.finish(lambda: job.was_stopped)
        return code


class Failure(NamedTuple):
    """A rank that did not end well, here or on another host, or a host itself.

    ``how`` is how the process of a rank of this host ended, ``text`` says the error as well.
    """

    is_consequence: bool  # its error says that it fails because another rank did
    when: float
    exit_code: int
    text: str
    rank: int = -1
    code: int = 0  # of its process, as of Popen: minus the signal that killed it
    how: str = ""
    is_final: bool = False  # to start again would not help

    def __str__(self) -> str:
        return self.text


class JobAttempt:
    """One attempt, from its start to its end: what is the same on one host and on several."""

    extra_grace = 0.0  # seconds, after a signal

    def __init__(
        self, policy: FailurePolicy, num_ranks: int, console: Console, signals: Signals
    ) -> None:
        self._policy = policy
        self._num_ranks = num_ranks
        self._console = console
        self._signals = signals
        self._deadline = Deadline(None)
        self.failures: list[Failure] = []

    def run(self) -> None:
        """Start all and wait until none is left."""
        raise NotImplementedError

    def explain(self) -> None:
        """Say why it failed, as the last of all that is said."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        self._console.say(f"ferrodist run: {text}")

    def _wait_for(
        self,
        processes: ProcessSet[Any],
        streams: StreamSet,
        see_end: Callable[[Any], None] = lambda process: None,
        *,
        are_over: Callable[[], bool] | None = None,
    ) -> None:
        are_over = are_over or (lambda: not processes.running)
        while not are_over() and self._deadline.remaining() > 0:
            longest = min(_LONGEST_WAIT, streams.wait_seconds(), self._deadline.remaining())
            for process in processes.wait(longest):
                see_end(process)
            streams.write_due()
            self._announce_if_due()
            self._obey_signals()

    def _announce_if_due(self) -> None:
        """Say what is waited for."""

    def _end_within(self, seconds: float) -> None:
        self._deadline = sooner(self._deadline, Deadline(seconds))

    def _obey_signals(self) -> None:
        """After a signal all have a while to end; after a second one, or for nobody, none."""
        received = self._signals.received
        if self._signals.are_urgent or self._console.is_broken or self._is_abandoned:
            self._end_within(0.0)
        elif received:
            grace = _INTERRUPT_GRACE if received[0] is signal.SIGINT else self._policy.grace
            self._end_within(grace + self.extra_grace)

    @property
    def _is_abandoned(self) -> bool:
        """True if the launcher that has started this one is gone."""
        return False

    @property
    def was_stopped(self) -> bool:
        return bool(self._signals.received) or self._console.is_broken or self._is_abandoned

    @property
    def may_be_repeated(self) -> bool:
        return bool(self.failures) and not self.was_stopped and not self.has_survived

    @property
    def has_survived(self) -> bool:
        """True if ranks were lost, and those that were kept have all ended with 0.

        Lost is the rank that failed first, and any that a signal has killed. One that ends with
        another exit code later is a survivor that has failed.
        """
        if not (self._policy.keeps_survivors and self.failures) or self.was_stopped:
            return False
        first = self.first_failure
        are_lost = all(one is first or one.exit_code > _SIGNAL_CODES for one in self.failures)
        are_ranks = all(one.rank >= 0 for one in self.failures)  # no host that could not be reached
        return are_lost and are_ranks and len(self.failures) < self._num_ranks

    @property
    def first_failure(self) -> Failure:
        """The failure that the others follow from, as far as one can tell."""
        return min(self.failures, key=lambda failure: (failure.is_consequence, failure.when))

    @property
    def exit_code(self) -> int:
        if self.has_survived:
            return 0
        if self.failures:
            return self.first_failure.exit_code
        if self._signals.received:
            return 128 + self._signals.received[0]
        if self._is_abandoned:
            return 128 + signal.SIGHUP
        return 128 + signal.SIGPIPE if self._console.is_broken else 0


class _LocalAttempt(JobAttempt):
    """The ranks of this host."""

    def __init__(
        self,
        spec: JobSpec,
        console: Console,
        logs: LogFiles | None,
        control: ControlPipe | None,
        attempt: Attempt,
        signals: Signals,
    ) -> None:
        super().__init__(spec.policy, spec.node.num_ranks, console, signals)
        self._plan = spec
        self._attempt = attempt
        self._logs = logs
        self._control = control
        self._announcement = ""
        self._announce_at = math.inf

    def run(self) -> None:
        spec, node = self._plan, self._plan.node
        self._streams = Streams(
            node.num_ranks,
            self._console,
            self._logs,
            attempt=self._attempt.restarts,
            first_rank=node.ranks.start,
            front_rank=node.debug_rank or 0,
        )
        if self._control is not None:
            self._control.report(Started())
        with self._streams as streams:
            specs = [ProcessSpec(spec.command, streams.ranks[rank].files) for rank in node.ranks]
            with WorkerGroup(specs, self._attempt, node=node, binds=spec.binds) as workers:
                self._workers = workers
                become_subreaper()  # in case the reaper is killed
                streams.attach(workers)
                if self._control is not None:
                    self._control.attach(workers)
                with self._signals.forwarded_to(workers, streams.restore_terminal):
                    self._wait_for(workers, streams, self._see_end)
                    if workers.reaper_end is None:
                        self._end_rest()
                    if workers.reaper_end is not None:  # be it meanwhile
                        self._end_orphans(workers.reaper_end)

    def _end_rest(self) -> None:
        workers, stopped = self._workers, list(self._workers.running)
        has_ended_well = not (stopped or self.failures or self.was_stopped)
        if has_ended_well and self._policy.keeps_children:
            workers.leave_children()
            return
        if has_ended_well:
            self._wait_until_empty(_SETTLE_SECONDS)
        workers.terminate()
        self._wait_until_empty(self._policy.grace if has_ended_well else KILL_SECONDS)
        workers.kill()
        for worker in stopped:  # one of them may be the rank that began it all
            self._streams.ranks[worker.rank].retire()
            error = self._workers.final_error(worker.rank)
            if error is not None and not error.is_consequence and not self.was_stopped:
                self._add(self._failure_of(worker, 1))  # as if it had ended in time
        self._say_what_was_left(has_ended_well)

    def _end_orphans(self, how: str) -> None:
        """End what ranks have left whose reaper was killed, as when memory runs out."""
        workers = self._workers
        workers.end_orphans()
        also = {pid: name for pid, name in workers.asked.items() if not workers.is_rank(pid)}
        ended = f"; ended what they had left running: {_names_of(also)}" if also else ""
        self.say(f"the parent process of the ranks {how}, and the ranks with it{ended}")
        self._say_what_was_left(has_ended_well=False)

    def _wait_until_empty(self, seconds: float) -> None:
        workers = self._workers
        self._deadline = Deadline(seconds)
        self._wait_for(workers, self._streams, are_over=lambda: workers.is_empty)

    def _say_what_was_left(self, has_ended_well: bool) -> None:
        """Name what did not end with the job: a program may have counted on it, or still runs."""
        workers = self._workers
        if has_ended_well and workers.asked:
            names = _names_of(workers.asked)
            self.say(
                f"ended what ranks had left running, which --keep-children would keep: {names}"
            )
        if workers.stayed:
            self.say(f"could not end what ranks have started: {_names_of(workers.stayed)}")

    def _see_end(self, worker: Worker) -> None:
        self._streams.ranks[worker.rank].retire()
        if worker.returncode == 0 or self.was_stopped:
            return
        failure = self._failure_of(worker, worker.returncode or 0)
        is_due = self._announce_at < math.inf
        if not self._announcement or (is_due and not failure.is_consequence):
            others = f"have {self._policy.grace:g} s to end"
            others = "go on" if self._policy.keeps_survivors else others
            self._announcement = f"{_in_short(failure)}; the others {others}"
            self._announce_at = time.monotonic() + _ANNOUNCE_SECONDS
        if not self._policy.keeps_survivors:
            self._end_within(self._policy.grace)
        self._add(failure)

    def _failure_of(self, worker: Worker, code: int) -> Failure:
        """Describe how a rank ended: its exit code, or minus the signal that killed it.

        A rank that raised has noted its error before its process was gone, and others may have gone
        sooner, because of it.
        """
        error = self._workers.final_error(worker.rank)
        how = f"rank {worker.rank} (pid {worker.pid}) {describe_exit(code)}"
        lines = [] if error is None else error.text.splitlines()
        return Failure(
            is_consequence=error is not None and error.is_consequence,
            when=time.monotonic() if error is None else error.when,
            exit_code=_SIGNAL_CODES - code if code < 0 else code,
            text=f"{how} ({lines[0]})" if lines else how,
            rank=worker.rank,
            code=code,
            how=how,
        )

    def _add(self, failure: Failure) -> None:
        self.failures.append(failure)
        if self._control is not None:
            facts = failure.rank, failure.exit_code, failure.is_consequence, str(failure)
            self._control.report(RankFailed(*facts))

    def _announce_if_due(self) -> None:
        if time.monotonic() >= self._announce_at:
            self._announce_at = math.inf
            self.say(self._announcement)

    @property
    def _is_abandoned(self) -> bool:
        return self._control is not None and self._control.is_closed

    def explain(self) -> None:
        if self._console.is_broken and not isinstance(self._console.error, BrokenPipeError):
            self.say(f"the output cannot be written: {self._console.error}")
        if error := self._streams.log_error():
            self.say(f"the log files are not complete: {error}")
        if not self.failures:
            return
        first = self.first_failure
        trace = _traceback(first, self._streams.ranks[first.rank].last_output())
        if trace and not self._console.stderr.shows_at_end(trace):
            was_first = "" if first.is_consequence else " and failed first"
            self.say(f"{first.how}{was_first}; its traceback:\n{trace}")
        elif not trace:
            others = sorted(failure.rank for failure in self.failures if failure is not first)
            then = f"; then {names_of_ranks(others)} failed" if others else ""
            advice = f"; {died(first.how).advice}" if -first.code in CRASHES else ""
            self.say(f"{first}{advice}{then}")


def _traceback(failure: Failure, output: str) -> str:
    """Find the traceback that it ended with; '' if its output ends with something else."""
    trace = traceback_in(output)
    is_its_own = trace != "" and is_at_end(trace, output)
    if failure.code < 0:  # a signal: what it raised before is not what ended it
        is_its_own = is_its_own and trace.startswith("Fatal Python error")
    return trace if is_its_own else ""


def _in_short(failure: Failure) -> str:
    """Say it without all that the error says: the rank itself has shown that."""
    text = str(failure)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}...)"


def _names_of(processes: dict[int, str]) -> str:
    named = [f"{name} (pid {pid})" for pid, name in processes.items()]
    more = len(named) - _MOST_NAMES
    return ", ".join(named[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


class Signals:
    """Forwards signals to ranks while its context lasts; remembers those that ask for the end.

    What was ignored when the launcher started, as by nohup, stays so.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._times: list[float] = []
        self._processes: ProcessSet[Any] | None = None
        self._restore_terminal: Callable[[], None] = lambda: None
        self._previous: dict[int, Any] = {}

    @property
    def are_urgent(self) -> bool:
        """True if somebody insists: a second Ctrl-C, or anything again after a while.

        Several at once are one: a terminal that closes sends SIGHUP, and so does its shell.
        """
        has_repeated = len(self._times) > 1 and self._times[-1] - self._times[0] > _INSIST_SECONDS
        return has_repeated or self.received.count(signal.SIGINT) > 1

    @contextmanager
    def forwarded_to(
        self, processes: ProcessSet[Any], restore_terminal: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Forward them to these; ``restore_terminal`` is called before Ctrl-Z stops us."""
        self._processes, self._restore_terminal = processes, restore_terminal
        try:
            for number in self.received:  # while the ranks were being started
                processes.send_signal(number)
            yield
        finally:
            self._processes = None

    def __enter__(self) -> Self:
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        handlers = dict.fromkeys(FORWARDED_SIGNALS, self._take)
        for number, handler in {**handlers, signal.SIGTSTP: self._stop}.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number in ENDING_SIGNALS:
            self.received.append(signal.Signals(number))
            self._times.append(time.monotonic())
        if self._processes is not None:
            self._processes.send_signal(number)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Stop the ranks and this process, until somebody continues it."""
        processes = self._processes
        if processes is not None:
            processes.send_signal(signal.SIGSTOP)
            self._restore_terminal()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # returns when we are continued
        signal.signal(number, self._stop)
        if processes is not None:
            processes.send_signal(signal.SIGCONT)
