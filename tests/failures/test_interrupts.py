"""Signal handlers that raise at any point of a call: the group is usable or aborted after each.

Rank 0 is interrupted; the others make the same call again and again. If the call of rank 0 was not
made, or was done, its next one is in step with theirs. Otherwise all ranks raise GroupAborted, and
go on in another group. Ranks that wait for each other in vain end in CollectiveTimeout.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ferrodist import (
    CollectiveTimeout,
    DistributedError,
    GroupAborted,
    InvalidArgument,
    RankLost,
    ReduceOp,
    SimulatedBackend,
    UnsupportedOp,
)

SECONDS = 600.0  # for a job of a long test
ENVIRONMENT = {"FERRODIST_TIMEOUT": "15"}
LONGEST_DELAY = 2e-3  # seconds within which a signal comes: a call takes less


class Interrupt(Exception):
    """What the signal handler raises."""


def mixed_tree(rank: int) -> dict[str, Any]:
    return {"a": np.full(3, rank, np.float32), "b": np.full(2, rank)}


def add(a: Any, b: Any) -> Any:
    return a + b


SUM = ReduceOp.custom(add, name="a sum")


def exchange(group: Any, **options: Any) -> int:
    """Give a number to the next rank of the ring; return the sum of all three."""
    rank, before = group.rank, (group.rank - 1) % 3
    got = group.sendrecv(np.full(4, rank), (rank + 1) % 3, before, **options)
    return int(got[0]) - before + 3


CALLS: dict[str, Callable[[Any], Any]] = {  # each gives 0 + 1 + 2
    "fast": lambda b: b.allreduce(np.full(3, b.rank))[0],
    "tree": lambda b: b.allreduce(mixed_tree(b.rank))["b"][1],
    "algorithm": lambda b: b.allreduce(np.full(5, b.rank), algorithm="ring")[0],
    "timeout": lambda b: b.allreduce(np.full(3, b.rank), timeout=20)[0],
    "objects": lambda b: sum(b.all_gather_object(b.rank)),
    "custom op": lambda b: b.allreduce(np.full(3, b.rank), op=SUM)[0],
    "uneven": lambda b: len(b.all_gather_uneven(np.full(b.rank, b.rank))),
    "in flight": lambda b: b.allreduce(mixed_tree(b.rank), async_op=True).wait()["b"][1],
    "sendrecv": exchange,
    "sendrecv with timeout": lambda b: exchange(b, timeout=20),
}


class Interrupted:
    """Rank 0: it makes calls and is interrupted in them, in one group after the other."""

    def __init__(self, world: Any, call: Callable[[Any], Any]) -> None:
        self.world, self.call = world, call
        self.group = self._next_group()

    def _next_group(self) -> Any:
        self.world.broadcast(1)
        return self.world.dup()

    def make(self, interrupt: Callable[[], None], stop: Callable[[], None]) -> bool:
        """Make a call that is interrupted, and one that is not; tell whether it was."""
        was_interrupted = False
        for begin in (interrupt, lambda: None):
            try:
                try:
                    begin()
                    assert self.call(self.group) == 3
                finally:
                    stop()
            except Interrupt:
                was_interrupted = True
            except GroupAborted:
                self._move_on()
            except UnsupportedOp as error:  # the function of the program raised it
                if not isinstance(error.__cause__, Interrupt):
                    raise
        return was_interrupted

    def _move_on(self) -> None:
        before, self.group = self.group, self._next_group()
        before.close()

    def end(self) -> None:
        self.group.abort("the test is over")
        self.world.broadcast(0)


def be_another_rank(world: Any, call: Callable[[Any], Any]) -> None:
    before = None
    while world.broadcast(0):
        if before is not None:  # all ranks know by now that it was aborted
            before.close()
        try:
            before = world.dup()
        except GroupAborted:  # rank 0 has come out of it first, and was interrupted in the group
            before = None
            continue
        while call_again(before, call):
            pass


def call_again(group: Any, call: Callable[[Any], Any]) -> bool:
    """Make the call; tell whether the group goes on."""
    try:
        assert call(group) == 3
    except GroupAborted:
        return False
    except (CollectiveTimeout, RankLost):
        raise
    except DistributedError as error:
        if "Interrupt" not in str(error):  # rank 0 has told what its function raised
            raise
    return True


def interrupt_everywhere(world: Any, call: Callable[[Any], Any], events: tuple[str, ...]) -> int:
    """Interrupt a call at its first event, another at its second, and so on; return how many."""
    rank_0, nth, num_events = Interrupted(world, call), 0, 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal num_events
        num_events += event in events
        if event in events and num_events == nth:
            raise Interrupt  # as a signal handler does that runs here
        return trace

    while num_events >= nth:
        nth, num_events = nth + 1, 0
        rank_0.make(lambda: sys.settrace(trace), lambda: sys.settrace(None))
    rank_0.end()
    return nth


def interrupt_by_signals(world: Any, call: Callable[[Any], Any], num_interrupts: int) -> int:
    """Interrupt calls at times of chance, until there were so many interrupts."""
    delays = random.Random(1)
    is_armed = False

    def on_alarm(number: int, frame: Any) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise Interrupt

    def arm() -> None:
        nonlocal is_armed
        is_armed = True
        signal.setitimer(signal.ITIMER_REAL, delays.uniform(1e-6, LONGEST_DELAY))

    def disarm() -> None:
        nonlocal is_armed
        is_armed = False

    signal.signal(signal.SIGALRM, on_alarm)
    rank_0 = Interrupted(world, call)
    try:
        while num_interrupts > 0:
            num_interrupts -= rank_0.make(arm, disarm)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    rank_0.end()
    return num_interrupts


def of_all_ranks(interrupt: Callable[..., int], call: Callable[[Any], Any], *args: Any) -> Any:
    def body(world: Any, pipe: Any = None) -> Any:
        if world.rank > 0:
            return be_another_rank(world, call)
        return interrupt(world, call, *args)

    return body


def run_on_threads(body: Callable[[Any], Any]) -> Any:
    """Run ranks that are threads; rank 0 is the main thread, which gets the signals."""
    first, *others = SimulatedBackend.create_group(3)
    threads = [threading.Thread(target=body, args=(one,), daemon=True) for one in others]
    for thread in threads:
        thread.start()
    result = body(first)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    return result


# What differs between backends; the other calls are made on shared memory, and in long tests.
DIFFERENT = ("fast", "tree", "in flight", "sendrecv with timeout")


@pytest.fixture(
    params=[c if c in DIFFERENT else pytest.param(c, marks=pytest.mark.long) for c in CALLS]
)
def call(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return CALLS[request.param]


@pytest.mark.parametrize("name", [name for name in CALLS if name not in DIFFERENT])
def test_calls_of_all_kinds_leave_a_usable_or_aborted_group(start_job, name):
    with start_job(3, of_all_ranks(interrupt_everywhere, CALLS[name], ("call",))) as job:
        assert job.results()[0] >= 3
    with start_job(3, of_all_ranks(interrupt_by_signals, CALLS[name], 100)) as job:
        assert job.results()[0] == 0


def test_interrupts_at_the_first_line_of_every_function_leave_a_usable_or_aborted_group(
    start, call
):
    with start(3, of_all_ranks(interrupt_everywhere, call, ("call",)), **ENVIRONMENT) as job:
        assert job.results()[0] >= 3


@pytest.mark.long
@pytest.mark.timeout(600)
def test_interrupts_at_every_line_leave_a_usable_or_aborted_group(start, call):
    body = of_all_ranks(interrupt_everywhere, call, ("call", "line", "return"))
    with start(3, body, **ENVIRONMENT) as job:
        assert job.results(SECONDS)[0] >= 3


@pytest.mark.parametrize(
    "num_interrupts", [100, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
def test_signals_at_any_time_leave_a_usable_or_aborted_group(start, call, num_interrupts):
    with start(3, of_all_ranks(interrupt_by_signals, call, num_interrupts), **ENVIRONMENT) as job:
        assert job.results(SECONDS)[0] == 0


@pytest.mark.parametrize("num_interrupts", [20, pytest.param(500, marks=pytest.mark.long)])
def test_signals_while_a_group_is_split_leave_it_usable_or_aborted(start, num_interrupts):
    """The others look every 50 ms whether the group they split was aborted."""
    made: list[Any] = []  # the end of a group would be interrupted, too

    def split_by(group: Any) -> int:
        made.append(group.split_by(0))
        return int(made[-1].world_size)

    body = of_all_ranks(interrupt_by_signals, split_by, num_interrupts)
    with start(3, body, **ENVIRONMENT) as job:
        assert job.results(SECONDS)[0] == 0


INNER = {
    "fast": lambda b: b.allreduce(np.full(3, b.rank)),
    "tree": lambda b: b.allreduce(mixed_tree(b.rank)),
    "in flight": lambda b: b.allreduce(np.full(3, b.rank), async_op=True).wait(),
}


@pytest.mark.parametrize("outer", ["fast", "tree"])
@pytest.mark.parametrize("inner", INNER)
def test_call_of_a_signal_handler_inside_a_call_of_the_group_is_refused(start_job, outer, inner):
    """Rank 0 waits in a call for rank 1; the handler's call would wait for that call."""

    def body(backend, pipe):
        world = backend.dup()

        def on_alarm(number, frame):
            with pytest.raises(InvalidArgument, match="set a flag there") as caught:
                INNER[inner](backend)
            assert "inside call #1 of the same group" in str(caught.value)
            world.barrier()  # another group's call is no matter

        if backend.rank == 0:
            signal.signal(signal.SIGALRM, on_alarm)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        else:
            world.barrier()
        result = CALLS[outer](backend)
        if inner == "in flight":  # it was made by the handler, and only not waited for
            assert backend.rank == 0 or INNER[inner](backend)[0] == 3
        return result

    with start_job(3, body, **ENVIRONMENT) as job:
        assert job.results() == [3, 3, 3]


def test_member_that_ends_a_new_group_at_once_leaves_it_to_the_others(start_job):
    def body(world, pipe):
        for number in range(300):
            group = world.dup()
            if world.rank == number % 5:
                group.abort("at once")
            with pytest.raises(GroupAborted, match="at once"):
                group.barrier()
            world.barrier()
            group.close()

    with start_job(5, body) as job:
        job.results()


# Not in flight, nor messages: those of threads wait for a Future or a Condition of Python's own,
# which a signal can leave locked.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer
@pytest.mark.parametrize("name", ["fast", "tree", "timeout", "objects"])
def test_interrupts_of_a_rank_that_is_the_main_thread_leave_a_usable_or_aborted_group(name):
    assert run_on_threads(of_all_ranks(interrupt_everywhere, CALLS[name], ("call",))) >= 3
