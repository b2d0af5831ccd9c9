"""Jobs whose ranks take themselves for ranks of several hosts, for tests: as those of jobs.py.

``start_hybrid_job("0011", fn, **environment)`` is a fixture of every file that names this one among
its pytest_plugins: the letters say which host a rank pretends to be on, here two and two.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

import pytest

import jobs
from ferrodist.backends.hybrid import HybridBackend
from ferrodist.rendezvous import Job as Place
from jobs import Job, Nursery

QUICK = {"FERRODIST_HEARTBEAT": "0.2", "FERRODIST_SILENCE": "1"}
SMALL_PIECES = {"FERRODIST_PIECE_NBYTES": "4096", "FERRODIST_SEGMENT_NBYTES": "16384"}
_HOSTS = "TEST_HOSTS"  # which host each rank is on, for the ranks


class HybridNursery(Nursery):
    """Forks ranks that join by shared memory and TCP."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with other:
            command = [sys.executable, __file__, str(other.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[other.fileno()], env=environment, stdin=subprocess.DEVNULL
            )


def start(nursery: Nursery, hosts: str, fn: Callable[..., Any], **environment: str) -> Job:
    """Start a job of as many ranks as there are letters; equal letters are one host."""
    return Job(nursery, len(hosts), fn, **{_HOSTS: hosts}, **environment)


@pytest.fixture(scope="session")
def start_hybrid_job() -> Iterator[Callable[..., Job]]:
    """Give what starts jobs: ``start_hybrid_job(hosts, fn, **environment)``."""
    nursery = HybridNursery()
    yield functools.partial(start, nursery)
    nursery.close()


# -- in the nursery, and in the ranks --------------------------------------------------------------


class JoinsByBoth:
    """Stands in for the backend that the ranks of jobs.py join."""

    @staticmethod
    def join(place: Place) -> HybridBackend:
        """Join as a rank of the host that this one is to pretend."""
        os.environ["FERRODIST_HOST_ID"] = f"pretended-{os.environ[_HOSTS][place.rank]}"
        return HybridBackend.join(place)


if __name__ == "__main__":
    import hybrid_jobs  # so that what is pickled here is known there by the same name

    for library in ("torch", "jax"):  # what takes seconds is imported once, not by every rank
        with suppress(ImportError):
            import_module(library)

    jobs.SharedMemoryBackend = hybrid_jobs.JoinsByBoth
    jobs.serve(socket.socket(fileno=int(sys.argv[1])))
