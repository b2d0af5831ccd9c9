"""The public list, the signatures and the docstrings."""

import ast
import doctest
import inspect
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import ferrodist
import ferrodist.collectives

FUNCTIONS = [name for name in ferrodist.__all__ if inspect.isfunction(getattr(ferrodist, name))]


def test_public_names_are_exactly_the_list():
    packages = {module.name for module in pkgutil.iter_modules(ferrodist.__path__)}
    visible = {name for name in vars(ferrodist) if not name.startswith("_")} - packages
    visible -= {"annotations", "TYPE_CHECKING", "Any", "sys"}
    # Can be named everywhere, but "import *" must not import MPI and torch.
    engines = {"MpiBackend", "TorchDistributedBackend"}
    assert (visible | ferrodist._MODULE_OF.keys()) - engines == set(ferrodist.__all__)
    assert dir(ferrodist) == sorted(ferrodist.__all__)


def test_type_checkers_see_each_name_where_it_comes_from():
    tree = ast.parse(Path(ferrodist.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    seen = {name.name: line.module for line in block.body for name in line.names}
    assert seen == {name: f"ferrodist.{module}" for name, module in ferrodist._MODULE_OF.items()}


HEAVY = {"numpy", "torch", "jax", "msgpack", "cloudpickle", "click", "rich", "ssl", "asyncio"}


def modules_after(program: str) -> set[str]:
    """Name the modules that a new interpreter has imported for a program, beyond its own."""
    text = f"import sys\nbefore = set(sys.modules)\n{program}\nprint(*set(sys.modules) - before)"
    command = [sys.executable, "-c", text]
    return set(subprocess.check_output(command, text=True, timeout=60).split())


def test_the_package_is_imported_without_its_parts():
    modules = modules_after("import ferrodist, ferrodist.errors; ferrodist.RankLost")
    own = {name for name in modules if name.startswith("ferrodist")}
    assert own == {"ferrodist", "ferrodist.errors", "ferrodist.version"}
    assert not modules & HEAVY


def test_the_command_that_starts_ranks_needs_no_numpy():
    modules = modules_after("import ferrodist.launch.run, ferrodist.launch.supervisor")
    assert modules & HEAVY == {"click"}
    assert "ferrodist._native" not in modules


def test_a_program_that_reduces_arrays_imports_no_more_than_that():
    """There were 84 beside NumPy's when the types of the codec came with every call."""
    program = "import ferrodist; ferrodist.init, ferrodist.allreduce, ferrodist.RankLost"
    modules = modules_after(f"import numpy; before = set(sys.modules); {program}")
    assert not modules & HEAVY
    assert not modules & {
        "ferrodist.collectives.codec",
        "ferrodist.backends.tcp",
        "decimal",
        "uuid",
    }
    assert len(modules) < 75, sorted(modules)


EACH_FIRST = """
import importlib.util, os
for library in ("numpy", "torch"):  # once, not for each name
    if importlib.util.find_spec(library):
        __import__(library)
import ferrodist
for names in ferrodist._NAMES_OF.values():
    name = names.split()[0]
    if os.fork() == 0:
        try:
            found = getattr(ferrodist, name)
            # A plain global from now on, but for engines whose library is not installed.
            assert found is vars(ferrodist).get(name) or name in ferrodist._ENGINES
        except BaseException as error:  # the fork must end here, whatever it is
            print(f"{name}: {error!r}", flush=True)
            os._exit(1)
        os._exit(0)
failed = [names for names in ferrodist._NAMES_OF.values() if os.wait()[1]]
assert not failed
"""


def test_a_backend_has_its_calls_though_nobody_asked_for_the_functions():
    modules_after("import ferrodist; ferrodist.Backend.allreduce")
    modules_after(
        "from ferrodist.testing.ranks import run_ranks; run_ranks(1, lambda b: b.allreduce(1))"
    )
    modules_after(
        "from ferrodist.backends.shared_memory import SharedMemoryBackend as Backend\n"
        "from ferrodist.rendezvous import Job\n"
        "with Backend.join(Job('alone', 0, 1, bytes(32))) as backend: backend.allreduce(1)"
    )


@pytest.mark.slow  # imports torch once more
def test_any_name_may_be_the_first():
    """No import goes in a circle, whichever part is imported first."""
    command = [sys.executable, "-c", EACH_FIRST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


WITHOUT_LIBRARIES = """
import sys
sys.modules["mpi4py"] = sys.modules["torch"] = None  # importing them raises ModuleNotFoundError
import ferrodist
from ferrodist import MpiBackend, TorchDistributedBackend
assert MpiBackend is ferrodist.MpiBackend is not TorchDistributedBackend
assert not isinstance(1, (MpiBackend, TorchDistributedBackend))
assert not hasattr(MpiBackend, "from_process_group")
for use in (
    MpiBackend,
    lambda: MpiBackend.from_comm(1),
    lambda: MpiBackend.join(None),
    lambda: TorchDistributedBackend.from_process_group(1, config=None),
):
    try:
        use()
    except ferrodist.BackendUnavailable as error:
        print(error)
"""


def test_engines_can_be_named_without_their_library_and_their_use_names_the_extra():
    command = [sys.executable, "-c", WITHOUT_LIBRARIES]
    lines = subprocess.check_output(command, text=True, timeout=60).splitlines()
    mpi = "backend 'mpi' needs mpi4py: pip install 'ferrodist[mpi]'"
    assert lines == [mpi] * 3 + ["backend 'gloo' needs torch: pip install 'ferrodist[torch]'"]


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
    "run": ("fn ranks", ["args", "timeout", "grace", "cluster", "resources", "placement"]),
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
        ["out", "like", "tag", "recv_tag", "with_status", "timeout", "async_op"],
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


@pytest.mark.parametrize("name", ["recv", "sendrecv", "all_gather", "gather_uneven"])
def test_docstring_names_the_options_that_only_some_calls_have(name):
    doc, parameters = (
        inspect.getdoc(getattr(ferrodist, name)) or "",
        inspect.signature(getattr(ferrodist, name)).parameters,
    )
    special = {"like", "as_list", "with_counts", "with_status"} & set(parameters)
    assert special
    assert all(f"``{option}" in doc for option in special)


@pytest.mark.parametrize("name", ferrodist.collectives.__all__)
def test_docstring_says_what_the_options_mean(name):
    function = getattr(ferrodist, name)
    doc, parameters = inspect.getdoc(function), inspect.signature(function).parameters
    for option in ("out", "timeout", "async_op", "algorithm", "reproducible", "pickle", "tag"):
        assert (f"\n    {option}: " in doc) == (option in parameters)
    if "op" in parameters:
        assert all(repr(op.name.lower()) in doc for op in ferrodist.ReduceOp)
