"""Calls whose arrays do not fit into memory: OutOfMemory before the others count on the call."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import ferrodist

LARGE_CALLS = {  # on an array of 64 MB
    "allreduce": lambda x, b, **how: b.allreduce(x, **how),
    "broadcast": lambda x, b, **how: b.broadcast(x, **how),
    "reduce": lambda x, b, **how: b.reduce(x, **how),
    "all_gather": lambda x, b, **how: b.all_gather(x, **how),
    "gather": lambda x, b, **how: b.gather(x, **how),
    "reduce_scatter": lambda x, b, **how: b.reduce_scatter(x, **how),
    "all_to_all": lambda x, b, **how: b.all_to_all(x, **how),
    "scan": lambda x, b, **how: b.scan(x, **how),
    "tree": lambda x, b, **how: b.allreduce({"a": x, "b": np.ones(1)}, **how),
    "like": lambda x, b, **how: b.recv(1, like=x, **how),
}
COPIED_CALLS = {  # which take a copy of an array with gaps and no other memory
    "all_gather_uneven": lambda x, b, **how: b.all_gather_uneven(x, **how),
    "send": lambda x, b, **how: b.send(x, 1, **how),
    "sendrecv": lambda x, b, **how: b.sendrecv(x, 1, 1, **how),
}
WAYS = {"fast": {}, "general": {"timeout": 20}, "in flight": {"async_op": True}}


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Let this process take no more than a few megabytes."""
    with open("/proc/self/statm") as sizes:
        used = int(sizes.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def raised_without_memory(calls, x, backend) -> dict[str, Any]:
    """Return what calls raise that are not a right OutOfMemory."""
    wrong = {}
    for name, call in calls.items():
        for way, how in WAYS.items():
            try:
                with little_memory():
                    call(x, backend, **how)
                error = None
            except Exception as raised:  # noqa: BLE001 -- whatever it is, the test shows it
                error = raised
            is_right = isinstance(error, ferrodist.OutOfMemory) and (error.nbytes or 0) >= 32 << 20
            if not is_right or str(error.nbytes) not in str(error):
                wrong[f"{name}, {way}, {type(x).__name__}"] = repr(error)
    return wrong


def test_out_of_memory_says_the_size_and_the_group_goes_on(start):
    def body(backend, pipe):
        ferrodist.allreduce(torch.ones(1), backend)  # from the second one on the path is fast
        backend.recv(0, timeout=1e-9, async_op=True).exception()  # which starts threads
        wrong = {}
        if backend.rank == 0:
            rows, out = np.ones((64 << 20, 2), np.uint8), np.ones(64 << 20, np.uint8)
            into = {"out": lambda x, b, **how: b.allreduce(x, out=out, **how)}
            wrong |= raised_without_memory(into, rows[:, 0], backend)
            for x in (rows[:, 0], torch.from_numpy(rows)[:, 0]):
                wrong |= raised_without_memory(LARGE_CALLS | COPIED_CALLS, x, backend)
            for x in (np.ones(64 << 20, np.uint8), torch.ones(64 << 20, dtype=torch.uint8)):
                wrong |= raised_without_memory(LARGE_CALLS, x, backend)
        return wrong, ferrodist.allreduce(1, backend), backend.statistics().collectives

    with start(2, body) as job:
        (wrong, *own), (_, *others) = job.results()
        assert wrong == {}
        assert own == others
        assert own[0] == 2


@pytest.mark.parametrize("way", WAYS)
def test_a_root_without_memory_for_its_copy_lets_the_others_of_a_scatter_know(start, way):
    def body(backend, pipe):
        ferrodist.allreduce(torch.ones(1), backend, async_op=True).wait()  # which starts threads
        finish = ferrodist.Work.wait if way == "in flight" else list
        errors = []
        for library in (np.asarray, torch.from_numpy):
            x = library(np.ones((64 << 20, 2), np.uint8)[:, 0]) if backend.rank == 0 else None
            with little_memory() if backend.rank == 0 else contextlib.nullcontext():
                with pytest.raises(ferrodist.OutOfMemory) as raised:
                    finish(backend.scatter(x, 0, **WAYS[way]))
            errors.append((raised.value.nbytes, "on rank 0" in str(raised.value)))
        return errors, ferrodist.allreduce(1, backend), backend.statistics().collectives

    with start(2, body) as job:
        own, other = job.results()
        assert own == ([(64 << 20, False)] * 2, 2, 4)
        assert other == ([(None, True)] * 2, 2, 4)


def test_an_array_that_does_not_fit_into_memory_is_an_out_of_memory(start):
    def body(backend, pipe):
        with little_memory():
            for make in (backend.empty, backend.zeros):
                with pytest.raises(ferrodist.OutOfMemory, match=r"MiB") as raised:
                    make(1 << 37, "uint8")
                assert raised.value.nbytes == 1 << 37
            with pytest.raises(ferrodist.OutOfMemory, match=r"MiB"):
                backend.like(np.broadcast_to(np.uint8(0), 1 << 37))

    with start(2, body) as job:
        job.results()
