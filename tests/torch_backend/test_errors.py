"""What goes wrong under torch.distributed is told in ferrodist's words, on all ranks."""

from __future__ import annotations

import re
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ferrodist
from torch_worlds import torch_job

pytestmark = pytest.mark.timeout(120)

TIMED_OUT = r" (Timed out|closed|timeout) "  # what torch's own tests look for
QUICK = {"FERRODIST_HEARTBEAT": "0.2", "FERRODIST_HEARTBEAT_TIMEOUT": "1"}


def two_layers() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(model: nn.Module, num_steps: int) -> None:
    for _ in range(num_steps):
        model(torch.ones(3, 4)).sum().backward()


FOR_EVER = 10**9
CALLS = {
    "barrier": lambda: dist.barrier(timeout=timedelta(milliseconds=200)),
    "monitored": lambda: dist.group.WORLD.monitored_barrier(timedelta(milliseconds=200)),
    "all_reduce": lambda: dist.all_reduce(torch.ones(2)),
    "async": lambda: dist.all_reduce(torch.ones(2), async_op=True).wait(),
    "recv": lambda: dist.recv(torch.ones(2), 1),
    "wait": lambda: dist.all_reduce(torch.ones(2), async_op=True).wait(timedelta(milliseconds=50)),
}


def reduce_and_wait(x: torch.Tensor, is_async: bool) -> None:
    work = dist.all_reduce(x, async_op=is_async)
    work.wait()


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_a_difference_names_every_ranks_call_and_the_call_of_torch(start_job, is_async):
    def body(rank: int, _: Any) -> float:
        x = torch.ones(2, 3 + (rank == 1))
        with pytest.raises(ferrodist.SizeMismatch) as caught:
            reduce_and_wait(x, is_async)
        text = str(caught.value)
        assert "rank 1  allreduce(float32[8], sum)  test_errors.py:" in text
        assert re.search(
            rf"in torch\.distributed\.all_reduce\(float32\[2, {3 + (rank == 1)}\]\) at test_errors",
            text,
        )
        y = torch.ones(1)
        dist.all_reduce(y)  # the group goes on
        return y.item()

    with torch_job(start_job, 3, body) as job:
        assert job.results() == [3.0] * 3


def test_different_calls_are_told_apart(start_job):
    def body(rank: int, _: Any) -> None:
        calls = [
            lambda: dist.broadcast(torch.ones(2), 0),
            lambda: dist.all_gather_single(torch.ones(4), torch.ones(2)),
        ]
        with pytest.raises(ferrodist.CollectiveMismatch, match="ranks disagree"):
            calls[rank]()

    with torch_job(start_job, 2, body) as job:
        job.results()


@pytest.mark.parametrize("call", CALLS)
def test_a_timeout_names_the_missing_rank(start_job, call):
    def body(rank: int, pipe: Any) -> None:
        if rank == 1:
            assert pipe.recv() == "go"
            return
        kind = TimeoutError if call == "wait" else ferrodist.CollectiveTimeout
        begin = time.monotonic()
        with pytest.raises(kind, match=TIMED_OUT) as caught:
            CALLS[call]()
        limit = {"barrier": 0.2, "monitored": 0.2, "wait": 0.05}.get(call, 1.0)
        assert limit * 0.99 <= time.monotonic() - begin < limit + 2.0
        assert "torch.distributed." in str(caught.value)
        if call != "wait":
            assert caught.value.missing == [1]
        pipe.send("told")

    with torch_job(start_job, 2, body, seconds=30.0 if call == "wait" else 1.0) as job:
        assert job[0].hear() == "told"
        job[1].tell("go")
        job.results()


def test_errors_come_out_of_the_backward_of_ddp(start_job):
    """One rank has a parameter more: no crash, and the text of the difference on all."""

    def body(rank: int, _: Any) -> str:
        model = two_layers()
        ddp = DistributedDataParallel(model)
        if rank == 1:  # what no check at the start can see: another call in between
            model[0].weight.register_post_accumulate_grad_hook(
                lambda _: dist.all_reduce(torch.ones(3))
            )
        with pytest.raises(RuntimeError, match=r"ranks disagree|sizes differ") as caught:
            train(ddp, 2)
        return str(caught.value)

    with torch_job(start_job, 2, body, seconds=5.0) as job:
        for text in job.results():
            assert "torch.distributed.all_reduce(" in text
            assert "test_errors.py:" in text


def sharded() -> nn.Module:
    model = two_layers()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.parametrize(
    "wrap", [DistributedDataParallel, lambda _: sharded()], ids=["ddp", "fsdp2"]
)
def test_a_rank_that_stops_training_is_named_by_the_backward_of_the_others(start_job, wrap):
    def body(rank: int, pipe: Any) -> str:
        model = wrap(two_layers())
        train(model, 2)
        if rank == 1:
            pipe.send("stopped")
            assert pipe.recv() == "go"
            return ""
        with pytest.raises(RuntimeError, match=TIMED_OUT) as caught:
            train(model, 1)
        pipe.send("told")
        return str(caught.value)

    with torch_job(start_job, 3, body, seconds=1.0) as job:
        assert [job[rank].hear() for rank in (1, 0, 2)] == ["stopped", "told", "told"]
        job[1].tell("go")
        first, _, last = job.results()
        for text in (first, last):
            assert re.search(r"rank 1\b", text), text
            assert "torch.distributed." in text
            assert "test_errors.py:" in text


def test_a_difference_comes_out_of_the_hooks_of_fsdp2_on_all_ranks(start_job):
    def body(rank: int, _: Any) -> str:
        model = sharded()
        train(model, 1)
        if rank == 1:  # one call more, between two of FSDP's
            model[0].register_forward_hook(lambda *_: dist.all_reduce(torch.ones(3)))
        with pytest.raises(ferrodist.CollectiveMismatch, match="ranks disagree") as caught:
            train(model, 1)
        return str(caught.value)

    with torch_job(start_job, 2, body, seconds=5.0) as job:
        first, second = job.results()
    assert "torch.distributed.all_gather_single(" in first
    assert "torch.distributed.all_reduce(float32[3]) at test_errors.py:" in second
    assert "test_errors.py:" in first


def test_a_rank_killed_under_ddp_is_named_by_the_backward_of_the_others(start_job):
    def body(rank: int, pipe: Any) -> float:
        ddp = DistributedDataParallel(two_layers())
        pipe.send("trains")
        with pytest.raises(RuntimeError, match=r"rank 1 (was killed|died).*SIGKILL") as caught:
            train(ddp, FOR_EVER)
        assert "torch.distributed." in str(caught.value)
        return time.monotonic()

    with torch_job(start_job, 3, body, **QUICK) as job:
        for rank in job:
            assert rank.hear() == "trains"
        killed = job[1].send_signal(signal.SIGKILL)
        for rank in job.others(1):
            end = rank.end()
            assert end.error is None, end.trace
            assert end.result - killed < 2.0


def test_a_rank_killed_under_fsdp2_is_named_on_all_others_in_two_seconds(start_job):
    def body(rank: int, pipe: Any) -> float:
        model = sharded()
        pipe.send("trains")
        with pytest.raises(RuntimeError, match=r"rank 2 (was killed|died).*SIGKILL") as caught:
            train(model, FOR_EVER)
        assert "test_errors.py:" in str(caught.value)
        return time.monotonic()

    with torch_job(start_job, 3, body, **QUICK) as job:
        for rank in job:
            assert rank.hear() == "trains"
        killed = job[2].send_signal(signal.SIGKILL)
        for rank in job.others(2):
            end = rank.end()
            assert end.error is None, end.trace
            assert end.result - killed < 2.0


def test_an_exception_in_a_rank_is_told_to_the_others(start_job):
    def body(rank: int, _: Any) -> str:
        if rank == 1:
            ferrodist.torch.backend_of()._fail(ValueError("out of cheese"))
            return ""
        with pytest.raises(ferrodist.RankLost, match="out of cheese") as caught:
            dist.all_reduce(torch.ones(2))
        return str(caught.value)

    with torch_job(start_job, 2, body) as job:
        assert "torch.distributed.all_reduce(float32[2]) at test_errors.py" in job.results()[0]


def test_abort_ends_the_calls_of_all(start_job):
    def body(rank: int, pipe: Any) -> None:
        if rank == 0:
            dist.group.WORLD.abort()
            return
        with pytest.raises(ferrodist.GroupAborted, match="abort\\(\\) of the process group"):
            dist.all_reduce(torch.ones(2))

    with torch_job(start_job, 2, body) as job:
        job.results()


def test_wrong_arguments_are_refused_before_anything_is_sent(start_job):
    def body(rank: int, _: Any) -> None:
        world = dist.get_world_size()
        with pytest.raises(ferrodist.InvalidArgument, match=r"shape \(3,\), expected \(4,\)"):
            dist.all_gather_single(torch.ones(3), torch.ones(2))
        with pytest.raises(ferrodist.InvalidArgument, match="2 times the elements"):
            dist.all_gather_single(torch.ones(1, 3), torch.ones(2))
        with pytest.raises(ferrodist.InvalidArgument, match="a list of 2 tensors"):
            dist.group.WORLD.allgather([[torch.ones(2)]], [torch.ones(2)]).wait()
        with pytest.raises(ferrodist.UnsupportedArray, match='new_group\\(backend="nccl"\\)'):
            dist.all_reduce(torch.ones(2, device="meta"))
        with pytest.raises(ferrodist.UnsupportedOp, match="band of float32"):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
        with pytest.raises(RuntimeError, match='new_group\\(backend="nccl"\\)'):
            dist.group.WORLD._get_backend(torch.device("cuda"))
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == world

    with torch_job(start_job, 2, body) as job:
        job.results()
