"""Gloo and NCCL as engines, by torch.distributed. NCCL needs GPUs; all but its device is run here.

What only differs by device is run with tensors of the host in the part of those of a GPU.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ferrodist
from ferrodist import CollectiveMismatch, CollectiveTimeout, GroupAborted, InvalidArgument, RankLost
from ferrodist.backends.engines import engine, torch_calls
from ferrodist.backends.engines.torch import GlooBackend, NcclBackend, TorchDistributedBackend
from ferrodist.backends.engines.torch_calls import Caller, find_reduction
from ferrodist.backends.registry import backend_class
from ferrodist.buffer import DTYPES_BY_LABEL
from ferrodist.call import Kind
from ferrodist.config import DefaultTimeout
from ferrodist.reduce_op import ReduceOp
from ferrodist.testing import contract_cases, run_contract
from jobs import error_and_time
from mpi_jobs import run_mpi
from support_matrix import _reductions, measure, render

pytestmark = pytest.mark.timeout(150)

LONG = 580.0  # seconds
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "engines.md"

needs_gpus = pytest.mark.skipif(
    not (dist.is_nccl_available() and torch.cuda.device_count() >= 2),
    reason="NCCL needs two GPUs and a torch built for them; examples/gpu_check.py is run there",
)


# -- the contract ----------------------------------------------------------------------------------


def keep_contract(job: Any, seconds: float, least: int) -> None:
    reports = [rank.hear(seconds).result for rank in job]
    assert all(report is not None and report.is_clean for report in reports), "\n".join(
        map(str, reports)
    )
    assert all(report.num_cases > least for report in reports)


def leave_all_to_gloo(backend: Any) -> None:
    """Let no array be so small that ferrodist carries it itself, on this rank."""
    engine.CARRIED_NBYTES = engine.CARRIED_ON_ONE_HOST = -1
    backend._note_change()


def test_gloo_keeps_the_contract(start_gloo_job):
    """With a tenth of it, and without what takes seconds to import."""

    def body(backend, pipe):
        leave_all_to_gloo(backend)
        cases = contract_cases(3, in_order=False, libraries=["numpy", "torch"])[::10]
        return run_contract(backend, [case for case in cases if case.detail != "libraries"])

    with start_gloo_job(3, body) as job:
        keep_contract(job, 140, 300)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, 3])
def test_gloo_keeps_the_whole_contract(start_gloo_job, world):
    def body(backend, pipe):
        leave_all_to_gloo(backend)
        return run_contract(backend, contract_cases(backend.world_size, in_order=False))

    with start_gloo_job(world, body) as job:
        keep_contract(job, LONG, 3500)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_group_of_the_program_keeps_the_contract(start_gloo_job, tmp_path):
    """As a program meets it: small arrays are carried by the exchange before a call."""

    def body(backend, pipe):
        with group_of_torch(backend, tmp_path) as group:
            made = TorchDistributedBackend.from_process_group(group)
            with made:
                return run_contract(made, contract_cases(2, in_order=False)[::3])

    with start_gloo_job(2, body) as job:
        keep_contract(job, LONG, 1000)


# -- what Gloo does, and what it would do wrongly --------------------------------------------------


def test_the_support_matrix_in_the_docs_is_what_gloo_does(start_gloo_job):
    def body(backend, pipe):
        leave_all_to_gloo(backend)
        return measure(backend)

    with start_gloo_job(3, body) as job:
        found = job.results()
    assert found == [found[0]] * 3
    text = DOCS.read_text()
    assert render(found[0]) in text, f"docs/engines.md needs:\n{render(found[0])}"
    assert nccl_table(found[0]) in text, f"docs/engines.md needs:\n{nccl_table(found[0])}"


def nccl_table(found: dict[Any, str]) -> str:
    """Lay out what NCCL would be asked for: it is not run here."""
    planned = {}
    for (call, dtype, op), how in found.items():
        if call == "allreduce":
            reduction = find_reduction(
                DTYPES_BY_LABEL[dtype], ReduceOp.parse(op), in_order=False, world=3, on_device=True
            )
            planned[call, dtype, op] = how if how == "refused" else _NCCL[reduction is not None]
    return _reductions(planned, "allreduce").replace("schedule", "host")


_NCCL = {True: "native", False: "scheduled"}


def test_reductions_that_gloo_does_otherwise_are_as_promised(start_gloo_job):
    def body(backend, pipe):
        leave_all_to_gloo(backend)
        rank = backend.rank
        small = torch.full((3,), [2048.0, 1.0, 1.0][rank], dtype=torch.float16)
        assert backend.allreduce(small).tolist() == [2050.0] * 3
        assert backend.allreduce(small, op="mean").tolist() == [np.float16(2050 / 3)] * 3
        for owner in range(3):  # Gloo keeps a NaN of rank 0, and drops those of the others
            x = np.array([np.nan if rank == owner else rank, rank], np.float32)
            assert np.isnan(backend.allreduce(x, op="max")[0])
            assert np.isnan(backend.allreduce(x, op="min")[0])
            assert backend.allreduce(x, op="max")[1] == 2
        whole = np.arange(1000, dtype=np.float32)  # which times 1/3 is not what it is by 3
        mean = backend.allreduce(whole * (rank == 1), op="mean")
        assert np.array_equal(mean, whole / np.float32(3))
        flags = torch.tensor([True, rank == 1, False])
        assert backend.allreduce(flags).view(torch.uint8).tolist() == [1, 1, 0]
        assert backend.allreduce(flags, op="prod").tolist() == [True, False, False]
        assert backend.allreduce(flags, op="bxor").tolist() == [True, True, False]
        for dtype in (np.int16, np.uint16, np.uint32, np.uint64):
            highest = np.full(2, np.iinfo(dtype).max, dtype) - np.arange(2, dtype=dtype) * rank
            assert backend.allreduce(highest, op="max")[1] == np.iinfo(dtype).max
            mixed = np.array([np.iinfo(dtype).max if rank == 1 else rank], dtype)  # signed: another
            found = [backend.allreduce(mixed, op=op)[0] for op in ("min", "max")]
            assert found == [0, np.iinfo(dtype).max]
            with np.errstate(over="ignore"):
                assert backend.allreduce(highest)[0] == np.array([highest[0] * dtype(3)])[0]
        z = np.array([1 + 2j, rank + 1j], np.complex64)
        assert backend.allreduce(z).tolist() == [3 + 6j, 3 + 3j]
        assert np.allclose(backend.allreduce(z, op="prod")[0], (1 + 2j) ** 3)

    with start_gloo_job(3, body) as job:
        job.results()


def test_strided_tensors_are_packed_before_gloo_sees_them(start_gloo_job):
    def body(backend, pipe):
        leave_all_to_gloo(backend)
        whole = torch.arange(12.0).reshape(3, 4) + backend.rank
        assert torch.equal(
            backend.allreduce(whole[:, ::2]), 2 * torch.arange(12.0).reshape(3, 4)[:, ::2] + 1
        )
        assert torch.equal(
            backend.broadcast(whole.t(), 1), (torch.arange(12.0).reshape(3, 4) + 1).t()
        )
        assert torch.equal(whole, torch.arange(12.0).reshape(3, 4) + backend.rank)

    with start_gloo_job(2, body) as job:
        job.results()


def test_arrays_that_gloo_cannot_take_as_they_are(start_gloo_job):
    """Results with gaps or read-only are refused; empty ones and uneven parts are right."""

    def body(backend, pipe):
        leave_all_to_gloo(backend)
        rank = backend.rank
        view = np.full((3, 4), rank + 1.0)[:, ::2]
        with pytest.raises(InvalidArgument, match="out is not C-contiguous"):
            backend.allreduce(view, out=view)
        locked = np.arange(5.0)
        locked.flags.writeable = False
        with pytest.raises(InvalidArgument, match="read-only"):
            backend.allreduce(locked, out=locked)
        assert locked.tolist() == [0, 1, 2, 3, 4]
        assert backend.allreduce(np.ones(0)).shape == (0,)
        counts = [1 + (rank + peer) % 3 + rank for peer in range(3)]
        sent = np.repeat(10.0 * rank + np.arange(3), counts)
        found, _ = backend.all_to_all_uneven(sent, counts)
        parts = [np.full(1 + (peer + rank) % 3 + peer, 10.0 * peer + rank) for peer in range(3)]
        assert found.tolist() == np.concatenate(parts).tolist()

    with start_gloo_job(3, body) as job:
        job.results()


def test_what_is_given_to_reduce_stays_as_it_was(start_gloo_job):
    """Gloo leaves partial sums in it."""

    def body(backend, pipe):
        leave_all_to_gloo(backend)
        x = np.arange(1000.0) + backend.rank
        found = backend.reduce(x, 1)
        assert np.array_equal(x, np.arange(1000.0) + backend.rank)
        assert (found is None) == (backend.rank != 1)
        locked = np.arange(5.0)
        locked.flags.writeable = False
        warnings.simplefilter("error")  # torch's, about arrays that cannot be written
        return found, backend.allreduce(locked).tolist(), backend.broadcast(locked).tolist()

    with start_gloo_job(3, body) as job:
        results = job.results()
    assert np.array_equal(results[1][0], 3 * np.arange(1000.0) + 3)
    assert [one[1:] for one in results] == [([0, 3, 6, 9, 12], [0, 1, 2, 3, 4])] * 3


def count_calls(backend: Any) -> list[Any]:
    """Return a list of the allreduces that Gloo does from now on."""
    asked: list[Any] = []
    methods = torch_calls._METHODS
    allreduce = methods[Kind.ALLREDUCE]
    methods[Kind.ALLREDUCE] = lambda *args: (asked.append(args), allreduce(*args))[1]
    return asked


def test_a_closed_group_holds_no_files_or_threads_and_refuses_calls(start_gloo_job):
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def body(backend, pipe):
        def use_one(timeout: float | None) -> None:
            with backend.split([0, 1], timeout=timeout) as group:
                assert group.allreduce(np.ones(100_000))[0] == 2
            with pytest.raises(ferrodist.BackendClosed):
                group.allreduce(np.ones(100_001))  # of a shape that was not used before

        leave_all_to_gloo(backend)
        use_one(None)
        gc.collect()
        gc.disable()  # nothing waits for the garbage collector
        before = count()
        for _ in range(5):
            use_one(30.0)
        after = count()
        with pytest.raises(ferrodist.UnsupportedArray, match="sparse"):
            backend.allreduce(torch.eye(4).to_sparse())
        return before, after

    with start_gloo_job(2, body) as job:
        for before, after in job.results():
            assert after[0] <= before[0]
            assert after[1] <= before[1]


@pytest.mark.parametrize("is_one_host", [True, False])
def test_small_arrays_never_reach_gloo_and_large_ones_do(start_gloo_job, is_one_host):
    """The exchange before a call carries them, whatever they are."""

    def body(backend, pipe):
        asked = count_calls(backend)
        limit = (4 * 1024 * 1024 if is_one_host else 64 * 1024) // 4
        for x in (np.ones(limit, np.float32), torch.ones(limit), 1.0, {"a": torch.ones(3)}):
            backend.allreduce(x)
            backend.allreduce(x, async_op=True).wait()
        assert not asked
        tensor = torch.full((limit + 1,), float(backend.rank))
        version = tensor._version
        assert backend.allreduce(tensor)[-1] == 3
        assert backend.allreduce(tensor.numpy(), async_op=True).wait()[-1] == 3
        assert backend.allreduce(tensor, out=tensor) is tensor
        assert tensor[-1] == 3
        assert tensor._version > version
        assert len(asked) == 3
        needs_grad = torch.ones(limit + 1, requires_grad=True)
        result = backend.allreduce(needs_grad, op="mean")
        assert not result.requires_grad
        assert result[-1] == 1
        for part in (limit // 2, limit, limit + 1):  # of a whole that only the root has
            whole = np.repeat(np.arange(3, dtype=np.float32), part)
            found = backend.scatter(whole if backend.rank == 1 else None, root=1)
            assert found.tolist() == [backend.rank] * part
        halves = torch.full((2 * limit + 1,), float(backend.rank), dtype=torch.bfloat16)
        assert backend.broadcast(halves, 2)[-1] == 2

    with start_gloo_job(3 if is_one_host else "001", body) as job:
        job.results()


def test_without_checks_everything_goes_to_gloo_at_once(start_gloo_job):
    def body(backend, pipe):
        leave_all_to_gloo(backend)
        asked = count_calls(backend)
        assert backend.allreduce(np.arange(3.0)).tolist() == [0, 3, 6]
        assert backend.allreduce(torch.ones(3), async_op=True).wait()[0] == 3
        assert len(asked) == 2
        assert backend.scatter(np.arange(6) if backend.rank == 0 else None)[0] == 2 * backend.rank
        assert backend.broadcast_object({"a": backend.rank}, root=1) == {"a": 1}
        with pytest.raises(ferrodist.SizeMismatch):  # which only the root can see
            backend.scatter(np.arange(7) if backend.rank == 0 else None)
        backend.barrier()
        if backend.rank == 1:
            return backend.abort("enough")
        with pytest.raises(GroupAborted, match="enough"):
            backend.allreduce(np.ones(3))
        return None

    with start_gloo_job(3, body, FERRODIST_CHECK="0") as job:
        job.results()


# -- training --------------------------------------------------------------------------------------


def test_ddp_trains_by_gloo_as_one_process_does_on_all_data(start_gloo_job):
    def new_model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 40_000), torch.nn.Linear(40_000, 1))

    def train(model, rows):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(3):
            optimizer.zero_grad()
            (model(rows + step) ** 2).mean().backward()
            optimizer.step()
        return [one.detach() for one in model.parameters()]

    def body(backend, pipe):
        leave_all_to_gloo(backend)
        asked = count_calls(backend)
        rows = [torch.full((2, 8), rank / 10) for rank in range(3)]
        found = train(ferrodist.DDP(new_model(), backend), rows[backend.rank])
        expected = train(new_model(), torch.cat(rows))
        assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(found, expected, strict=True))
        tree = {"w": np.full(30_000, backend.rank, np.float32), "b": [torch.ones(30_000)]}
        mean = ferrodist.average_gradients(tree, backend)
        assert mean["w"][-1] == mean["b"][0][-1] == 1
        return len(asked)

    with start_gloo_job(3, body) as job:
        assert all(number > 3 for number in job.results())


# -- errors ----------------------------------------------------------------------------------------


def forever(backend):
    leave_all_to_gloo(backend)
    while True:
        backend.allreduce(np.ones(100_000), timeout=60)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_is_named_and_the_others_go_on_together(start_gloo_job, lost):
    """Also if it is rank 0, which has served the store of the world."""

    def body(backend, pipe):
        backend.barrier()
        pipe.send("ready")
        error, _ = error_and_time(forever, backend)
        assert isinstance(error, RankLost)
        assert error.rank == lost
        with pytest.raises(RankLost):
            backend.send(1, lost)
        left = [rank for rank in range(3) if rank != lost]
        group = backend.split(left)
        return group.allreduce(backend.rank), group.sendrecv(
            backend.rank, 1 - group.rank, 1 - group.rank
        )

    with start_gloo_job(3, body) as job:
        for rank in job:
            assert rank.hear() == "ready"
        job[lost].send_signal(signal.SIGKILL)
        results = [rank.end() for rank in job.others(lost)]
    assert all(end.error is None for end in results), results
    left = [rank for rank in range(3) if rank != lost]
    assert [end.result for end in results] == [(sum(left), left[1]), (sum(left), left[0])]


def test_a_rank_that_does_not_come_is_missing_by_name_on_all(start_gloo_job):
    def body(backend, pipe):
        backend.barrier()
        if backend.rank == 1:
            assert pipe.recv() == "go"
            with pytest.raises(GroupAborted):
                backend.allreduce(np.ones(3))
            return None
        with pytest.raises(CollectiveTimeout) as found:
            backend.allreduce(np.ones(3), timeout=0.3 if backend.rank else 60)
        return found.value.missing, found.value.sequence

    with start_gloo_job(3, body) as job:
        ends = [job[0].end(), job[2].end()]
        job[1].tell()
        assert job[1].end().error is None
    assert [end.result for end in ends] == [([1], 2)] * 2


def hold_gloo(backend: Any, pipe: Any, says: str | None = None) -> None:
    """Let this rank enter collectives, and begin them in Gloo only when the test says so."""
    methods = torch_calls._METHODS
    allreduce = methods[Kind.ALLREDUCE]

    def hold(*args: Any) -> Any:
        if says is not None:
            pipe.send(says)
        pipe.recv()
        return allreduce(*args)

    methods[Kind.ALLREDUCE] = hold


def test_a_deadline_inside_gloo_ends_the_call_and_what_is_left_there_holds_nobody_up(
    start_gloo_job,
):
    def body(backend, pipe):
        leave_all_to_gloo(backend)
        backend.barrier()
        x = np.ones(100_000)
        if backend.rank == 1:
            hold_gloo(backend, pipe)
        with pytest.raises((CollectiveTimeout, GroupAborted)) as found:
            backend.allreduce(x, timeout=0.5 if backend.rank == 0 else 60)
        return type(found.value).__name__, found.value.sequence

    with start_gloo_job(3, body) as job:
        ends = [job[0].end(), job[2].end()]
        job[1].tell()
        ends.append(job[1].end())
    assert [end.result for end in ends] == [("CollectiveTimeout", 2)] * 3, ends


def tell_each_look(backend: Any, pipe: Any) -> None:
    look = backend._look
    backend._look = lambda *args: (pipe.send("waits"), look(*args))[1]


def hold_up(job: Any, seconds: float) -> list[Any]:
    """Let rank 0 wait in Gloo for rank 1, and return the results of both."""
    begin = time.monotonic()
    while time.monotonic() < begin + seconds:
        assert job[0].hear() == "waits"
    job[1].tell()
    while (found := job[0].hear()) == "waits":
        pass
    return [found.result, job[1].end().result]


@pytest.mark.parametrize(("world", "lost"), [(2, 1), (4, 2)])
def test_a_rank_that_is_lost_inside_gloo_is_named(start_gloo_job, world, lost):
    """Of two, Gloo fails; of four, rank 0 waits for ranks 1 and 3 alone, and Gloo goes on."""

    def body(backend, pipe):
        leave_all_to_gloo(backend)
        backend.barrier()
        if backend.rank:
            hold_gloo(backend, pipe, says="held")
        with pytest.raises(RankLost) as found:
            backend.allreduce(np.ones(100_000), timeout=60)
        return found.value.rank

    with start_gloo_job(world, body) as job:
        for rank in job.others(0):
            assert rank.hear() == "held"
        job[lost].send_signal(signal.SIGKILL)
        assert job[0].end().result == lost
        for rank in job.others(0, lost):
            rank.tell()
            assert rank.end().result == lost


def test_ctrl_c_inside_gloo_ends_the_call_on_all_ranks(start_gloo_job):
    def body(backend, pipe):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        leave_all_to_gloo(backend)
        backend.barrier()
        if backend.rank == 1:
            hold_gloo(backend, pipe, says="held")
        error = GroupAborted if backend.rank else KeyboardInterrupt
        with pytest.raises(error):
            backend.allreduce(np.ones(100_000), timeout=60)

    with start_gloo_job(3, body) as job:
        assert job[1].hear() == "held"
        job[0].send_signal(signal.SIGINT)
        assert [job[0].end().error, job[2].end().error] == [None, None]
        job[1].tell()
        assert job[1].end().error is None


def test_a_timeout_that_nobody_chose_ends_no_call_that_gloo_may_still_move(start_gloo_job):
    def body(backend, pipe):
        leave_all_to_gloo(backend)
        backend.barrier()
        backend.timeout = DefaultTimeout(0.2)
        if backend.rank == 1:
            hold_gloo(backend, pipe)
        else:
            tell_each_look(backend, pipe)
        return float(backend.allreduce(np.full(100_000, backend.rank + 1.0))[-1])

    with start_gloo_job(2, body) as job:
        assert hold_up(job, 1) == [3.0, 3.0]  # five times as long


def test_ctrl_c_in_a_call_ends_it_on_all_ranks(start_gloo_job):
    def body(backend, pipe):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        backend.barrier()
        pipe.send("ready")
        error = KeyboardInterrupt if backend.rank == 0 else GroupAborted
        with pytest.raises(error) as found:
            backend.barrier(timeout=60)
        return getattr(found.value, "rank", None)

    def late(backend, pipe):
        if backend.rank == 2:
            backend.barrier()
            pipe.send("ready")
            assert pipe.recv() == "go"
            with pytest.raises(GroupAborted):
                backend.barrier()
            return 0
        return body(backend, pipe)

    with start_gloo_job(3, late) as job:
        for rank in job:
            assert rank.hear() == "ready"
        job[0].await_sleep()
        job[0].send_signal(signal.SIGINT)
        assert [job[0].end().result, job[1].end().result] == [None, 0]
        job[2].tell()
        assert job[2].end().error is None


@pytest.mark.parametrize("is_tree", [False, True])
def test_calls_that_differ_are_named_and_groups_stay_apart(start_gloo_job, is_tree):
    """Before Gloo sees them, on the fast path and on the general one."""

    def body(backend, pipe):
        leave_all_to_gloo(backend)
        asked = count_calls(backend)
        x = np.ones(3 + backend.rank // 2)
        with pytest.raises(CollectiveMismatch, match=r"test_gloo\.py:\d+") as found:
            backend.allreduce({"x": x} if is_tree else x)
        assert not asked
        pair = backend.split([2, 0]) if backend.rank != 1 else None
        work = backend.allreduce(np.full(50_000, backend.rank), async_op=True)
        total = None if pair is None else pair.allreduce(10 * backend.rank)
        assert work.wait(60)[-1] == 3
        return str(found.value), total

    with start_gloo_job(3, body) as job:
        results = job.results()
    assert len({text for text, _ in results}) == 1
    assert [total for _, total in results] == [20, None, 20]


def run_program(path: Path, ranks: int, program: str) -> subprocess.CompletedProcess[str]:
    script = path / "program.py"
    script.write_text(textwrap.dedent(program))
    return subprocess.run(
        [sys.executable, "-m", "ferrodist", "run", "-n", str(ranks), str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.slow
def test_a_program_that_gave_a_call_up_ends_at_once(tmp_path):
    """torch would wait for it, and Gloo's threads must not meet an interpreter that is gone."""
    begin = time.monotonic()
    done = run_program(
        tmp_path,
        3,
        """
        import ferrodist, numpy as np, sys, time

        backend = ferrodist.init("gloo", timeout=30)
        group = backend.split([1, 2, 0])
        backend.barrier()
        if backend.rank == 1:
            try:
                backend.recv(0)
            except ferrodist.RankLost:
                print("late", flush=True)
            sys.exit(0)
        for one in (group, backend):
            try:
                one.allreduce(np.ones(5), timeout=0.3)
            except ferrodist.CollectiveTimeout as error:
                print("missing", error.missing, flush=True)
        """,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    words = [line.rpartition(": ")[2] for line in done.stdout.splitlines()]
    assert {"missing [0]", "missing [1]", "late"} <= set(words)
    assert time.monotonic() - begin < 60


@pytest.mark.slow
def test_a_program_that_gave_a_call_up_inside_gloo_ends_at_once(tmp_path):
    """Though another rank, which Gloo waits for, stays until the others have ended."""
    done = run_program(
        tmp_path,
        3,
        """
        import ferrodist, numpy as np, os, sys, time
        from ferrodist.backends.engines import engine, torch_calls
        from ferrodist.call import Kind

        def stay(*args):
            while any(os.path.exists(f"/proc/{pid}") for pid in (pids[0], pids[2])):
                time.sleep(0.01)
            sys.exit(0)

        engine.CARRIED_NBYTES = engine.CARRIED_ON_ONE_HOST = -1
        backend = ferrodist.init("gloo")
        pids = backend.all_gather(os.getpid()).tolist()
        if backend.rank == 1:
            torch_calls._METHODS[Kind.ALLREDUCE] = stay
        try:
            backend.allreduce(np.ones(100_000), timeout=0.3)
        except ferrodist.CollectiveTimeout:
            print("gave up", flush=True)
        """,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.rpartition(": ")[2] for line in done.stdout.splitlines()] == ["gave up"] * 2


@pytest.mark.slow
def test_an_exit_without_close_is_quiet_and_leaves_the_exit_code(tmp_path):
    done = run_program(
        tmp_path,
        3,
        """
        import ferrodist, sys

        backend = ferrodist.init("gloo")
        backend.send(backend.rank, (backend.rank + 1) % 3)
        group = backend.split([0, 1, 2])
        assert group.allreduce(1.0) == 3
        assert backend.recv((backend.rank - 1) % 3) == (backend.rank - 1) % 3
        print("done", type(backend).__name__, backend.local_rank, flush=True)
        """,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert sorted(line[-1] for line in done.stdout.splitlines()) == ["0", "1", "2"]


@pytest.mark.slow
def test_ranks_of_mpiexec_meet_and_use_gloo():
    done = run_mpi(
        "mpich",
        3,
        """
        import ferrodist, torch

        backend = ferrodist.init("gloo")
        assert backend.allreduce(torch.ones(1_050_000))[-1] == 3  # by Gloo
        print(type(backend).__name__, backend.split([2, 0, 1]).allreduce(backend.rank), flush=True)
        """,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["GlooBackend", "3"] * 3


def test_without_torch_the_error_names_the_extra():
    program = """
        import sys
        sys.modules["torch"] = None
        import ferrodist
        try:
            ferrodist.init("gloo")
        except ferrodist.BackendUnavailable as error:
            print(error)
        """
    code = textwrap.dedent(program)
    text = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert "pip install 'ferrodist[torch]'" in text
    assert "'gloo'" in text


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_nccl_says_what_this_torch_lacks():
    with pytest.raises(ferrodist.BackendUnavailable, match="built with NCCL"):
        NcclBackend.join(ferrodist.rendezvous.Job("one", 0, 1, bytes(32)))


def test_names_of_torch_are_names_of_backends():
    assert backend_class("gloo") is GlooBackend
    assert backend_class("nccl") is NcclBackend
    assert ferrodist.TorchDistributedBackend is TorchDistributedBackend


def test_tls_is_refused_which_gloo_does_not_have():
    job = ferrodist.rendezvous.Job("one", 0, 1, bytes(32))
    with pytest.raises(InvalidArgument, match="FERRODIST_TLS=1: ferrodist does not encrypt what"):
        GlooBackend.join(job, config=ferrodist.Config(tls=True))


def test_a_world_of_one_needs_nobody():
    job = ferrodist.rendezvous.Job("one", 0, 1, bytes(32))
    with GlooBackend.join(job, config=ferrodist.Config()) as backend:
        assert backend.allreduce(np.arange(3), op="prod").tolist() == [0, 1, 2]
        assert backend.all_gather(torch.tensor(2.5)).tolist() == [2.5]
        assert backend.split([0]).reduce_scatter(np.arange(4)).tolist() == [0, 1, 2, 3]


# -- a group of the program ------------------------------------------------------------------------


class group_of_torch:  # noqa: N801 -- used as a function
    """Make torch's default group, as a program does."""

    def __init__(self, backend: Any, path: Path, seconds: float = 3) -> None:
        self._backend, self._path, self._seconds = backend, path, seconds

    def __enter__(self) -> Any:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self._path}/store",
            rank=self._backend.rank,
            world_size=self._backend.world_size,
            timeout=timedelta(seconds=self._seconds),  # ours are our own
        )
        return dist.group.WORLD

    def __exit__(self, *about: object) -> None:
        dist.destroy_process_group()


def test_a_group_of_the_program_is_used_and_stays_the_programs(start_gloo_job, tmp_path):
    def body(backend, pipe):
        leave_all_to_gloo(backend)
        assert not dist.is_initialized()  # init made no default group
        with group_of_torch(backend, tmp_path) as group:
            made = TorchDistributedBackend.from_process_group(group)
            twice = ferrodist.TorchDistributedBackend.from_process_group(group)
            assert type(made) is GlooBackend
            used = group._get_backend(torch.device("cpu"))
            assert made.engine.group is twice.engine.group is used
            x = torch.full((4,), float(made.rank))
            assert made.allreduce(x).tolist() == [3.0] * 4
            dist.all_reduce(x)
            assert x.tolist() == [3.0] * 4
            assert twice.all_gather(made.rank).tolist() == [0, 1, 2]
            assert made.split([1, 0, 2]).broadcast(made.rank) == 1
            made.close()
            twice.close()
            dist.all_reduce(x)  # which goes on
            return x.tolist()

    with start_gloo_job(3, body) as job:
        assert job.results() == [[9.0] * 4] * 3


def test_the_timeout_of_a_group_of_the_program_ends_no_call_of_the_backend(
    start_gloo_job, tmp_path
):
    def body(backend, pipe):
        leave_all_to_gloo(backend)
        with group_of_torch(backend, tmp_path, seconds=1) as group:
            made = TorchDistributedBackend.from_process_group(group)
            made.barrier()
            if made.rank == 1:
                hold_gloo(made, pipe)
            else:
                tell_each_look(made, pipe)
            found = made.allreduce(np.full(100_000, made.rank + 1.0), timeout=60)
            made.close()
            return float(found[-1])

    with start_gloo_job(2, body) as job:
        assert hold_up(job, 1.5) == [3.0, 3.0]


def test_what_is_no_group_of_torch_is_refused():
    with pytest.raises(InvalidArgument, match=r"expected a group of torch\.distributed, got int"):
        TorchDistributedBackend.from_process_group(1)


# -- tensors that stay on their device -------------------------------------------------------------


def as_if_on_gpus(backend: Any) -> Any:
    """Let tensors of the host be what tensors of GPUs are to NCCL."""
    group = backend.engine.group
    backend._gpu_engine = Caller(group, backend.rank, backend.world_size, on_device=False)
    type(backend)._device, type(backend)._has_nccl = "cpu", True  # in this process
    backend._call_path = None  # which takes tensors of the host for what they are
    return backend


def test_tensors_on_the_device_never_become_memory_of_the_host(start_gloo_job):
    def body(backend, pipe):
        as_if_on_gpus(backend)
        library = importlib.import_module("ferrodist.arrays.torch_tensors")

        def refuse(host: Any) -> Any:
            raise AssertionError("a copy to the host")

        library._as_numpy = refuse
        rank = backend.rank
        x = torch.arange(6.0).reshape(6, 1) + rank
        whole = torch.arange(6.0).reshape(6, 1)
        assert torch.equal(backend.allreduce(x), 3 * whole + 3)
        assert torch.equal(backend.allreduce(x[::2], op="mean"), whole[::2] + 1)
        assert torch.equal(backend.allreduce(x, async_op=True).wait(60), 3 * whole + 3)
        assert torch.equal(backend.broadcast(x, 2), whole + 2)
        assert torch.equal(backend.all_gather(x)[::6, 0], torch.arange(3.0))
        assert torch.equal(backend.reduce_scatter(x), (3 * whole + 3)[2 * rank : 2 * rank + 2])
        assert torch.equal(backend.all_to_all(x)[::2, 0], torch.arange(3.0) + 2 * rank)
        got = backend.reduce(x, 1)
        assert (got is None) if rank != 1 else torch.equal(got, 3 * whole + 3)
        tree = backend.allreduce({"a": x, "b": [x[0], x]})
        assert torch.equal(tree["b"][1], 3 * whole + 3)
        out = torch.empty(6, 1)
        assert backend.allreduce(x, out=out) is out
        assert torch.equal(out, 3 * whole + 3)
        kept = x.clone()
        assert backend.allreduce(x, out=x) is x
        assert torch.equal(x, 3 * whole + 3)
        assert torch.equal(kept, whole + rank)
        return backend.split([2, 1, 0]).rank

    with start_gloo_job(3, body) as job:
        ends = [rank.end() for rank in job]
    # A group that is split off asks for NCCL, which is not here.
    assert all(end.error is not None for end in ends)
    assert any("ProcessGroupNCCL" in str(end.error) for end in ends), [e.trace for e in ends]


def test_what_the_engine_of_the_device_lacks_goes_through_host_memory(start_gloo_job):
    def body(backend, pipe):
        as_if_on_gpus(backend)
        x = torch.tensor([float("nan") if backend.rank else 1.0, backend.rank])
        assert backend.allreduce(x, op="max").isnan().tolist() == [True, False]
        assert backend.allreduce(torch.ones(2, dtype=torch.int16)).tolist() == [2, 2]
        assert backend.allreduce(torch.ones(2), algorithm="ring").tolist() == [2.0, 2.0]
        assert (
            backend.sendrecv(x[1:], 1 - backend.rank, 1 - backend.rank).item() == 1 - backend.rank
        )

    with start_gloo_job(2, body) as job:
        job.results()


def test_arrays_on_the_device_and_on_the_host_do_not_match(start_gloo_job):
    def body(backend, pipe):
        as_if_on_gpus(backend)
        x = np.ones(3, np.float32) if backend.rank else torch.ones(3)
        with pytest.raises(CollectiveMismatch, match="nccl"):
            backend.allreduce(x)

    with start_gloo_job(2, body) as job:
        job.results()


@needs_gpus
@pytest.mark.slow
def test_nccl_keeps_the_contract_on_gpus():
    done = subprocess.run(
        [sys.executable, "-m", "ferrodist", "run", "-n", "2", str(ROOT / "examples/gpu_check.py")],
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
