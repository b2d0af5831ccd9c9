"""The public list, the signatures and the docstrings."""

import doctest
import inspect
import pkgutil
import re
from importlib import import_module

import pytest

import ferrodist

FUNCTIONS = [name for name in ferrodist.__all__ if inspect.isfunction(getattr(ferrodist, name))]


def test_public_names_are_exactly_the_list():
    rooms = {module.name for module in pkgutil.iter_modules(ferrodist.__path__)}
    visible = {name for name in vars(ferrodist) if not name.startswith("_")} - rooms
    visible -= {"annotations", "TYPE_CHECKING", "Any", "sys"}
    assert visible | {"run", *ferrodist._LAZY} == set(ferrodist.__all__)
    assert dir(ferrodist) == sorted(ferrodist.__all__)


def test_every_public_name_can_be_had():
    for name in ferrodist.__all__:
        assert getattr(ferrodist, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ferrodist.nonsense


@pytest.mark.parametrize("name", ferrodist.__all__)
def test_every_public_thing_says_what_it_is(name):
    thing = getattr(ferrodist, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        first = (inspect.getdoc(thing) or "").splitlines()[0]
        assert re.match(r"[A-Z].*[.;:]$|.*\.$", first), first


OPTIONS = ["out", "timeout", "async_op", "algorithm", "reproducible"]
SIGNATURES = {
    "init": ("backend", ["timeout", "pickle"]),
    "run": ("fn ranks", ["args", "timeout", "grace"]),
    "rank": ("", []),
    "world_size": ("", []),
    "local_rank": ("", []),
    "is_initialized": ("", []),
    "average_gradients": ("tree backend", ["weight"]),
    "shard_indices": (
        "num_samples backend",
        ["global_batch_size", "rank_batch_size", "shuffle", "seed", "remainder", "drop_last"],
    ),
    "convert_sync_batchnorm": ("module backend", []),
    "allreduce": ("x backend op", OPTIONS),
    "allreduce_": ("x backend op", OPTIONS[1:]),
    "broadcast": ("x backend root", OPTIONS),
    "broadcast_": ("x backend root", OPTIONS[1:]),
    "reduce": ("x backend root op", OPTIONS),
    "all_gather": ("x backend", ["as_list", *OPTIONS]),
    "all_gather_uneven": ("x backend", ["as_list", "with_counts", *OPTIONS]),
    "gather": ("x backend root", OPTIONS),
    "gather_uneven": ("x backend root", ["as_list", "with_counts", *OPTIONS]),
    "scatter": ("x backend root", OPTIONS),
    "scatter_uneven": ("x counts backend root", OPTIONS),
    "reduce_scatter": ("x backend op", OPTIONS),
    "reduce_scatter_uneven": ("x counts backend op", OPTIONS),
    "scan": ("x backend op", OPTIONS),
    "exscan": ("x backend op", OPTIONS),
    "all_to_all": ("x backend", OPTIONS),
    "all_to_all_uneven": ("x send_counts backend", ["recv_counts", "as_list", *OPTIONS]),
    "barrier": ("backend", ["timeout", "async_op"]),
    "send": ("x dst backend", ["tag", "timeout", "async_op"]),
    "recv": ("src backend", ["out", "like", "tag", "with_status", "timeout", "async_op"]),
    "sendrecv": (
        "x dst src backend",
        ["out", "like", "tag", "recv_tag", "timeout", "async_op"],
    ),
    "probe": ("src backend", ["tag", "timeout"]),
    "try_probe": ("src backend", ["tag"]),
    "send_object": ("obj dst backend", ["tag", "pickle", "timeout", "async_op"]),
    "recv_object": ("src backend", ["tag", "pickle", "with_status", "timeout", "async_op"]),
    "wait_all": ("works timeout", []),
    "wait_any": ("works timeout", []),
    "broadcast_object": ("value backend root", ["pickle", "timeout", "async_op"]),
    "all_gather_object": ("value backend", ["pickle", "timeout", "async_op"]),
    "gather_object": ("value backend root", ["pickle", "timeout", "async_op"]),
    "register_type": ("kind", []),
    "scatter_object": ("values backend root", ["pickle", "timeout", "async_op"]),
}


def test_every_public_function_has_a_signature_here():
    assert SIGNATURES.keys() == set(FUNCTIONS)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_as_promised(name):
    positional, keywords = SIGNATURES[name]
    parameters = inspect.signature(getattr(ferrodist, name)).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positional.split()
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == keywords
    assert {p.name: p.default for p in parameters}.get("backend") is None


def test_every_error_is_a_distributed_error_and_a_builtin_too():
    builtin = {
        "InvalidArgument": ValueError,
        "InvalidRank": ValueError,
        "UnsupportedArray": TypeError,
        "UnsupportedOp": TypeError,
        "SizeMismatch": ValueError,
        "CollectiveTimeout": TimeoutError,
        "RankLost": ConnectionError,
        "RendezvousError": ConnectionError,
        "AuthenticationError": ConnectionError,
        "ProtocolError": ConnectionError,
        "BackendUnavailable": ImportError,
        "OutOfMemory": MemoryError,
    }
    for name, base in builtin.items():
        error = getattr(ferrodist, name)
        assert issubclass(error, base)
        assert issubclass(error, ferrodist.DistributedError)
        assert error("text", rank=3).rank == 3


MODULES = [
    m.name
    for m in pkgutil.walk_packages(ferrodist.__path__, "ferrodist.")
    if m.name not in ("ferrodist._native", "ferrodist.__main__", "ferrodist.arrays.cupy_arrays")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    failed, _ = doctest.testmod(import_module(name))
    assert not failed


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_has_an_example(name):
    assert ">>>" in (inspect.getdoc(getattr(ferrodist, name)) or "")
