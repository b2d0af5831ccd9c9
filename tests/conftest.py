"""What every test needs."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from jobs import Job

# Ranks that are threads would each start threads of their own for every core.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    """Let Ctrl-C work in the programs that tests start, however the tests were started.

    A shell ignores SIGINT for what it puts into the background, and programs inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def start_job() -> Iterator[Callable[..., Job]]:
    """Give what starts jobs of processes: ``start_job(world, fn, **environment)``."""
    from jobs import Job, Nursery

    nursery = Nursery()
    yield functools.partial(Job, nursery)
    nursery.close()
