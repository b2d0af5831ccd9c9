# SPDX-License-Identifier: MIT OR Apache-2.0
"""Write a backend: ranks on one host, connected by Unix sockets that have names in a folder.

    python examples/own_backend.py

starts three ranks with it. Installed with the entry point

    [project.entry-points."ferrodist.backends"]
    sockets = "own_backend:SocketsBackend"

it is available as ``ferrodist.init(backend="sockets")`` under every launcher. docs/own_backend.md
walks through this file.
"""

import contextlib
import multiprocessing
import os
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ferrodist import Config
from ferrodist.backends.linked import LinkedBackend
from ferrodist.rendezvous import Job

RANK = struct.Struct("!I")


class SocketsBackend(LinkedBackend):
    """Ranks of one user on one host; each connects to those below it."""

    @classmethod
    def connect(cls, job: Job, config: Config) -> Sequence[socket.socket | None]:
        """Return a connected socket for each other rank."""
        links: list[socket.socket | None] = [None] * job.world_size
        folder = Path(tempfile.gettempdir(), f"sockets-{os.getuid()}-{job.name}")
        folder.mkdir(mode=0o700, exist_ok=True)
        end = time.monotonic() + config.join_timeout
        with socket.socket(socket.AF_UNIX) as listener:
            own = folder / str(job.rank)
            listener.bind(str(own))
            listener.listen(job.world_size)
            for rank in range(job.rank):
                link = links[rank] = connect_to(folder / str(rank), end)
                link.sendall(RANK.pack(job.rank))
            for _ in range(job.rank + 1, job.world_size):
                listener.settimeout(max(end - time.monotonic(), 0.001))
                link, _ = listener.accept()
                (rank,) = RANK.unpack(link.recv(RANK.size, socket.MSG_WAITALL))
                links[rank] = link
            own.unlink()
        with contextlib.suppress(OSError):  # the last one to leave removes it
            folder.rmdir()
        return links


def connect_to(path: Path, end: float) -> socket.socket:
    """Connect to a rank, as soon as it listens."""
    while True:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            link.close()
            if time.monotonic() > end:
                raise
            time.sleep(0.005)
        else:
            return link


def show(rank: int, name: str) -> None:
    """Run one rank of three, without a launcher."""
    job = Job(name, rank, 3, b"known to all three".ljust(32))
    with SocketsBackend.join(job, config=Config()) as backend:
        total = backend.allreduce(np.full(2, rank))
        everybody = backend.all_gather_object(f"rank {rank}")
        if rank == 0:
            print(f"sum {total}, from {', '.join(everybody)}")


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    name = f"own-backend-{os.getpid()}"
    ranks = [context.Process(target=show, args=(rank, name)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
