"""What the public functions refuse, and that they refuse it before anything is sent."""

import datetime
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ferrodist
from ferrodist import (
    DEFAULT_COLLECTIVE_TIMEOUT,
    InvalidArgument,
    InvalidRank,
    InvalidShape,
    InvalidWorldSize,
    NotInitialized,
    SimulatedBackend,
    SizeMismatch,
    UnsupportedArray,
    UnsupportedOp,
)
from ferrodist.backends import registry
from ferrodist.testing import run_ranks

ROOTED = [ferrodist.broadcast, ferrodist.reduce, ferrodist.gather, ferrodist.scatter]
REDUCING = [ferrodist.allreduce, ferrodist.reduce, ferrodist.reduce_scatter]


@pytest.fixture
def alone():
    with SimulatedBackend.create_group(1)[0] as backend:
        yield backend


def refused(world, error, call, match=None):
    """Check that a call is refused on rank 0 alone and that the group is still in step."""

    def body(backend):
        if backend.rank == 0:
            with pytest.raises(error, match=match):
                call(backend)
        return ferrodist.allreduce(1, backend)

    assert run_ranks(world, body) == [world] * world


def refused_by_root(world, error, call, match=None):
    """Check that what rank 0 refuses all ranks raise, and that the group is still in step."""

    def body(backend):
        with pytest.raises(error, match=match):
            call(backend)
        return ferrodist.allreduce(1, backend)

    assert run_ranks(world, body) == [world] * world


@pytest.mark.parametrize("size", [0, -1, True, 2.0, None])
def test_a_world_needs_at_least_one_rank(size):
    with pytest.raises(InvalidWorldSize):
        SimulatedBackend.create_group(size)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("call", ROOTED)
@pytest.mark.parametrize("root", [-1, 3, 99, 1.0, None, True, "0"])
def test_a_root_outside_the_world_is_refused_before_the_array_is_looked_at(world, call, root):
    refused(world, InvalidRank, lambda b: call(object(), b, root))


def test_the_error_of_a_bad_root_has_its_facts(alone):
    with pytest.raises(InvalidRank) as caught:
        ferrodist.broadcast(1, alone, root=5)
    assert (caught.value.rank, caught.value.world_size) == (5, 1)


def test_without_a_backend_the_error_says_what_to_pass(monkeypatch):
    monkeypatch.setattr(registry, "_process", registry._Process())  # where init() was not called
    with pytest.raises(NotInitialized, match="pass a backend"):
        ferrodist.allreduce(1)


def test_a_backend_of_the_wrong_type_is_refused():
    with pytest.raises(InvalidArgument, match="backend must be a Backend, got str"):
        ferrodist.allreduce(1, "sum")


@pytest.mark.parametrize("timeout", [0, -1, -0.5, float("nan"), "1", True, datetime.timedelta(0)])
def test_a_timeout_must_be_above_zero(timeout, alone):
    with pytest.raises(InvalidArgument, match="timeout must be"):
        ferrodist.allreduce(1, alone, timeout=timeout)
    with pytest.raises(InvalidArgument, match="timeout must be"):
        alone.timeout = timeout


def test_timeouts_are_seconds_timedeltas_or_none(alone):
    assert alone.timeout == DEFAULT_COLLECTIVE_TIMEOUT == 60.0
    alone.timeout = datetime.timedelta(seconds=3)
    assert alone.timeout == 3.0
    for timeout in (1, 0.5, datetime.timedelta(minutes=1), None, float("inf")):
        assert ferrodist.allreduce(1, alone, timeout=timeout) == 1


@pytest.mark.parametrize("call", REDUCING)
def test_an_unknown_op_lists_the_known_ones(call, alone):
    with pytest.raises(InvalidArgument, match="known: sum, mean, prod, min, max, band, bor, bxor"):
        call(np.ones(2), alone, op="median")


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("call", REDUCING)
@pytest.mark.parametrize(
    ("x", "op"),
    [
        (np.ones(6, int), "mean"),
        (np.ones(6, bool), "mean"),
        (np.ones(6, complex), "min"),
        (np.ones(6, np.complex64), "max"),
        (np.ones(6), "band"),
        (np.ones(6, np.float16), "bxor"),
        (np.ones(6, ml_dtypes.bfloat16), "bor"),
    ],
    ids=str,
)
def test_operations_without_meaning_are_refused(world, call, x, op):
    refused(world, UnsupportedOp, lambda b: call(x, b, op=op))


def test_the_mean_of_ints_says_how_to_get_one(alone):
    with pytest.raises(UnsupportedOp, match=r"pass float\(x\)"):
        ferrodist.allreduce(3, alone, "mean")


def test_ints_that_could_wrap_are_refused():
    refused(3, UnsupportedArray, lambda b: ferrodist.allreduce(2**62, b))
    refused(3, UnsupportedArray, lambda b: ferrodist.allreduce(2**40, b, "prod"))
    assert run_ranks(3, lambda b: ferrodist.allreduce(2**61, b)) == [3 * 2**61] * 3


def scatter_of_root(x, backend):
    return ferrodist.scatter(x if backend.rank == 0 else None, backend)


@pytest.mark.parametrize("call", [ferrodist.reduce_scatter, ferrodist.all_to_all, scatter_of_root])
def test_shapes_that_cannot_be_cut_are_refused(call):
    check = refused if call is not scatter_of_root else refused_by_root
    check(2, SizeMismatch, lambda b: call(np.ones(3), b), match="3 elements, which 2 ranks")
    check(2, SizeMismatch, lambda b: call(np.ones(()), b))
    check(2, InvalidShape, lambda b: call(np.ones((3, 4)), b), match="axis 0 of x has length 3")
    check(2, InvalidShape, lambda b: call(np.ones((3, 0)), b))


def test_anything_goes_in_a_world_of_one(alone):
    for call in (ferrodist.reduce_scatter, ferrodist.all_to_all, ferrodist.scatter):
        np.testing.assert_array_equal(call(np.arange(3.0), alone), np.arange(3.0))


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (np.empty(4), "shape"),
        (np.empty(3, np.float32), "float32"),
        (np.empty((3, 2))[:, 0], "contiguous"),
        (np.broadcast_to(np.zeros(1), 3), "out"),
        (np.frombuffer(bytes(24)), "read-only"),
        ("text", "out"),
        (3.0, "out"),
    ],
    ids=["shape", "dtype", "strided", "broadcast", "read-only", "text", "number"],
)
def test_an_out_that_does_not_fit_is_refused(out, words):
    refused(2, InvalidArgument, lambda b: ferrodist.allreduce(np.ones(3), b, out=out), match=words)


def test_out_may_be_x_itself_or_an_allowed_part_and_nothing_else():
    def body(backend):
        world, rank = backend.world_size, backend.rank
        x = np.full(4, float(rank))
        assert ferrodist.allreduce(x, backend, out=x) is x
        assert x.tolist() == [3.0] * 4
        whole = np.full((world, 2), -1.0)
        whole[rank] = rank
        ferrodist.all_gather(whole[rank], backend, out=whole.reshape(-1))
        assert whole.tolist() == [[r, r] for r in range(world)]
        whole = np.full((world, 2), -1.0)
        whole[rank] = rank
        gathered = ferrodist.gather(whole[rank], backend, 1, out=whole.reshape(-1))
        assert gathered is None or whole.tolist() == [[r, r] for r in range(world)]
        parts = np.arange(6.0).reshape(world, 2)
        ferrodist.reduce_scatter(parts.reshape(-1), backend, out=parts[rank])
        assert parts[rank].tolist() == [6.0 * rank, 6.0 * rank + 3]
        swapped = np.arange(3.0) + 10 * rank
        ferrodist.all_to_all(swapped, backend, out=swapped)
        assert swapped.tolist() == [rank, 10 + rank, 20 + rank]

    run_ranks(3, body)


@pytest.mark.parametrize(
    "call",
    [
        lambda b, a: ferrodist.allreduce(a[:3], b, out=a[1:4]),
        lambda b, a: ferrodist.all_gather(a[1:2], b, out=a[:2]),
        lambda b, a: ferrodist.reduce_scatter(a[:4], b, out=a[1:3]),
        lambda b, a: ferrodist.gather(a[1:2], b, out=a[:2]),
        lambda b, a: ferrodist.allreduce(a[:6:2], b, out=a[:3]),
        lambda b, a: ferrodist.allreduce(
            {"p": a[:2], "q": a[2:4]}, b, out={"p": a[2:4], "q": a[:2]}
        ),
        lambda b, a: ferrodist.allreduce([a[:2], a[2:4]], b, out=[a[4:6], a[5:7]]),
        lambda b, a: ferrodist.all_gather_uneven(a[:2], b, out=a[1:5]),
    ],
)
def test_any_other_overlap_is_refused(call):
    error, name = InvalidArgument, call.__code__.co_names[1]
    if "uneven" in name:
        error = ferrodist.CollectiveMismatch  # sizes are known only after they were exchanged
    is_refused_in_call = name in ("all_gather", "gather", "reduce_scatter", "all_gather_uneven")

    def body(backend):
        with pytest.raises(error, match="overlaps"):
            call(backend, np.arange(8.0))
        return ferrodist.allreduce(1, backend)

    def rank_0_alone(backend):
        if backend.rank == 0:
            with pytest.raises(error, match="overlaps"):
                call(backend, np.arange(8.0))
        return ferrodist.allreduce(1, backend)

    run_ranks(2, body if is_refused_in_call else rank_0_alone)


def gather_parts_of_out(backend: Any) -> None:
    """Let every rank pass its rows of the array that all rows are gathered in."""
    rank, counts = backend.rank, [2, 0, 3]
    begin = sum(counts[:rank])
    wanted = [[10.0 * r + n, -1.0] for r in range(3) for n in range(counts[r])]
    for gather, is_async in itertools.product(
        (ferrodist.all_gather_uneven, ferrodist.gather_uneven), (False, True)
    ):
        out = np.full((sum(counts), 2), -1.0)
        mine = out[begin : begin + counts[rank]]
        mine[:, 0] = 10 * rank + np.arange(counts[rank])
        found = gather(mine, backend, out=out, async_op=is_async)
        found = found.wait(20) if is_async else found
        assert found is (out if gather is ferrodist.all_gather_uneven or rank == 0 else None)
        assert found is None or out.tolist() == wanted
    x = np.arange(5.0)
    part = x[begin : begin + counts[rank]]
    wanted = (3 * part).tolist()
    ferrodist.reduce_scatter_uneven(x, counts, backend, out=part)
    assert part.tolist() == wanted


def test_uneven_calls_between_threads_take_the_part_of_this_rank():
    run_ranks(3, gather_parts_of_out)


def test_uneven_calls_take_the_part_of_this_rank(start):
    with start(3, lambda backend, pipe: gather_parts_of_out(backend)) as job:
        job.results()


def test_interleaved_views_that_share_nothing_are_fine():
    def body(backend):
        a = np.arange(12.0).reshape(4, 3)
        ferrodist.allreduce(a[::2][0], backend, out=a[1])
        return a[1].tolist()

    assert run_ranks(2, body) == [[0.0, 2.0, 4.0]] * 2


def test_out_is_ignored_where_there_is_no_result():
    def body(backend):
        return ferrodist.reduce(np.ones(2), backend, out=np.empty(2) if backend.rank == 0 else "x")

    results = run_ranks(2, body)
    assert results[0].tolist() == [2, 2]
    assert results[1] is None


def test_an_unsupported_leaf_says_where_it_is():
    tree = {"layers": [np.ones(2), {"name": "conv"}]}
    refused(
        2,
        UnsupportedArray,
        lambda b: ferrodist.allreduce(tree, b),
        match=r"\['layers'\]\[1\]\['name'\]",
    )


def test_an_out_tree_must_have_the_structure_of_x():
    refused(
        2,
        InvalidArgument,
        lambda b: ferrodist.allreduce([np.ones(2)] * 2, b, out=[np.empty(2)]),
        match="structure",
    )


def test_calls_of_one_array_refuse_trees():
    for call in (ferrodist.gather, ferrodist.all_to_all):
        refused(
            2, UnsupportedArray, lambda b, call=call: call([np.ones(2)], b), match="single array"
        )


def test_an_unknown_algorithm_lists_the_known_ones():
    refused(
        2,
        InvalidArgument,
        lambda b: ferrodist.allreduce(1, b, algorithm="magic"),
        match="known: .*ring.*star",
    )


def test_reproducible_refuses_an_algorithm_that_folds_in_another_order():
    refused(
        3,
        UnsupportedOp,
        lambda b: ferrodist.allreduce(1.0, b, algorithm="ring", reproducible=True),
        match="does not reduce in rank order",
    )


@pytest.mark.parametrize(
    ("send", "recv", "words"),
    [
        ([1, 1], None, r"add up to 2 \(rank 0: 1, rank 1: 1\), but x has 3 rows"),
        ([3], None, "must be 2 numbers >= 0"),
        ([4, -1], None, "must be 2 numbers >= 0"),
        ([1.5, 1.5], None, "must be integers"),
        ([1, 2], [1], "recv_counts must be 2 numbers"),
    ],
)
def test_bad_counts_are_refused(send, recv, words):
    refused(
        2,
        InvalidArgument,
        lambda b: ferrodist.all_to_all_uneven(np.ones(3), send, b, recv_counts=recv),
        match=words,
    )


def test_counts_that_contradict_each_other_are_a_size_mismatch_on_every_rank():
    def body(backend):
        sends, expects = ([0, 2], None) if backend.rank == 0 else ([2, 0], [5, 0])
        words = "rank 1 expects 5 rows from rank 0, which sends 2"
        with pytest.raises(SizeMismatch, match=words) as caught:
            ferrodist.all_to_all_uneven(np.ones(2), sends, backend, recv_counts=expects)
        assert ferrodist.allreduce(1, backend) == 2
        return str(caught.value), caught.value.sequence

    assert len(set(run_ranks(2, body))) == 1


@pytest.mark.parametrize(
    ("like", "error"),
    [(np.ones(3), SizeMismatch), (np.ones(2, int), ferrodist.CollectiveMismatch)],
    ids=["size", "dtype"],
)
def test_scatter_tells_all_ranks_when_one_expects_something_else(like, error):
    def body(backend):
        x = np.arange(6.0) if backend.rank == 0 else like if backend.rank == 2 else None
        with pytest.raises(
            error, match=r"rank 2 passed .* its part of the array of rank 0 is float64"
        ):
            ferrodist.scatter(x, backend)
        return ferrodist.scatter(
            np.arange(6.0) if backend.rank == 0 else np.empty(2), backend
        ).tolist()

    assert run_ranks(3, body) == [[0, 1], [2, 3], [4, 5]]


def test_scatter_gives_the_kind_that_was_asked_for():
    import torch

    def body(backend):
        likes = [np.arange(6, dtype=np.float32), None, torch.empty(2)]
        return ferrodist.scatter(likes[backend.rank], backend)

    first, second, third = run_ranks(3, body)
    assert type(first) is type(second) is np.ndarray
    assert isinstance(third, torch.Tensor)
    assert [a.tolist() for a in (first, second, third)] == [[0, 1], [2, 3], [4, 5]]


def test_the_root_must_pass_an_array_to_scatter():
    refused_by_root(2, UnsupportedArray, lambda b: ferrodist.scatter(None, b), match="x is None")


def test_jax_arrays_are_never_out():
    import jax.numpy as jnp

    refused(
        2,
        InvalidArgument,
        lambda b: ferrodist.allreduce(np.ones(3, np.float32), b, out=jnp.ones(3)),
    )


@pytest.mark.parametrize("call", [ferrodist.allreduce, ferrodist.broadcast, ferrodist.gather])
def test_a_lone_none_is_refused(call):
    refused(2, UnsupportedArray, lambda b: call(None, b), match="x is None")


def test_none_inside_a_tree_stays_none():
    assert (
        run_ranks(2, lambda b: ferrodist.allreduce([1, None, {"a": None}], b))
        == [[2, None, {"a": None}]] * 2
    )


def test_numbers_of_numpy_are_numbers():
    def body(backend):
        ferrodist.barrier(backend, timeout=np.float32(5))
        one = np.int64(1)
        if backend.rank == 0:
            return ferrodist.send(3, one, backend, tag=one)
        return ferrodist.recv(np.int64(0), backend, tag=one)

    assert run_ranks(np.int64(2), body) == [None, 3]


def test_counts_out_of_all_proportion_are_refused():
    (backend,) = SimulatedBackend.create_group(1)
    with pytest.raises(InvalidArgument, match="recv_counts"):
        ferrodist.all_to_all_uneven(np.ones(1), [1], backend, recv_counts=[2**70])


def test_an_int_that_is_no_member_is_no_op(start):
    def body(backend, pipe):
        with pytest.raises(InvalidArgument):
            ferrodist.allreduce(np.ones(3), backend, True)

    with start(2, body) as job:
        job.results()


def test_a_timeout_of_centuries_is_none(start):
    def body(backend, pipe):
        backend.timeout = 1e12
        return float(ferrodist.allreduce(np.ones(1), backend, timeout=1e15)[0])

    with start(2, body) as job:
        assert job.results() == [2.0, 2.0]


def test_a_timeout_beyond_all_floats_is_refused():
    refused(2, InvalidArgument, lambda b: ferrodist.barrier(b, timeout=10**400), match="for ever")
    (backend,) = SimulatedBackend.create_group(1)
    with pytest.raises(InvalidArgument, match="for ever"):
        backend.timeout = 10**400


@pytest.mark.parametrize(
    "call",
    [ferrodist.allreduce, ferrodist.reduce, ferrodist.reduce_scatter],
    ids=lambda f: f.__name__,
)
def test_no_op_is_not_a_sum(start, call):
    def body(backend, pipe):
        with pytest.raises(InvalidArgument, match="unknown reduce op None; known: sum"):
            call(np.ones(2), backend, op=None)
        return float(ferrodist.allreduce(1.0, backend))

    with start(2, body) as job:
        assert job.results() == [2.0, 2.0]


def test_integers_of_numpy_are_ranks_everywhere(start):
    def body(backend, pipe):
        zero, one = np.int32(0), np.uint8(1)
        found = [
            ferrodist.broadcast(backend.rank + 7, backend, one),
            ferrodist.broadcast_object(backend.rank, backend, np.int64(1)),
        ]
        if backend.rank == 0:
            ferrodist.send(5, one, backend)
        else:
            found.append(ferrodist.recv(zero, backend))
        group = backend.split(np.arange(2))
        return [*found, group.world_size]

    with start(2, body) as job:
        assert job.results() == [[8, 1, 2], [8, 1, 5, 2]]


@pytest.mark.parametrize("rank", [1.0, np.float64(1)])
def test_a_float_is_no_rank_and_the_text_says_int(rank):
    refused(2, InvalidRank, lambda b: ferrodist.broadcast(1, b, rank), match=r"pass int\(")
    refused(2, InvalidRank, lambda b: ferrodist.send(1, rank, b), match=r"pass int\(")
    refused(2, InvalidRank, lambda b: b.split([0, rank]), match=r"pass int\(")


# -- mistakes that are likely, and their answers ---------------------------------------------------

MISTAKES = {
    "op for backend": (
        lambda b: ferrodist.allreduce(np.ones(2), "mean"),
        r"allreduce\(x, op='mean'\)",
    ),
    "member for backend": (
        lambda b: ferrodist.reduce_scatter(1, ferrodist.ReduceOp.MAX),
        "op='max'",
    ),
    "root for backend": (lambda b: ferrodist.broadcast(np.ones(2), 0), r"broadcast\(x, root=0\)"),
    "root of an object": (lambda b: ferrodist.broadcast_object(1, np.int64(1)), "root=1"),
    "backend for dst": (lambda b: ferrodist.send(1, b, 1), r"before the backend: send\(x, dst"),
    "backend for src": (lambda b: ferrodist.recv(b, 1), r"before the backend: recv\(src"),
    "backend first": (
        lambda b: ferrodist.sendrecv(1, b, 1, 1),
        r"sendrecv\(x, dst, src, backend\)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_stands_where_the_backend_or_the_rank_belongs_is_answered(name):
    call, answer = MISTAKES[name]
    refused(2, InvalidArgument, call, match=answer)


KEYWORDS = {
    "src": (lambda b: ferrodist.broadcast(1, src=0), "here it is root="),
    "dst": (lambda b: ferrodist.reduce(1, b, dst=0), "here it is root="),
    "src of a method": (lambda b: b.scatter(None, src=1), "here it is root="),
    "src of an object": (lambda b: ferrodist.broadcast_object(1, src=0), "here it is root="),
    "group": (lambda b: ferrodist.allreduce(1, group=b), "here it is backend="),
    "group of a barrier": (lambda b: ferrodist.barrier(group=b), "here it is backend="),
    "source": (lambda b: ferrodist.recv(source=1), "src"),
    "dest": (lambda b: ferrodist.send(1, 0, b, dest=1), "here it is dst="),
    "self": (lambda b: ferrodist.allreduce(1, b, self=b), "unexpected keyword argument 'self'"),
    "pickle": (lambda b: ferrodist.allreduce(1, b, pickle=None), "unexpected keyword .* 'pickle'"),
    "nonsense": (lambda b: ferrodist.allreduce(1, b, nonsense=1), "keyword argument 'nonsense'$"),
    "src of all": (lambda b: ferrodist.allreduce(1, b, src=1), "keyword argument 'src'$"),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_keyword_of_torch_or_mpi_is_answered_with_ours(name):
    call, answer = KEYWORDS[name]
    refused(2, TypeError, call, match=answer)


@pytest.mark.parametrize(
    ("name", "op"), [("avg", "mean"), ("average", "mean"), ("AVG", "mean"), ("product", "prod")]
)
def test_what_others_call_an_op_is_that_op(start, name, op):
    def body(backend, pipe):
        x = np.arange(3.0) + backend.rank + 1
        found, wanted = (ferrodist.allreduce(x, backend, one) for one in (name, op))
        return np.array_equal(found, wanted)

    with start(2, body) as job:
        assert job.results() == [True, True]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda b: b.allreduce(np.ones(3), out=[0, 0, 0]),
            "out is a list, but x is a single array",
        ),
        (
            lambda b: b.allreduce([np.ones(2)], out=np.ones(2)),
            r"out is a single numpy.ndarray, but x holds x\[0\]; pass writable arrays in the same",
        ),
        (
            lambda b: b.allreduce({"a": np.ones(2)}, out={"b": np.ones(2)}),
            r"which holds x\['a'\]; out holds out\['b'\]$",
        ),
        (
            lambda b: b.allreduce([np.ones(2)] * 9, out=[]),
            r"x\[2\], x\[3\] and 5 more; out holds no array",
        ),
        (lambda b: b.exscan([1, 2]), "join its parts, or call it for each"),
        (lambda b: b.scatter(["a"]), "join its parts, or use scatter_object"),
        (lambda b: b.scatter_uneven(["a"], [1]), "join its parts, or use scatter_object"),
        (lambda b: b.scatter_uneven("text", [1]), "x is a str; pass an array, or use scatter_obj"),
        (lambda b: b.gather_uneven([1]), "join its parts, or use gather_object"),
        (lambda b: b.all_gather_uneven([1]), "join its parts, or use all_gather_object"),
        (lambda b: b.reduce_scatter_uneven([1], [1]), "join its parts, or call it for each"),
        (lambda b: b.all_to_all_uneven([1], [1]), "join its parts, or use broadcast_object"),
        (lambda b: b.gather_uneven("text"), "use gather_object"),
        (lambda b: b.scatter(np.ones(2), out=[0]), "^scatter: out is a list; pass a writable"),
        (lambda b: b.recv(0, out=[0, 0]), "^recv: out is a list; pass a writable array$"),
        (lambda b: b.recv(0, out=[0], like=1.0), "^recv: out is a list; pass a writable array$"),
        (lambda b: b.recv(0, out=5), "^recv: out is a Python int; pass a 0-d array"),
        (lambda b: b.recv(0, like=[0]), "use recv_object"),
        (lambda b: b.sendrecv(1, 0, 0, out=[0]), "^sendrecv: out is a list; pass a writable"),
        (lambda b: b.sendrecv(["a"], 0, 0), "use send_object and recv_object"),
        (lambda b: b.send(["a"], 0, async_op=True), "or use send_object$"),
    ],
)
def test_advice_names_what_helps(alone, call, words):
    with pytest.raises((InvalidArgument, UnsupportedArray), match=words):
        call(alone)
