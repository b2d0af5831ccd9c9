# SPDX-License-Identifier: MIT OR Apache-2.0
"""MPI through mpi4py's calls on buffers, as its manual recommends for speed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mpi4py
import numpy as np
from mpi4py import MPI

if TYPE_CHECKING or __package__:
    from benchmarks.compare.worker import halo
else:
    import halo  # which stands beside the script that is run

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
            "halo Sendrecv": lambda: self._halo_by_sendrecv(),
            "halo Neighbor_alltoall": lambda: self._halo_by_neighbor_alltoall(),
        }

    @functools.cached_property
    def _grid(self) -> Any:
        return self.comm.Create_cart(halo.grid_shape(self.world), periods=False, reorder=False)

    @functools.cached_property
    def _halo_by_sendrecv(self) -> Call:
        """One turn of the loop, where each direction is a Sendrecv; columns go through buffers."""
        grid = self._grid
        (up, down), (left, right) = grid.Shift(0, 1), grid.Shift(1, 1)
        given, got = np.empty(halo.LENGTH), np.empty(halo.LENGTH)

        def send_column(block: Array, column: int, to: int, into: int, source: int) -> None:
            given[:] = block[1:-1, column]
            grid.Sendrecv(given, to, recvbuf=got, source=source)
            if source != MPI.PROC_NULL:
                block[1:-1, into] = got

        def exchange(block: Array) -> None:
            grid.Sendrecv(block[1, 1:-1], up, recvbuf=block[-1, 1:-1], source=down)
            grid.Sendrecv(block[-2, 1:-1], down, recvbuf=block[0, 1:-1], source=up)
            send_column(block, 1, left, -1, right)
            send_column(block, -2, right, 0, left)

        return halo.make_loop(self.rank, self.world, exchange)

    @functools.cached_property
    def _halo_by_neighbor_alltoall(self) -> Call:
        """One turn of the loop, where the exchange is one call on one buffer for all edges."""
        grid = self._grid
        given, got = np.zeros((4, halo.LENGTH)), np.zeros((4, halo.LENGTH))
        peers = [rank for axis in (0, 1) for rank in grid.Shift(axis, 1)]

        def exchange(block: Array) -> None:
            for row, edge in zip(given, halo.edges_of(block), strict=True):
                row[:] = edge
            grid.Neighbor_alltoall(given, got)
            for peer, row, into in zip(peers, got, halo.halos_of(block), strict=True):
                if peer != MPI.PROC_NULL:
                    into[:] = row

        return halo.make_loop(self.rank, self.world, exchange)

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
