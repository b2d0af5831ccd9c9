# SPDX-License-Identifier: MIT OR Apache-2.0
"""run_ranks: one function on n ranks in this process; no error is lost, no rank left hanging."""

from __future__ import annotations

import queue
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, TypeVar

from ferrodist import tracebacks
from ferrodist.backends.failures import describe
from ferrodist.backends.thread_faults import Faults
from ferrodist.backends.threads import SimulatedBackend
from ferrodist.config import Config, check_timeout
from ferrodist.deadline import Deadline
from ferrodist.errors import CollectiveTimeout, DistributedError, is_consequence

T = TypeVar("T")


class _Rank(threading.Thread, Generic[T]):
    """One rank: runs the function, keeps its outcome, tells the group how it ended."""

    def __init__(
        self,
        backend: SimulatedBackend,
        fn: Callable[[SimulatedBackend], T],
        ended: queue.SimpleQueue[int],
    ) -> None:
        super().__init__(name=f"rank {backend.rank}", daemon=True)
        self.backend = backend
        self.result: T | None = None
        self.error: BaseException | None = None
        self.when = 0.0
        self._fn = fn
        self._ended = ended

    def run(self) -> None:
        """Run the function; an error leaves the group with the error's words."""
        try:
            self.result = self._fn(self.backend)
            self.backend._end()
        except BaseException as error:  # noqa: BLE001 -- the top of a thread: the caller raises it
            self.error, self.when = error, time.monotonic()
            self.backend._fail(error)
        finally:
            self._ended.put(self.backend.rank)


def run_ranks(
    num_ranks: int,
    fn: Callable[[SimulatedBackend], T],
    *,
    timeout: float | None = None,
    grace: float = 5.0,
    config: Config | None = None,
    faults: Faults | None = None,
) -> list[T]:
    """Run ``fn(backend)`` on every rank of a simulated world and return the results in rank order.

    If ranks fail, raise an ExceptionGroup of all their errors: first the causes, ordered by time,
    then errors that only say that another rank failed. ``grace`` seconds after the first failure,
    or ``timeout`` seconds after the start, ranks that are blocked in ferrodist are woken; a rank
    that is stuck elsewhere is named, with its current line. Ranks are threads: create what they
    must not share (a model, a random generator) inside ``fn``.

    Example:
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(3, lambda backend: backend.rank * 10)
        [0, 10, 20]
    """
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    ranks = [
        _Rank(b, fn, ended)
        for b in SimulatedBackend.create_group(num_ranks, config=config, faults=faults)
    ]
    try:
        for rank in ranks:
            rank.start()
        late = _wait(ranks, ended, timeout, grace)
    except BaseException as error:  # Ctrl-C: the ranks must not go on without us
        _wake(ranks, f"{type(error).__name__} in run_ranks")
        raise
    stuck = _wake(ranks, late) if late else []
    errors = _errors(ranks, stuck)
    if errors:
        raise BaseExceptionGroup(_headline(errors, num_ranks), errors)
    return [rank.result for rank in ranks]  # type: ignore[misc]  # a rank without error has a result


def run_torch_ranks(
    num_ranks: int,
    fn: Callable[[int], T],
    *,
    timeout: float | None = None,
    grace: float = 5.0,
    config: Config | None = None,
    faults: Faults | None = None,
) -> list[T]:
    """Run ``fn(rank)``, which uses torch.distributed, on threads; return the results in rank order.

    Each thread is a rank; its default process group, of backend "ferrodist", is initialized before
    ``fn`` is called. Errors and other arguments are those of ``run_ranks``. Collectives, groups,
    DeviceMesh, DTensor and FSDP2 work. What torch has once per process does not: torch.compile,
    checkpoints and the global random generator.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from ferrodist.testing import run_torch_ranks
        >>> def program(rank):
        ...     x = torch.tensor([float(rank)])
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> run_torch_ranks(3, program)
        [3.0, 3.0, 3.0]
    """
    from ferrodist.torch.thread_worlds import HashStore, run_in_world, thread_worlds

    store = HashStore()
    with thread_worlds():
        return run_ranks(
            num_ranks,
            lambda backend: run_in_world(backend, store, fn),
            timeout=timeout,
            grace=grace,
            config=config,
            faults=faults,
        )


def _wait(
    ranks: list[_Rank[Any]], ended: queue.SimpleQueue[int], timeout: float | None, grace: float
) -> str | None:
    """Wait for all ranks, after the first failure only for a while; say what ran out, if so."""
    deadline = Deadline(check_timeout(timeout))
    late = f"run_ranks gave up after {deadline}, its timeout="
    for _ in ranks:
        while (rank := _next_ended(ended)) is None:
            if deadline.remaining() <= 0:
                return late
        if ranks[rank].error is not None and deadline.remaining() > grace:
            deadline = Deadline(grace)
            late = f"run_ranks gave up {deadline} after rank {rank} had failed"
    return None


def _next_ended(ended: queue.SimpleQueue[int]) -> int | None:
    """Wait a little for a rank to end; often enough that Ctrl-C is noticed at once."""
    try:
        return ended.get(timeout=0.2)
    except queue.Empty:
        return None


def _wake(ranks: list[_Rank[Any]], reason: str) -> list[_Rank[Any]]:
    """Wake what is blocked in ferrodist; return the ranks that are stuck somewhere else."""
    ranks[0].backend._give_up(reason)
    started = [rank for rank in ranks if rank.ident is not None]
    end = time.monotonic() + 1.0
    for rank in started:
        rank.join(max(0.0, end - time.monotonic()))
    return [rank for rank in started if rank.is_alive()]


def _errors(ranks: list[_Rank[Any]], stuck: list[_Rank[Any]]) -> list[BaseException]:
    failed = [rank for rank in ranks if rank.error is not None and rank not in stuck]
    failed.sort(key=lambda rank: (_is_consequence(rank), rank.when))
    errors = []
    for rank in failed:
        assert rank.error is not None
        rank.error.add_note(f"on rank {rank.backend.rank}")
        tracebacks.cut(rank.error)
        errors.append(rank.error)
    if not tracebacks.are_full():
        _shorten_repeated(errors)
    causes = sum(not _is_consequence(rank) for rank in failed)
    errors[causes:causes] = [_stuck_error(rank) for rank in stuck]
    return errors


def _shorten_repeated(errors: list[BaseException]) -> None:
    """Leave what several ranks raise alike, a table and the way to it, to the first of them."""
    first: dict[str, BaseException] = {}
    for error in errors:
        text = str(error) if isinstance(error, DistributedError) else ""
        earlier = first.setdefault(text, error)
        if not text or earlier is error:
            continue
        if "\n" in text:
            error.args = (f"{text.splitlines()[0]} (the table is {earlier.__notes__[-1]})",)
        if tracebacks.are_alike(error, earlier):
            error.__traceback__ = None


def _headline(errors: list[BaseException], num_ranks: int) -> str:
    """Say in one line how many failed and why; that is what test reports show."""
    first = describe(errors[0]).splitlines()[0]
    where = next((note for note in getattr(errors[0], "__notes__", []) if "rank" in note), "")
    return f"{len(errors)} of {num_ranks} ranks failed; first, {where}: {first}"


def _is_consequence(rank: _Rank[Any]) -> bool:
    return is_consequence(rank.error, rank.backend.rank)


def _stuck_error(rank: _Rank[Any]) -> CollectiveTimeout:
    number = rank.backend.rank
    error = CollectiveTimeout(
        f"rank {number} is stuck outside ferrodist, at {_place_of(rank)}",
        rank=number,
        missing=[number],
    )
    error.add_note(f"on rank {number}")
    return error


def _place_of(rank: _Rank[Any]) -> str:
    """Say where a thread is, in the innermost code that is not of the standard library."""
    frame: FrameType | None = sys._current_frames().get(rank.ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    library = sysconfig.get_path("stdlib")
    own = [place for place in stack if not place.filename.startswith(library)]
    for place in reversed(own or stack):
        return f"{place.filename}:{place.lineno} in {place.name}"
    return "an unknown place"
