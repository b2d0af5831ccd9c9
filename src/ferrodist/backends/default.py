# SPDX-License-Identifier: MIT OR Apache-2.0
"""The backend of this process: ``init`` makes it, ``backend=None`` means it.

It also sees to the end of the program: the other ranks are told whether it ended or what it raised.
"""

from __future__ import annotations

import atexit
import logging
import os
import stat
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from ferrodist.backends.base import Backend
from ferrodist.config import (
    DEFAULT,
    SECRET_NBYTES,
    Config,
    Launch,
    Timeout,
    check_timeout,
    foreign_launch,
    variable,
)
from ferrodist.errors import InvalidArgument, RendezvousError

if TYPE_CHECKING:
    from ferrodist.rendezvous import Job

logger = logging.getLogger("ferrodist")

_NAME = "shared_memory"
_EXIT_SECONDS = 2.0  # for calls that are in flight when the program ends

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _Process:
    """What this process has been initialised with."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.backend: Backend | None = None


_process = _Process()


def init(backend: str | None = None, *, timeout: Timeout = DEFAULT) -> Backend:
    """Join the job this process was started for and return its backend.

    Every rank of the job calls it; it returns when all have come, or raises RendezvousError naming
    those that have not (``Config.join_timeout``). ``ferrodist run`` and ``ferrodist.run`` say which
    job; without them it is a world of one. A second call returns the same backend. ``timeout`` is
    the deadline of calls that are given none.

    Example:
        >>> import ferrodist
        >>> backend = ferrodist.init()  # doctest: +SKIP
        >>> ferrodist.allreduce(1.0)  # doctest: +SKIP
        1.0
    """
    with _process.lock:
        if _process.backend is not None:
            return _check_same(_process.backend, backend, timeout)
        config = Config.from_environment()
        if timeout is not DEFAULT:
            config = replace(config, timeout=check_timeout(timeout))
        made = _join(backend or _NAME, config)
        _process.backend = made
        _see_to_the_end(made)
        return made


def current_backend() -> Backend | None:
    """Return what ``init`` made; None before."""
    return _process.backend


def _check_same(made: Backend, name: str | None, timeout: Timeout) -> Backend:
    """Return the backend there is, unless something else is asked for."""
    made.check_process()
    if made.is_closed:
        raise InvalidArgument(
            "the backend that init() made was closed; a process joins its job once",
            this_rank=made.rank,
        )
    if name is not None and _provider(name) is not type(made):
        raise InvalidArgument(
            f"init() was called before and made a {type(made).__name__}, not {name!r}", got=name
        )
    if timeout is not DEFAULT and check_timeout(timeout) != made.timeout:
        raise InvalidArgument(
            f"init() was called before, and timeout is {made.timeout}, not {timeout!r}; set "
            "backend.timeout to change it",
            got=timeout,
            expected=made.timeout,
        )
    return made


def _join(name: str, config: Config) -> Backend:
    provider = _provider(name)
    join: Callable[..., Backend] | None = getattr(provider, "join", None)
    if join is None:
        raise InvalidArgument(f"init() cannot make backend {name!r}: see {provider.__name__}")
    return join(_job(), config=config)


def _provider(name: str) -> type[Backend]:
    from ferrodist.backends.registry import backend_class  # takes longer than all the rest here

    return backend_class(name)


def _job() -> Job:
    """Find out which rank of which job this process is."""
    from ferrodist.rendezvous import Job

    launch = Launch.from_environment()
    if launch is not None:
        secret = _read_secret(launch.secret_fd)
        return Job(launch.job, launch.rank, launch.world_size, secret)
    if found := foreign_launch():
        raise RendezvousError(
            f"{', '.join(found)} set by another launcher, which is not supported yet: run "
            "'ferrodist run -n N script.py' instead",
            got=found,
        )
    logger.info("no launcher has started this process: a world of one")
    return Job(f"alone-{os.getpid()}", 0, 1, os.urandom(SECRET_NBYTES))


def _read_secret(file: int) -> bytes:
    """Take the job's secret out of the pipe that the launcher has put it into."""
    secret = b""
    try:
        if stat.S_ISFIFO(os.fstat(file).st_mode):
            os.set_blocking(file, False)  # whatever this is, never wait for it
            secret = os.read(file, SECRET_NBYTES + 1)
            os.close(file)
    except OSError:
        secret = b""
    if len(secret) != SECRET_NBYTES:
        raise RendezvousError(
            f"{variable('secret_fd')}={file} is not a file with the secret of the job: this "
            "process was started by a rank, not by the launcher, or has called init() before"
        )
    return secret


def _see_to_the_end(backend: Backend) -> None:
    """Tell the other ranks when this program ends, and how."""
    previous: _Hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            if not hasattr(sys, "ps1"):  # at a prompt the program goes on
                backend.fail(error)
        finally:
            previous(kind, error, trace)

    sys.excepthook = hook
    atexit.register(_end, backend)


def _end(backend: Backend) -> None:
    """Leave the group, quietly and soon: calls in flight get a moment, no more."""
    thread = threading.Thread(target=_end_quietly, args=[backend], daemon=True)
    thread.start()
    thread.join(_EXIT_SECONDS)


def _end_quietly(backend: Backend) -> None:
    try:
        backend.end()
    except Exception as error:  # noqa: BLE001 -- the error of a Work nobody asked: logged before
        logger.debug("rank %d: at the end of the program: %s", backend.rank, error)
