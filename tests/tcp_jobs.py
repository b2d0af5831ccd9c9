"""Jobs of ranks that TCP connects, for tests: as those of jobs.py, and links that can be harmed.

``start_tcp_job(world, fn, **environment)`` is a fixture of every file that names this one among its
pytest_plugins. A variable of one rank alone has that rank's number before its name:
``**{"1:FERRODIST_WALKER": "python"}``.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import jobs
from ferrodist.backends.tcp import TcpBackend
from ferrodist.rendezvous import Job as Place
from ferrodist.testing import FaultProxy, LinkFaults
from jobs import Job, Nursery

QUICK = {"FERRODIST_HEARTBEAT": "0.2", "FERRODIST_SILENCE": "1"}
SMALL_PIECES = {"FERRODIST_PIECE_NBYTES": "4096", "FERRODIST_SEGMENT_NBYTES": "16384"}


class TcpNursery(Nursery):
    """Forks ranks that join by TCP."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with other:
            command = [sys.executable, __file__, str(other.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[other.fileno()], env=environment, stdin=subprocess.DEVNULL
            )


@pytest.fixture(scope="session")
def start_tcp_job() -> Iterator[Callable[..., Job]]:
    """Give what starts jobs: ``start_tcp_job(world, fn, **environment)``."""
    nursery = TcpNursery()
    yield functools.partial(Job, nursery)
    nursery.close()


@contextmanager
def proxied_rank(rank: int, faults: LinkFaults | None = None) -> Iterator[Any]:
    """Give a proxy, and the environment of a job whose ranks reach this one through it alone.

    Those above it connect to it, so in a world of three only one link leads through the proxy of
    rank 1, and two through that of rank 0.
    """
    with socket.socket() as place:  # holds the port: others may listen at it who ask for it by name
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 0))
        address = place.getsockname()
        with FaultProxy(address, faults=faults) as proxy:
            yield (
                proxy,
                {
                    f"{rank}:FERRODIST_PORTS": str(address[1]),
                    f"{rank}:FERRODIST_ADVERTISE": "{}:{}".format(*proxy.address),
                },
            )


# -- in the nursery, and in the ranks --------------------------------------------------------------


class JoinsByTcp:
    """Stands in for the backend that the ranks of jobs.py join."""

    @staticmethod
    def join(place: Place) -> TcpBackend:
        """Join as the environment says, in which this rank may have variables of its own."""
        for name, value in list(os.environ.items()):
            rank, colon, own_name = name.partition(":")
            if colon and rank == str(place.rank):
                os.environ[own_name] = value
        return TcpBackend.join(place)


if __name__ == "__main__":
    import tcp_jobs  # so that what is pickled here is known there by the same name

    jobs.SharedMemoryBackend = tcp_jobs.JoinsByTcp
    jobs.serve(socket.socket(fileno=int(sys.argv[1])))
