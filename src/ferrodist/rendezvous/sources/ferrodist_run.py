# SPDX-License-Identifier: MIT OR Apache-2.0
"""The source ``ferrodist run``, and ``ferrodist.run``: a place, a secret, and a file of ends."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import termios

from ferrodist.config import variable
from ferrodist.rendezvous.ends import Ends
from ferrodist.rendezvous.job import SECRET_NBYTES
from ferrodist.rendezvous.launch import Launch, try_endpoint
from ferrodist.rendezvous.sources.nesting import has_inner_job
from ferrodist.rendezvous.sources.place import Environment, Place, Stale
from ferrodist.rendezvous.sources.source import Source

SOURCE = Source(
    name="ferrodist run",
    rank=variable("rank"),
    world_size=variable("world_size"),
    job=f"launcher ({variable('job')})",
    start="start all ranks with 'ferrodist run -n {size} script.py'",
)


def read(environ: Environment) -> Place | Stale | None:
    """Read the variables, and take the secret out of the pipe that they name."""
    launch = Launch.from_environment(environ)
    if launch is None:
        return None
    secret = None if has_inner_job(environ) else _try_take_secret(launch)
    if secret is None:
        return Stale(SOURCE, _why_stale(launch))
    return Place(
        SOURCE,
        launch.job,
        launch.rank,
        launch.world_size,
        several_hosts=f"{variable('endpoint')}={launch.endpoint}" if launch.endpoint else None,
        endpoint=try_endpoint(launch.endpoint),
        local_rank=launch.local_rank,
        local_world_size=launch.local_world_size,
        secret=secret,
        ends=Ends(launch.ends_fd),
    )


def _try_take_secret(launch: Launch) -> bytes | None:
    """Read and close the pipe with the secret; None if the launcher's files are not here.

    A number may be that of another file by now, so it is looked at before anything is read. What
    this process starts inherits neither file.
    """
    file = launch.secret_fd
    try:
        if not stat.S_ISFIFO(os.fstat(file).st_mode) or _num_waiting(file) != SECRET_NBYTES:
            return None
        os.set_inheritable(launch.ends_fd, False)
        secret = os.read(file, SECRET_NBYTES)
        os.close(file)
    except OSError:
        return None
    return secret


def _num_waiting(pipe: int) -> int:
    """Count the bytes that can be read from a pipe."""
    count = struct.Struct("i")
    return int(count.unpack(fcntl.ioctl(pipe, termios.FIONREAD, bytes(count.size)))[0])


def _why_stale(launch: Launch) -> str:
    return (
        f"{variable('rank')}={launch.rank} of job {launch.job!r} belongs to another process: "
        f"{variable('secret_fd')}={launch.secret_fd} is not a pipe with the secret of the job. "
        "Either this process was started by a rank and not by the launcher: start it with "
        "'ferrodist run -n 1 script.py' if it is to be a world of its own; or a process that this "
        "one has started called init() first: only one of them can be the rank; or init() was "
        "tried before and failed: the first error counts"
    )
