"""MpiBackend on real MPICH and Open MPI; what one job can show is one job."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpi_jobs import environment_of, run_mpi

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170)]

BOTH = pytest.mark.parametrize("mpi", ["mpich", "openmpi"])


def check(done: subprocess.CompletedProcess[str], ranks: int) -> None:
    """See that every rank came to the end of its program."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all is well") == ranks, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


ALL_BY_MPI = """
from ferrodist.backends.engines import engine
engine.CARRIED_NBYTES = engine.CARRIED_ON_ONE_HOST = -1
"""

CONTRACT = (
    ALL_BY_MPI
    + """
import ferrodist
from ferrodist.testing import contract_cases, run_contract

backend = ferrodist.init("mpi")
cases = contract_cases({world}, in_order=False{options})
report = run_contract(backend, cases[{start}::{step}])
assert report.is_clean, report
assert backend.num_engine_calls > 0
print("all is well", flush=True)
"""
)


@BOTH
def test_a_part_of_the_contract_holds(mpi: str) -> None:
    text = CONTRACT.format(world=3, options=", libraries=['numpy']", start=7, step=40)
    check(run_mpi(mpi, 3, text), 3)


@BOTH
def test_the_support_matrix_of_the_docs_is_what_running_it_finds(mpi: str) -> None:
    done = run_mpi(mpi, 3, f"""
        import sys, ferrodist
        sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
        from ferrodist.backends.engines import engine
        from support_matrix import measure, render

        engine.CARRIED_NBYTES = engine.CARRIED_ON_ONE_HOST = -1

        backend = ferrodist.init("mpi")
        matrix = render(measure(backend))
        if backend.rank == 0:
            print(matrix, flush=True)
    """)  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = Path(__file__).parents[2] / "docs" / "engines.md"
    assert done.stdout.strip() in page.read_text(), f"write into {page}:\n{done.stdout}"


@pytest.mark.long
@pytest.mark.timeout(620)
@pytest.mark.parametrize("start", range(3))
@pytest.mark.parametrize("world", [2, 3])
@BOTH
def test_the_whole_contract_holds(mpi: str, world: int, start: int) -> None:
    text = CONTRACT.format(world=world, options="", start=start, step=3)
    check(run_mpi(mpi, world, text, seconds=600), world)


HEAD = """
import threading
import numpy as np
import pytest
import ferrodist
from ferrodist import InvalidArgument
from ferrodist.backends.engines import mpi_calls
from ferrodist.backends.engines.mpi_calls import MPI

world = ferrodist.init("mpi")
rank, total = world.rank, sum(range(3))
assert type(world) is ferrodist.MpiBackend
assert (world.world_size, world.local_rank, world.local_world_size) == (3, rank, 3)
"""

CALLS = """
# one rank has its call in flight, one gives a list, one an array: they meet all the same
x = np.arange(5.0) + rank
expected = [3.0, 6.0, 9.0, 12.0, 15.0]
for turn in range(3):
    if rank == turn:
        found = world.allreduce(x, async_op=True).wait(60)
    elif rank == (turn + 1) % 3:
        found = world.allreduce(x, timeout=60)
    else:
        found = world.allreduce(x)
    assert found.tolist() == expected
world.barrier() if rank else world.barrier(async_op=True).wait(60)
works = [world.allreduce(x * n, async_op=True) for n in range(5)]
assert [work.wait(60)[0] for work in works] == [0, 3, 6, 9, 12]

# the fast path: results, out= and in place
out = np.empty(5)
assert world.allreduce(x, out=out) is out and out.tolist() == expected
assert world.allreduce_(x.copy()).tolist() == expected
assert world.allreduce(x, op="mean").tolist() == [1, 2, 3, 4, 5]
assert world.allreduce(x, op="max").tolist() == [2, 3, 4, 5, 6]
assert world.allreduce(x.astype(bool), op="band").tolist() == [False, True, True, True, True]
assert world.broadcast(x, 2).tolist() == [2, 3, 4, 5, 6]
assert world.broadcast_(x.copy(), 1).tolist() == [1, 2, 3, 4, 5]
bent = np.zeros(41, np.uint8)[1:].view(float)  # not aligned: mpi4py does not know its type
bent[:] = x
assert world.allreduce(bent if rank == 1 else x).tolist() == expected
assert world.broadcast(bent, 2).tolist() == [2, 3, 4, 5, 6]
found = world.reduce(x, 1)
assert found is None if rank != 1 else found.tolist() == expected
assert world.all_gather(x[:1]).tolist() == [0, 1, 2]
assert world.reduce_scatter(np.arange(3) * rank).tolist() == [rank * 3]
assert world.all_to_all(np.arange(3) + 10 * rank).tolist() == [rank, 10 + rank, 20 + rank]
assert world.scan(x).tolist() == [sum(range(rank + 1)) + (rank + 1) * n for n in range(5)]
with pytest.raises(InvalidArgument):
    world.allreduce(x[:4], out=x[1:])

# sums that MPI does otherwise: 16-bit floats, small integers that wrap, order
half = np.array([2048.0, 1.0, 1.0][rank], np.float16)
assert world.allreduce(half) == 2050
assert world.allreduce(np.array([100], np.int8)).tolist() == [44]
thirds = np.array([[1e30, -1e30, 1.0][rank]])
assert world.allreduce(thirds, reproducible=True).tolist() == [1.0]

# arrays beyond the largest count are cut
mpi_calls.LARGEST_COUNT = 1000
long = np.arange(4097) + rank
assert (world.allreduce(long) == 3 * np.arange(4097) + 3).all()
assert (world.allreduce(long, async_op=True).wait(60) == 3 * np.arange(4097) + 3).all()
assert (world.broadcast(long, 2) == np.arange(4097) + 2).all()
assert (world.all_gather(long).reshape(3, -1)[2] == np.arange(4097) + 2).all()
assert (world.reduce_scatter(long[:-2]) == (3 * np.arange(4095) + 3)[rank * 1365:][:1365]).all()
mpi_calls.LARGEST_COUNT = 2**31 - 1
right, left = (rank + 1) % 3, (rank - 1) % 3
assert (world.sendrecv(np.tile(long, 5), right, left)[:3] == np.arange(3) + left).all()

# groups: of some ranks, in another order, two of one list, and of a communicator
if rank != 1:
    pair = world.split([2, 0])
    assert pair.rank == (rank == 0) and pair.allreduce(rank) == 2
    twins = [world.split([0, 2]) for _ in range(2)]
    works = [twin.allreduce(n + rank, async_op=True) for n, twin in enumerate(twins)]
    assert [work.wait(60) for work in works] == [2, 4]
    pair.close()
given = MPI.COMM_WORLD.Split(rank == 1)
own = ferrodist.MpiBackend.from_comm(given)
given.Free()
assert own.allreduce(rank) == (1 if rank == 1 else 2)
for wrong in (given, MPI.COMM_NULL, 3):
    with pytest.raises(InvalidArgument, match="from_comm: "):
        ferrodist.MpiBackend.from_comm(wrong)
own.close()

# what only ranks that share memory, or that ferrodist itself watches, can have
shared = world.shared((3,), np.int64)
shared[rank] = rank + 1
world.barrier()
assert shared.tolist() == [1, 2, 3]
if rank == 1:
    MPI.COMM_WORLD.recv(source=0)
if rank == 0:
    threading.Timer(0.2, MPI.COMM_WORLD.send, [0, 1]).start()
world.barrier()
assert world.statistics().lateness[1] >= 0.1 or rank

print("all is well", flush=True)
"""


@pytest.mark.parametrize("carried", [False, True])
@BOTH
def test_calls_groups_and_cuts(mpi: str, carried: bool) -> None:
    """By MPI, and as a program meets it: the exchange before a call carries small arrays."""
    check(run_mpi(mpi, 3, ("" if carried else ALL_BY_MPI) + HEAD + CALLS), 3)


SIZES = """
import os
from mpi4py import MPI
os.environ["FERRODIST_HOST_ID"] = "abb"[MPI.COMM_WORLD.Get_rank()] if {hosts} > 1 else ""
import numpy as np, ferrodist

world = ferrodist.init("mpi")
rank, limit = world.rank, 64 * 1024 if {hosts} > 1 else 4 * 1024 * 1024
assert world.local_world_size == ({hosts} > 1 and [1, 2, 2][rank] or 3)
for x in (np.ones(limit, np.uint8), 1.0, {{"a": np.ones(3)}}):
    world.allreduce(x, op="max")
    world.allreduce(x, op="max", async_op=True).wait(60)
assert world.num_engine_calls == 0
x = np.full(limit // 8 + 1, float(rank))
assert world.allreduce(x)[-1] == world.allreduce(x, async_op=True).wait(60)[-1] == 3
assert world.broadcast(x, 2)[-1] == 2
assert world.all_gather(x).reshape(3, -1)[:, -1].tolist() == [0, 1, 2]
assert world.allreduce(x, op="mean", out=x) is x and x[-1] == 1
assert world.num_engine_calls == 5
group = world.split([2, 0, 1])
assert group.allreduce(x)[-1] == 3 and group.num_engine_calls == 1
print("all is well", flush=True)
"""


@pytest.mark.parametrize("hosts", [1, 2])
@BOTH
def test_small_arrays_never_reach_mpi_and_large_ones_do(mpi: str, hosts: int) -> None:
    check(run_mpi(mpi, 3, SIZES.format(hosts=hosts)), 3)


WITHOUT_CHECKS = """
entered = []
enter = type(world)._enter
type(world)._enter = lambda *args: (entered.append(args), enter(*args))[1]
x = np.arange(5.0) + rank
for _ in range(3):
    entered.clear()
    assert world.allreduce(x).tolist() == [3, 6, 9, 12, 15]
    assert world.allreduce(x, async_op=True).wait(60).tolist() == [3, 6, 9, 12, 15]
    assert world.broadcast(x, 1).tolist() == [1, 2, 3, 4, 5]
    world.barrier()
    assert world.num_engine_calls % 5 == 3 and not entered
    assert world.scatter(np.arange(6) if rank == 1 else None, root=1).tolist() == [2*rank, 2*rank+1]
    assert world.num_engine_calls % 5 == 0 and entered
print("all is well", flush=True)
"""


@BOTH
def test_without_checks_arrays_go_to_mpi_at_once(mpi: str) -> None:
    check(run_mpi(mpi, 3, ALL_BY_MPI + HEAD + WITHOUT_CHECKS, FERRODIST_CHECK="0"), 3)


FAILURES = """
import pytest
import numpy as np
import ferrodist
from ferrodist import CollectiveMismatch, CollectiveTimeout, GroupAborted, RankLost
from ferrodist.backends.engines.mpi_calls import MPI

world = ferrodist.init("mpi")
rank = world.rank
with pytest.raises(CollectiveMismatch) as found:
    world.barrier() if rank == 1 else world.allreduce(np.ones(3))
assert "rank 1  barrier()" in str(found.value) and "<string>:" in str(found.value)
assert world.allreduce(rank) == 3

group = world.dup()
if rank == 1:
    group.close()
else:
    with pytest.raises(RankLost, match="closed at"):
        group.allreduce(np.ones(3))

group = world.dup()
if rank == 1:
    MPI.COMM_WORLD.recv(source=0)  # not a call of ours: silent for ferrodist
    with pytest.raises(GroupAborted):
        group.allreduce(np.ones(3))
else:
    with pytest.raises(CollectiveTimeout) as found:
        group.allreduce(np.ones(3), timeout=0.3 if rank else 60)
    assert found.value.missing == [1], found.value.missing
    with pytest.raises(CollectiveTimeout) as late:
        world.split([0, 1] if rank == 0 else [1, 2], timeout=0.3)
    assert late.value.missing == [1]
    if rank == 0:
        MPI.COMM_WORLD.send(0, 1)

group = world.dup()
if rank == 0:
    group.abort("enough")
with pytest.raises(GroupAborted, match="enough"):
    group.allreduce(np.ones(3))
print("all is well", flush=True)
"""


@BOTH
def test_differences_and_missing_ranks_are_named_and_the_program_ends(mpi: str) -> None:
    """With requests that were given up, which MPI_Finalize must not wait for."""
    begin = time.monotonic()
    check(run_mpi(mpi, 3, FAILURES), 3)
    assert time.monotonic() - begin < 60


SPLITS = """
import gc, ferrodist
from mpi4py import MPI

world = ferrodist.init("mpi")
rank = world.rank
for n in range({splits}):
    groups = [world.split([1, 0] if n % 2 else [0, 1])]
    if n % 9 == 0:
        other = world.split([0, 1])  # which stays for a while
    if n % 9 == 5:
        groups.append(other)
    if n % 90 == 5:
        works = [group.allreduce(rank, async_op=True) for group in groups]
        assert [work.wait(60) for work in works] == [1, 1]
    for group in groups[:: 1 if rank else -1]:
        if n % 4:
            group.close()  # else it is dropped
groups = group = None
gc.collect()
world.barrier()
probe = MPI.COMM_WORLD.Dup()  # an MPI numbers its communicators, and uses numbers again
assert probe.py2f() & 0xFFFFFF < 50, probe.py2f()  # the bits above tell what kind of handle it is
assert world.allreduce(rank) == 1
print("all is well", flush=True)
"""


@BOTH
def test_groups_that_were_closed_free_their_communicators(mpi: str) -> None:
    """An MPI can have some thousand at a time, which the test below exceeds."""
    check(run_mpi(mpi, 2, SPLITS.format(splits=100)), 2)


@pytest.mark.long
@pytest.mark.timeout(620)
@BOTH
def test_ten_thousand_groups_one_after_the_other(mpi: str) -> None:
    check(run_mpi(mpi, 2, SPLITS.format(splits=10_000), seconds=600), 2)


def test_encryption_that_mpi_does_not_have_is_refused() -> None:
    done = run_mpi("mpich", 1, "import ferrodist; ferrodist.init('mpi')", FERRODIST_TLS="1")
    assert done.returncode != 0
    assert "FERRODIST_TLS=1: ferrodist does not encrypt what an engine sends" in done.stderr


@BOTH
def test_a_rank_that_raises_is_named_by_the_others_and_ends_the_job(mpi: str) -> None:
    done = run_mpi(
        mpi,
        3,
        """
        import ferrodist
        backend = ferrodist.init("mpi")
        backend.barrier()
        if backend.rank == 1:
            raise ValueError("no such file")
        backend.allreduce(1.0)
    """,
    )
    assert done.returncode != 0
    assert "rank 1 raised ValueError: no such file" in done.stderr


INSIDE = (
    ALL_BY_MPI
    + """
import signal, pytest, numpy as np, ferrodist
from ferrodist import CollectiveTimeout, GroupAborted
from ferrodist.backends.engines import mpi
from ferrodist.backends.engines.mpi_calls import MPI

world, comm = ferrodist.init("mpi"), MPI.COMM_WORLD
rank, start, x = world.rank, mpi.Started.__init__, np.ones(1 << 20)

def hold(*args):
    comm.recv(source=0)
    start(*args)

def give_up(group, expected, timeout=60):
    # Rank 1 enters the call, and begins it in MPI only when the others have given it up.
    if rank == 1:
        mpi.Started.__init__ = hold
    with pytest.raises(expected) as found:
        group.allreduce(x, timeout=timeout)
    if rank == 2:
        comm.send(0, 0)
    if rank == 0:
        comm.recv(source=2)
        comm.send(0, 1)
    mpi.Started.__init__ = start
    assert world.allreduce(x)[-1] == 3
    return found.value

group = world.dup()
error = give_up(group, CollectiveTimeout, 0.5 if rank == 0 else 60)
assert 1 in error.missing and error.sequence == 1
with pytest.raises(GroupAborted):
    group.allreduce(x)

signal.signal(signal.SIGALRM, signal.default_int_handler)
if rank == 2:
    signal.setitimer(signal.ITIMER_REAL, 0.3)
error = give_up(world.dup(), KeyboardInterrupt if rank == 2 else GroupAborted)
assert rank == 2 or "KeyboardInterrupt" in str(error)
del x
assert len(mpi._unfinished) == 2  # MPI may still write into their arrays, also while it ends
print("all is well", flush=True)
"""
)


@BOTH
def test_a_call_inside_mpi_can_be_given_up_and_the_program_ends(mpi: str) -> None:
    check(run_mpi(mpi, 3, INSIDE), 3)


ABORTS = """
import signal, threading, pytest, numpy as np, ferrodist
from ferrodist import CollectiveTimeout, GroupAborted
from ferrodist.backends.engines.mpi_calls import MPI

world = ferrodist.init("mpi")
rank = world.rank

def abort_from_a_thread(group):
    threading.Timer(0.2, group.abort, ["no more"]).start()

def abort_from_a_signal_handler(group):
    signal.signal(signal.SIGALRM, lambda *_: group.abort("no more"))
    signal.setitimer(signal.ITIMER_REAL, 0.2)

def queue_a_call(group):
    def call():
        with pytest.raises(CollectiveTimeout):
            group.allreduce(np.ones(3), timeout=0.2)
    timer = threading.Timer(0.2, call)
    timer.daemon = True
    timer.start()

# Rank 1 waits in a call, with rank 2 or alone, when its group ends; rank 0 comes after that.
for end in (abort_from_a_thread, abort_from_a_signal_handler, queue_a_call):
    for call in (lambda g: g.allreduce(np.ones(1 << 20)), lambda g: g.all_gather_object(rank)):
        group = world.dup()
        assert len(call(group))
        if rank == 1:
            end(group)
        if rank == 0:
            MPI.COMM_WORLD.recv(source=1)
        with pytest.raises((GroupAborted, CollectiveTimeout)) as found:
            call(group)
        assert "no more" in str(found.value) or end is queue_a_call
        if rank == 1:
            MPI.COMM_WORLD.send(0, 0)

# Ctrl-C in a call before the others come.
group = world.dup()
if rank == 1:
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        group.allreduce(np.ones(1 << 20))
    MPI.COMM_WORLD.send(0, 0)
else:
    rank or MPI.COMM_WORLD.recv(source=1)
    with pytest.raises(GroupAborted, match="KeyboardInterrupt"):
        group.allreduce(np.ones(1 << 20))
print("all is well", flush=True)
"""


@BOTH
def test_a_group_that_ends_leaves_nobody_in_a_call_of_mpi(mpi: str) -> None:
    check(run_mpi(mpi, 3, ABORTS), 3)


RANDOM_ENDS = """
import random, signal, threading, time
import numpy as np, ferrodist
from ferrodist.backends.engines import engine
from ferrodist.backends.engines.mpi_calls import MPI

engine.CARRIED_NBYTES = engine.CARRIED_ON_ONE_HOST = -1
world = ferrodist.init("mpi")
rank = world.rank
signal.signal(signal.SIGALRM, signal.default_int_handler)
CALLS = [
    lambda group, **timeout: group.allreduce(np.ones(3), **timeout),
    lambda group, **timeout: group.all_gather_object(rank, **timeout),
    lambda group, **timeout: group.broadcast_(np.ones(100_000), 0, **timeout),
    lambda group, **timeout: group.barrier(**timeout),
    lambda group, **timeout: group.allreduce(np.ones(3), async_op=True, **timeout).wait(),
    lambda group, **timeout: group.allreduce([np.ones(3), np.ones(2, np.int8)], **timeout),
    lambda group, **timeout: group.allreduce(np.ones(5, np.float16), **timeout),
]
for seed in range({start}, {start} + 40):
    common = random.Random(seed)
    victim, slow = common.randrange(world.world_size), common.randrange(world.world_size)
    how = common.choice(["abort", "interrupt", "timeout", "close"])
    after = common.uniform(0.01, 0.3)
    group, begin = world.dup(), time.monotonic()
    if rank == victim and how == "abort":
        threading.Timer(after, group.abort).start()
    if rank == victim and how == "interrupt":
        signal.setitimer(signal.ITIMER_REAL, after)
    try:
        while True:
            call, nap = common.choice(CALLS), common.choice([0, 0, 0, 0, 0, 0, 0.1, 0.8])
            if rank == slow:
                time.sleep(nap)  # a rank that does something else
            if rank == victim and how == "close" and time.monotonic() - begin > after:
                group.close()
            if rank == victim and time.monotonic() - begin > 5:
                group.abort("no deadline passed")
            call(group, **({{"timeout": after}} if rank == victim and how == "timeout" else {{}}))
    except (ferrodist.DistributedError, KeyboardInterrupt) as error:
        print(f"{{seed}}: rank {{rank}} after {{how}} of {{victim}}: {{error!r}}"[:200], flush=True)
    group.close()
    MPI.COMM_WORLD.Barrier()
print("all is well", flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("start", [0, 1000])
@BOTH
def test_however_a_group_ends_nobody_hangs(mpi: str, start: int) -> None:
    """Forty groups with random calls, delays and ends."""
    done = run_mpi(mpi, 3, RANDOM_ENDS.format(start=start), seconds=390)
    # No look at stderr: Python prints an interrupt that comes in a finalizer, and drops it.
    assert done.stdout.count("all is well") == 3, done.stdout + done.stderr


@BOTH
@pytest.mark.parametrize("level", ["serialized", "single"])
def test_without_threads_ferrodist_carries_everything_itself(mpi: str, level: str) -> None:
    done = run_mpi(mpi, 2, f"""
        import logging, sys
        import mpi4py
        mpi4py.rc.thread_level = "{level}"
        import numpy as np, ferrodist
        from mpi4py import MPI

        logging.basicConfig(stream=sys.stdout)
        backend = ferrodist.init("mpi")
        rank, other, x = backend.rank, 1 - backend.rank, np.arange(1 << 20)
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:  # this MPI gives more than it is asked for
            assert backend.engine is not None
            print("all is well", flush=True)
            raise SystemExit
        works = [backend.allreduce(x + n, async_op=True) for n in range(3)]
        assert backend.allreduce(rank) == 1
        assert [work.wait(60)[0] for work in works] == [0, 2, 4]
        assert backend.dup().allreduce(x)[-1] == 2 * x[-1]
        assert backend.engine is None and backend.num_engine_calls == 0
        print("all is well", flush=True)
    """)  # fmt: skip
    check(done, 2)
    said = "without MPI_THREAD_MULTIPLE on ranks 0-1: ferrodist carries all data itself"
    assert said in done.stdout or mpi == "mpich"


@BOTH
def test_an_mpi_that_was_not_started_is_started(mpi: str) -> None:
    done = run_mpi(mpi, 2, """
        import mpi4py
        mpi4py.rc.initialize = False
        import numpy as np, ferrodist
        backend = ferrodist.init("mpi")
        assert backend.allreduce(np.ones(1 << 20))[-1] == 2 and backend.num_engine_calls == 1
        print("all is well", flush=True)
    """)  # fmt: skip
    check(done, 2)


KILL = (
    ALL_BY_MPI
    + """
import os, signal, pytest, numpy as np, ferrodist

world = ferrodist.init("mpi")
rank = world.rank
world.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
for _ in range(2):
    with pytest.raises(ferrodist.RankLost) as found:
        world.allreduce(np.ones(1 << 18), timeout=60)
    assert found.value.rank == 1

# MPI makes a group of all that are left, in any order; of that, groups as ever
if rank > 1:
    some = world.split([3, 2])
    assert some.allreduce(np.full(1 << 18, rank))[-1] == 5 and some.engine is None
left = world.split([3, 0, 2])
assert (left.rank, left.world_size) == ([3, 0, 2].index(rank), 3)
assert left.allreduce(np.full(1 << 18, rank)).tolist() == [5] * (1 << 18)
assert left.all_gather_object(rank) == [3, 0, 2]
assert left.num_engine_calls > 0
if rank:
    pair = left.split([0, 2])
    assert pair.allreduce(rank) == 5 and pair.num_engine_calls == 1
    pair.close()
left.close()
print("all is well", flush=True)
"""
)


def test_a_killed_rank_is_lost_by_name_on_all_others_who_go_on_without_it() -> None:
    """Open MPI's own barrier in MPI_Finalize may wait for the dead, so it is left out."""
    options = ("--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1")
    done = run_mpi("openmpi", 4, KILL, options=options)
    assert done.stdout.count("all is well") == 3, done.stdout + done.stderr


def test_an_mpiexec_of_another_mpi_is_refused_naming_both() -> None:
    program = "import ferrodist; ferrodist.init('mpi')"
    environment_of("mpich")
    done = run_mpi("openmpi", 2, program, launcher="mpich")
    assert done.returncode != 0
    assert "MPI says rank 0 of 1, MPI (PMI) says PMI_RANK=" in done.stderr
    assert "start the ranks with the mpiexec of Open MPI" in done.stderr


def test_without_mpi4py_the_extra_is_named() -> None:
    code = "import sys; sys.modules['mpi4py'] = None; import ferrodist; ferrodist.init('mpi')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "BackendUnavailable" in done.stderr
    assert "pip install 'ferrodist[mpi]'" in done.stderr


def test_an_mpi4py_that_is_too_old_is_named(tmp_path: Path) -> None:
    """A stand-in for mpi4py 3: what it lacks is what is looked for."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '3.1.6'")
    (package / "MPI.py").write_text("COMM_WORLD = None")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
    code += "import ferrodist; ferrodist.init('mpi')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "BackendUnavailable: backend 'mpi' needs mpi4py 4, found 3.1.6" in done.stderr


@pytest.mark.long
@BOTH
def test_an_array_of_more_elements_than_an_int_can_count(mpi: str) -> None:
    done = run_mpi(mpi, 2, """
        import numpy as np, ferrodist
        backend = ferrodist.init("mpi")
        size = 2**31 + 5
        x = np.full(size, 1 + backend.rank, np.uint8)
        x[-1] = 7 * backend.rank
        backend.allreduce_(x, op="max", timeout=120)
        assert x[-1] == 7 and x[0] == x[2**31] == 2 and (x[:-1] == 2).all()
        x[-3:] = 10 + backend.rank
        backend.broadcast_(x, 1, timeout=120)
        assert x[-3:].tolist() == [11] * 3
        if backend.rank:
            backend.send(x, 0, timeout=120)
        else:
            backend.recv(1, out=x, timeout=120)
        assert x[-3:].tolist() == [11] * 3
        print("all is well", flush=True)
    """, seconds=160)  # fmt: skip
    check(done, 2)


LATE = """
import os, pathlib, time
import numpy as np, ferrodist

backend, given_up = ferrodist.init("mpi"), pathlib.Path(os.environ["GIVEN_UP"])
backend.barrier()
while backend.rank == 1 and not given_up.exists():  # makes no call of MPI meanwhile
    time.sleep(0.01)
try:
    backend.allreduce(np.ones(10), timeout=1 if backend.rank == 0 else 60)
except (ferrodist.CollectiveTimeout, ferrodist.GroupAborted) as error:
    print(backend.rank, type(error).__name__, flush=True)
    given_up.touch()
"""


@BOTH
def test_a_rank_that_comes_after_the_others_gave_up_does_not_wait_for_them(mpi, tmp_path) -> None:
    done = run_mpi(mpi, 2, LATE, seconds=40, GIVEN_UP=str(tmp_path / "given_up"))
    found = sorted(done.stdout.splitlines())
    assert found == ["0 CollectiveTimeout", "1 GroupAborted"], done.stdout + done.stderr
