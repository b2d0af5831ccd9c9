# SPDX-License-Identifier: MIT OR Apache-2.0
"""The backend of this process: ``init`` makes it, ``backend=None`` means it."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

from ferrodist.backends.base import Backend
from ferrodist.backends.program_end import ProgramEnd
from ferrodist.config import (
    AUTO,
    DEFAULT,
    Config,
    Timeout,
    check_timeout,
    environment,
    variable,
)
from ferrodist.errors import InvalidArgument


class _Process:
    """What this process has been initialised with."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.backend: Backend | None = None


_process = _Process()


def init(backend: str | None = None, *, timeout: Timeout = DEFAULT) -> Backend:
    """Join the job this process was started for and return its backend.

    Every rank of the job calls it; it returns when all have come, or raises RendezvousError naming
    those that have not (``Config.join_timeout``). Which job, and which rank of it, is said by the
    launcher: ``ferrodist run``, torchrun, mpiexec, RANK and WORLD_SIZE set by hand, or srun, the
    innermost of them; without any it is a world of one. The log says who it was.

    ``backend`` is a name, ``Config.backend`` if there is none; by that it is shared memory on one
    host, and on several also TCP between them (``hybrid``). ``timeout`` is the deadline of calls
    that are given none. A second call returns the same backend, or raises InvalidArgument if it
    asks for something else.

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
        made = _join(backend, config)
        _process.backend = made
        ProgramEnd(made).watch()
        return made


def current_backend() -> Backend | None:
    """Return what ``init`` made; None before."""
    return _process.backend


def _check_same(made: Backend, name: str | None, timeout: Timeout) -> Backend:
    """Return the backend there is, unless something else is asked for."""
    made._check_process()
    if made.is_closed:
        raise InvalidArgument(
            "the backend that init() made was closed; a process joins its job once",
            this_rank=made.rank,
        )
    if name not in (None, AUTO) and _provider(name) is not type(made):
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


def _join(name: str | None, config: Config) -> Backend:
    asked = config.backend if name is None else name
    join = None if asked == AUTO else _joining(asked, is_setting=name is None)
    from ferrodist.rendezvous.sources.find import find_job  # only who joins a job needs it

    job = find_job(environment())
    if job.ends is not None:
        _print_by_lines()
    if join is None:
        join = _joining("hybrid" if job.several_hosts else "shared_memory")
        return join(job, config=config)._simplest()  # for all may turn out to be on one host
    return join(job, config=config)


def _joining(name: str, *, is_setting: bool = False) -> Callable[..., Backend]:
    """Return how a process joins its job with the backend of this name."""
    try:
        provider = _provider(name)
    except InvalidArgument as error:
        if not is_setting:
            raise
        raise InvalidArgument(f"{variable('backend')}: {error}", got=name) from error
    join: Callable[..., Backend] | None = getattr(provider, "join", None)
    if join is None:
        raise InvalidArgument(f"init() cannot make backend {name!r}: see {provider.__name__}")
    return join


def _print_by_lines() -> None:
    """Let our launcher have every line at once; Python keeps what it writes to a pipe for later."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _provider(name: str) -> type[Backend]:
    from ferrodist.backends.registry import backend_class  # takes longer than all the rest here

    return backend_class(name)
