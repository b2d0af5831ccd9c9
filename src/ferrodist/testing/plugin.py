# SPDX-License-Identifier: MIT OR Apache-2.0
"""The pytest plugin: a ``world`` fixture, so that a test of distributed code is an ordinary test.

@pytest.mark.world(2, 3)            # world sizes; without it --worlds, 1,2,3 by default
def test_sum(world):
    assert world.run(lambda b: ferrodist.allreduce(1, b)) == [world.size] * world.size
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """A world of ranks that are threads; a new one for every ``run``."""

    size: int

    def run(self, fn: Callable[[Any], T], **options: Any) -> list[T]:
        """Run ``fn(backend)`` on every rank; options as of ``ferrodist.testing.run_ranks``."""
        from ferrodist.testing.ranks import run_ranks

        try:
            return run_ranks(self.size, fn, **options)
        except BaseExceptionGroup as group:
            raise group.with_traceback(None)  # noqa: B904 -- the same, without a frame of ours


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --worlds."""
    group = parser.getgroup("ferrodist")
    group.addoption("--worlds", default="1,2,3", help="world sizes of the 'world' fixture (1,2,3)")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "world(*sizes): world sizes of the 'world' fixture")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Let pytest hide our frames, as it does those of modules with a ``__tracebackhide__``."""
    if call.excinfo is None:
        return
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "ferrodist":
            vars(module).setdefault("__tracebackhide__", _is_hidden)


def _is_hidden(about: pytest.ExceptionInfo[BaseException]) -> bool:
    """Hide our frames if the error explains itself, unless the user wants to see them."""
    from ferrodist import tracebacks

    return tracebacks.is_explained(about.value) and not tracebacks.are_full()


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """Give a world of ranks; the test runs once for every size asked for."""
    return World(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for our ``world`` once for every size."""
    if not _asks_for_our_world(metafunc):
        return
    marker = metafunc.definition.get_closest_marker("world")
    sizes = marker.args if marker else metafunc.config.getoption("worlds").split(",")
    try:
        numbers = [int(size) for size in sizes]
    except (TypeError, ValueError):
        numbers = []
    if not numbers or min(numbers) < 1:
        raise pytest.UsageError(f"world sizes must be numbers >= 1, as world(2, 3), got {sizes!r}")
    metafunc.parametrize("world", numbers, indirect=True, ids=lambda size: f"world{size}")


def _asks_for_our_world(metafunc: pytest.Metafunc) -> bool:
    """Leave alone tests that parametrize a ``world`` of their own or define such a fixture."""
    for marker in metafunc.definition.iter_markers("parametrize"):
        names = marker.args[0] if marker.args else marker.kwargs["argnames"]
        if "world" in (names.replace(",", " ").split() if isinstance(names, str) else names):
            return False
    fixtures = metafunc._arg2fixturedefs.get("world", ())
    return bool(fixtures) and fixtures[-1].func.__module__ == __name__
