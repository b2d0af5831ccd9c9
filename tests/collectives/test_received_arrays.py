"""recv without out= and like=: what was sent comes back, of the sender's kind."""

import array
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import ferrodist
from ferrodist import InvalidArgument, SizeMismatch, UnsupportedArray
from ferrodist.arrays import received_array
from ferrodist.backends.framing import FrameError, unpack_message
from ferrodist.buffer import ArrayKind, DType
from ferrodist.testing import run_ranks

LARGE = 300_000  # float64: memory of its own, above what is sent at once

SENT = {
    "int": lambda rank: rank + 3,
    "float": lambda rank: rank + 0.5,
    "bool": lambda rank: rank == 0,
    "complex": lambda rank: complex(rank, -1),
    "numpy": lambda rank: np.arange(6.0).reshape(2, 3) + rank,
    "numpy 0-d": lambda rank: np.array(rank + 1),
    "numpy empty": lambda rank: np.empty((0, rank + 3), np.int8),
    "numpy of some KB": lambda rank: np.arange(500.0) + rank,
    "numpy large": lambda rank: np.arange(LARGE + rank, dtype=float),
    "numpy scalar": lambda rank: np.float32(rank + 0.5),
    "torch": lambda rank: torch.arange(5) + rank,
    "torch bfloat16": lambda rank: torch.full((3,), rank + 0.5, dtype=torch.bfloat16),
    "torch large": lambda rank: torch.arange(LARGE + rank),
    "torch empty": lambda rank: torch.empty(0, rank + 2),
    "jax": lambda rank: jnp.arange(5, dtype=jnp.float32) + rank,
    "bytes": lambda rank: b"abc" * (rank + 1),
    "bytearray": lambda rank: bytearray(b"xy" * (rank + 1)),
    "array.array": lambda rank: array.array("d", [rank, 2.5]),
    "memoryview": lambda rank: memoryview(bytes([rank, 7])),
}


def same(got: object, wanted: object) -> bool:
    """Type, dtype, shape and values; of torch and JAX through NumPy."""
    if type(got) is not type(wanted):
        return False
    if isinstance(wanted, torch.Tensor):
        return got.dtype == wanted.dtype and torch.equal(got, wanted)
    if hasattr(wanted, "dtype"):
        return got.dtype == wanted.dtype and np.array_equal(np.asarray(got), np.asarray(wanted))
    return got == wanted


def wrong_kinds(backend, pipe=None):
    """Name what does not come as it was sent to the next rank, by all calls there are."""
    right, left = (backend.rank + 1) % 3, (backend.rank - 1) % 3
    wrong = []
    for tag, (name, make) in enumerate(SENT.items()):
        mine, wanted = make(backend.rank), make(left)
        coming = ferrodist.recv(left, backend, tag=1000 + tag, async_op=True)
        going = ferrodist.send(mine, right, backend, tag=1000 + tag, async_op=True)
        found = [coming.wait(60), ferrodist.sendrecv(mine, right, left, backend, tag=tag)]
        going.wait(60)
        later = ferrodist.send(mine, right, backend, tag=tag, async_op=True)
        found += [ferrodist.recv(left, backend, tag=tag, timeout=60)]  # the general path
        later.wait(60)
        if not all(same(one, wanted) for one in found):
            wrong.append((name, [type(one) for one in found]))
    return wrong


@pytest.mark.slow
def test_every_kind_of_array_comes_back_as_it_was_sent(start):
    with start(3, wrong_kinds) as job:
        assert job.results() == [[], [], []]


def test_every_kind_of_array_comes_back_as_it_was_sent_between_threads():
    assert run_ranks(3, wrong_kinds) == [[], [], []]


def test_a_received_array_is_the_receivers_own():
    def body(backend):
        if backend.rank == 0:
            for size in (3, 1000, LARGE):
                ferrodist.send(np.arange(size), 1, backend)
            return True
        found = [ferrodist.recv(0, backend) for _ in range(3)]
        for one in found:
            one += 1  # writable
        return all(one[-1] == len(one) for one in found)

    assert run_ranks(2, body) == [True, True]


def test_a_library_that_is_not_imported_here_gives_numpy(monkeypatch):
    memory = np.arange(3.0).view(np.uint8)
    for kind, module in ((ArrayKind.TORCH, "torch"), (ArrayKind.JAX, "jax")):
        monkeypatch.delitem(sys.modules, module)
        found = received_array(memory, DType.FLOAT64, (3,), kind)
        assert type(found) is np.ndarray
        assert found.tolist() == [0, 1, 2]


def test_bfloat16_that_numpy_does_not_know_is_refused_by_name(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(UnsupportedArray, match=r"ml_dtypes.*torch"):
        received_array(np.zeros(2, np.uint8), DType.BFLOAT16, (1,), ArrayKind.TORCH)


def test_like_gives_the_kind_and_refuses_another_dtype_or_shape():
    def body(backend):
        if backend.rank == 0:
            for _ in range(3):
                ferrodist.send(np.arange(3.0), 1, backend)
            return None
        found = ferrodist.recv(0, backend, like=torch.zeros(3, dtype=torch.float64))
        for like in (np.zeros(3, np.float32), np.zeros(4)):
            with pytest.raises(SizeMismatch, match=r"float64\[3\]") as caught:
                ferrodist.recv(0, backend, like=like)
            assert caught.value.rank == 0
        return found

    found = run_ranks(2, body)[1]
    assert torch.equal(found, torch.arange(3.0, dtype=torch.float64))


@pytest.mark.parametrize("x", [np.zeros(3), torch.zeros(2), np.zeros((1, 1), int)])
def test_an_array_where_the_rank_belongs_is_told_of_out(x):
    def body(backend):
        other = 1 - backend.rank
        for call in (
            lambda: ferrodist.recv(x, other, backend),
            lambda: ferrodist.recv(x, backend),
            lambda: backend.recv(x, other),
            lambda: ferrodist.sendrecv(x, other, x, backend),
        ):
            with pytest.raises(InvalidArgument, match="out="):
                call()

    run_ranks(2, body)


def test_a_message_whose_header_is_damaged_is_no_array():
    good = bytes([DType.UINT8, 1, 2, 0, 0, 0, 0, 0, 0, 0, ArrayKind.NUMPY]) + b"ab"
    found = unpack_message(memoryview(good))
    assert found == (DType.UINT8, (2,), ArrayKind.NUMPY, b"ab")
    for damaged in (good[:-1], good + b"c", good[:10] + b"\0" + good[11:], b""):
        with pytest.raises(FrameError):
            unpack_message(memoryview(damaged))
