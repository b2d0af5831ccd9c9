# SPDX-License-Identifier: MIT OR Apache-2.0
"""MPI through mpi4py's calls on buffers, as its manual recommends for speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpi4py
import numpy as np
from mpi4py import MPI

Array = np.ndarray[Any, Any]
Call = Callable[[], object]


class Engine:
    """The world that mpiexec made."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD
        self.rank = self.comm.Get_rank()
        self.world = self.comm.Get_size()
        self.versions = {"library": _library(), "mpi4py": mpi4py.__version__}

    def calls(self, x: Array, out: Array) -> dict[str, Call]:
        """Return the calls on these arrays."""
        comm = self.comm
        peer = 1 - self.rank
        is_root = self.rank == 0
        at_root = out if is_root else None
        from_root = x if is_root else None
        same = x if is_root else out  # a broadcast works in place
        return {
            "allreduce": lambda: comm.Allreduce(x, out),
            "broadcast": lambda: comm.Bcast(same),
            "reduce": lambda: comm.Reduce(x, at_root),
            "all_gather": lambda: comm.Allgather(x, out),
            "gather": lambda: comm.Gather(x, at_root),
            "scatter": lambda: comm.Scatter(from_root, out),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(x, out),
            "all_to_all": lambda: comm.Alltoall(x, out),
            "scan": lambda: comm.Scan(x, out),
            "barrier": comm.Barrier,
            "send_recv": self._ping_pong(x, out),
            "sendrecv": lambda: comm.Sendrecv(x, peer, recvbuf=out, source=peer),
            "window": self._window(x, out),
            "posted": self._posted(x, out),
        }

    def _ping_pong(self, x: Array, out: Array) -> Call:
        comm = self.comm

        def ping() -> None:
            comm.Send(x, 1)
            comm.Recv(out, 1)

        def pong() -> None:
            comm.Recv(out, 0)
            comm.Send(x, 0)

        return ping if self.rank == 0 else pong

    def _window(self, x: Array, out: Array) -> Call:
        """Return as many sends in flight as ``x`` fits into ``out``, and one message back."""
        comm = self.comm

        def give() -> None:
            MPI.Request.Waitall([comm.Isend(x, 1) for _ in range(len(out) // len(x))])
            comm.Recv(out[: len(x)], 1)

        def get() -> None:
            MPI.Request.Waitall([comm.Irecv(row, 0) for row in out.reshape(-1, len(x))])
            comm.Send(x, 0)

        return give if self.rank == 0 else get

    def _posted(self, x: Array, out: Array) -> Call:
        """Return as many sends as ``x`` fits into ``out``, once all receives are posted."""
        comm = self.comm

        def give() -> None:
            comm.Recv(out[: len(x)], 1)
            for _ in range(len(out) // len(x)):
                comm.Send(x, 1)

        def get() -> None:
            receives = [comm.Irecv(row, 0) for row in out.reshape(-1, len(x))]
            comm.Send(x, 0)
            MPI.Request.Waitall(receives)

        return give if self.rank == 0 else get

    def start_allreduce(self, x: Array, out: Array) -> Call:
        """Begin an allreduce and return what waits for its end."""
        wait: Call = self.comm.Iallreduce(x, out).Wait
        return wait

    def close(self) -> None:
        """Do nothing: mpi4py leaves at exit."""


def _library() -> str:
    """Return the name and version out of the text, lines long, that MPI has about itself."""
    first_line: str = MPI.Get_library_version().strip("\0").splitlines()[0]
    return " ".join(first_line.partition(",")[0].replace("Version:", "").split())
