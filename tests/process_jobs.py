"""Jobs on every backend whose ranks are processes, for tests that hold on all of them.

``start(world, fn, **environment)`` is a fixture of every file that names this one among its
pytest_plugins.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hybrid_jobs import start_hybrid_job
from jobs import Job
from tcp_jobs import start_tcp_job

__all__ = ["start", "start_hybrid_job", "start_tcp_job"]


@pytest.fixture(params=["shared_memory", "tcp", "hybrid"])
def start(request: pytest.FixtureRequest) -> Callable[..., Job]:
    """Give what starts jobs on one of the backends; hybrid has half of its ranks on each host."""
    names = {"shared_memory": "start_job", "tcp": "start_tcp_job", "hybrid": "start_hybrid_job"}
    start: Callable[..., Job] = request.getfixturevalue(names[request.param])
    if request.param != "hybrid":
        return start
    return lambda world, fn, **environment: start(
        "0" * ((world + 1) // 2) + "1" * (world // 2), fn, **environment
    )
