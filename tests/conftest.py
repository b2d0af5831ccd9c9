"""What every test needs."""

from __future__ import annotations

import functools
import gc
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from jobs import Job, Nursery
    from templates import Template

# Ranks that are threads would each start threads of their own for every core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if find_spec("hypothesis"):  # make lint does without
    from hypothesis import HealthCheck, settings

    # A machine that is busy with something else is no bug of what is tested.
    too_slow = HealthCheck.too_slow
    settings.register_profile("patient", deadline=None, suppress_health_check=[too_slow])
    settings.load_profile("patient")


def pytest_configure() -> None:
    """Let signals work in the programs that tests start, however the tests were started.

    A shell ignores SIGINT and SIGQUIT for what it puts into the background, and nohup ignores
    SIGHUP; programs inherit that.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    gc.disable()  # collecting tests makes no garbage; looking for it takes an eighth of the time


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over all libraries and tests: some tests call it often."""
    gc.collect()
    gc.freeze()
    gc.enable()


# -- what is not installed -------------------------------------------------------------------------

OPTIONAL = ("torch", "jax", "optax", "ml_dtypes", "cryptography", "nbclient", "nbformat", "mpi4py")


def skip_if_missing(error: BaseException | None) -> None:
    """Skip a test that failed for a library which need not be there, and is not."""
    while isinstance(error, BaseExceptionGroup):  # of several ranks
        error = error.exceptions[0]
    library = str(getattr(error, "name", "")).partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and library in OPTIONAL and not find_spec(library):
        pytest.skip(f"needs {library}, which is not installed", allow_module_level=True)


class TestFile(pytest.Module):
    """A file of tests, which may import what is not installed."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            skip_if_missing(error.__cause__)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    module: pytest.Module = TestFile.from_parent(parent, path=module_path)
    return module


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    try:
        return (yield)
    except BaseException as error:  # a BaseExceptionGroup of several ranks, among others
        skip_if_missing(error)
        raise


pytest_runtest_setup = pytest_runtest_call  # for fixtures


# -- jobs ------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of jobs, make test-fast has those on shared memory alone."""
    for item in items:
        fixtures = {*getattr(item, "fixturenames", ())}
        backend = getattr(getattr(item, "callspec", None), "params", {}).get("backend_name")
        starters = {"start_tcp_job", "start_hybrid_job", "start_gloo_job"}
        if fixtures & starters or backend in ("tcp", "hybrid"):
            item.add_marker(pytest.mark.slow)


TEMPLATES: dict[str, Template] = {}


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let the processes that share the tests share what forks ranks, too."""
    from templates import Template

    if not TEMPLATES:
        TEMPLATES.update({kind: Template(is_heavy=kind == "heavy") for kind in ("heavy", "light")})
    node.workerinput["templates"] = {kind: one.address for kind, one in TEMPLATES.items()}


def pytest_unconfigure() -> None:
    for template in TEMPLATES.values():
        template.close()
    TEMPLATES.clear()


@pytest.fixture(scope="session")
def nursery(request: pytest.FixtureRequest) -> Iterator[Nursery]:
    """Give the processes that fork the ranks of jobs."""
    from jobs import Nursery

    nursery = Nursery(getattr(request.config, "workerinput", {}).get("templates"))
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def start_job(nursery: Nursery) -> Callable[..., Job]:
    """Give what starts jobs on shared memory: ``start_job(world, fn, **environment)``."""
    return job_starter(nursery, "shared_memory")


@pytest.fixture(scope="session")
def start_tcp_job(nursery: Nursery) -> Callable[..., Job]:
    """Give what starts jobs on TCP: ``start_tcp_job(world, fn, **environment)``."""
    return job_starter(nursery, "tcp")


@pytest.fixture(scope="session")
def start_hybrid_job(nursery: Nursery) -> Callable[..., Job]:
    """Give what starts jobs on both: ``start_hybrid_job(hosts, fn, **environment)``."""
    return job_starter(nursery, "hybrid")


@pytest.fixture(scope="session")
def start_gloo_job(nursery: Nursery) -> Callable[..., Job]:
    """Give what starts jobs on Gloo: ``start_gloo_job(world, fn, **environment)``."""
    return job_starter(nursery, "gloo")


@pytest.fixture(scope="session")
def start_linked_job(nursery: Nursery) -> Callable[..., Job]:
    """Give what starts jobs on links of others: ``start_linked_job("sockets", world, fn, ...)``."""
    return lambda name, *args, **environment: job_starter(nursery, name)(*args, **environment)


@pytest.fixture(params=["shared_memory", "tcp", "hybrid"])
def backend_name(request: pytest.FixtureRequest) -> str:
    """Name each backend whose ranks are processes in turn."""
    return str(request.param)


@pytest.fixture
def start(nursery: Nursery, backend_name: str) -> Callable[..., Job]:
    """Give what starts jobs on each backend in turn; hybrid has half of the ranks on each host."""
    start = job_starter(nursery, backend_name)
    if backend_name != "hybrid":
        return start
    return lambda world, *args, **environment: start(two_hosts(world), *args, **environment)


@pytest.fixture
def soon(backend_name: str) -> float:
    """Seconds within which a fault is known to all; across hosts it may take a little longer."""
    return 1.0 if backend_name == "shared_memory" else 2.0


def job_starter(nursery: Nursery, backend: str) -> Callable[..., Job]:
    from jobs import Job

    return functools.partial(Job, nursery, backend)


def two_hosts(world: int) -> str:
    return "0" * ((world + 1) // 2) + "1" * (world // 2)


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """Fail if the test leaves open files or children; what earlier ones left may end meanwhile."""
    before = files_and_children()
    yield
    assert files_and_children() <= before


def files_and_children() -> set[str]:
    files = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {*children, *(f"{file} {os.readlink(file)}" for file in files if os.path.lexists(file))}
