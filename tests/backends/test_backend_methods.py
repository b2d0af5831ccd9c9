"""What users find on a backend: every call as a method, facts they cannot change, nothing else."""

import ast
import inspect
from pathlib import Path

import numpy as np
import pytest

import ferrodist
from ferrodist import SimulatedBackend, collectives
from ferrodist.backends import call_methods
from ferrodist.testing import run_ranks

CALLS = collectives.__all__
SHOWN = {
    *CALLS,
    *("rank", "world_size", "local_rank", "local_world_size", "members"),
    *("timeout", "reproducible", "is_closed"),
    *("empty", "zeros", "like", "shared"),
    *("split", "split_by", "dup", "grid", "abort", "close", "statistics"),
}


@pytest.fixture
def backend():
    with SimulatedBackend.create_group(1)[0] as made:
        yield made


def test_dir_shows_what_users_call_and_nothing_else(backend):
    assert set(dir(backend)) == SHOWN
    assert all(hasattr(backend, name) for name in SHOWN)


def test_backends_that_are_processes_show_the_same():
    def names(backend):
        return dir(backend)

    assert ferrodist.run(names, ranks=1, timeout=60) == [sorted(SHOWN)]


def test_members_are_the_world_ranks_of_a_group(start):
    def body(backend, pipe):
        assert backend.members == (0, 1, 2)
        group = backend.split([2, 0, 1])
        return group.members, group.split([1, 0]).members if group.rank < 2 else None

    with start(3, body) as job:
        assert job.results() == [((2, 0, 1), (0, 2)), ((2, 0, 1), None), ((2, 0, 1), (0, 2))]


@pytest.mark.parametrize(
    "name", ["rank", "world_size", "local_rank", "local_world_size", "members"]
)
def test_facts_cannot_be_changed(backend, name):
    with pytest.raises(AttributeError):
        setattr(backend, name, 1)


@pytest.mark.parametrize("name", CALLS)
def test_method_has_signature_and_docstring_of_the_function(backend, name):
    function, method = getattr(ferrodist, name), getattr(backend, name)
    expected = [p for p in inspect.signature(function).parameters.values() if p.name != "backend"]
    assert list(inspect.signature(method).parameters.values()) == expected
    assert inspect.getdoc(method) == inspect.getdoc(function)
    assert method.__name__ == name


def test_type_checkers_see_the_same_parameters():
    tree = ast.parse(Path(call_methods.__file__).read_text())
    seen = {
        node.name: {a.arg for a in (*node.args.args, *node.args.kwonlyargs)} | options_of(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    assert seen == {
        name: set(inspect.signature(getattr(ferrodist.Backend, name)).parameters) for name in CALLS
    }


def options_of(node):
    """Name what ``**options: Unpack[...]`` stands for."""
    if node.args.kwarg is None:
        return set()
    options = getattr(call_methods, ast.unparse(node.args.kwarg.annotation)[len("Unpack[") : -1])
    return options.__optional_keys__


def test_methods_do_what_the_functions_do():
    def calls(backend):
        rank, last = backend.rank, backend.world_size - 1
        x = np.arange(6) + rank
        found = [
            backend.allreduce(x),
            backend.allreduce(x, "max"),
            backend.allreduce(op="max", x=x),
            backend.allreduce(x, async_op=True).wait(),
            backend.broadcast(x, last),
            backend.reduce(x, root=0, op="min"),
            backend.all_to_all_uneven(np.arange(2) + rank, [rank, 2 - rank])[0],
            backend.sendrecv(rank, 1 - rank, 1 - rank, tag=3),
            backend.scatter_object(["a", "b"] if rank == 0 else None),
        ]
        backend.barrier(timeout=20)
        return [value if value is None else np.asarray(value).tolist() for value in found]

    first = [0, 1, 2, 3, 4, 5]
    second = [1, 2, 3, 4, 5, 6]
    total = [1, 3, 5, 7, 9, 11]
    assert run_ranks(2, calls) == [
        [total, second, second, total, second, first, [1], 1, "a"],
        [total, second, second, total, second, None, [0, 1, 2], 0, "b"],
    ]


def test_errors_name_the_function_and_the_line_of_the_program(backend):
    with pytest.raises(TypeError, match=r"allreduce\(\) missing 1 required .* 'x'"):
        backend.allreduce()
    with pytest.raises(TypeError, match="backend"):
        backend.allreduce(1, backend=backend)

    def differ(backend):
        call = backend.barrier if backend.rank else lambda: backend.allreduce(1)
        with pytest.raises(ferrodist.CollectiveMismatch, match=r"test_backend_methods\.py:"):
            call()

    run_ranks(2, differ)


def test_method_of_a_group_talks_to_the_group(backend):
    assert backend.split([0]).allreduce(5) == 5
