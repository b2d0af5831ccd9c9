# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which backends there are, the one that init() made, and how it ends with the program."""

from __future__ import annotations

import atexit
import functools
import importlib
import io
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType, new_class
from typing import TYPE_CHECKING, NoReturn

from ferrodist import tracebacks
from ferrodist.backends.base import Backend
from ferrodist.call import caller_site
from ferrodist.config import (
    AUTO,
    DEFAULT,
    Config,
    DefaultTimeout,
    Timeout,
    check_timeout,
    environment,
    unread_variables,
    variable,
)
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    AuthenticationError,
    BackendUnavailable,
    DistributedError,
    InvalidArgument,
    NotInitialized,
    RendezvousError,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from ferrodist.rendezvous import Job

logger = logging.getLogger("ferrodist")

_SHARED_MEMORY = "ferrodist.backends.shared_memory:SharedMemoryBackend"
_BUILT_IN = {
    "simulated": "ferrodist.backends.threads:SimulatedBackend",
    "shared_memory": _SHARED_MEMORY,
    "shm": _SHARED_MEMORY,
    "tcp": "ferrodist.backends.tcp:TcpBackend",
    "hybrid": "ferrodist.backends.hybrid:HybridBackend",
    "mpi": "ferrodist.backends.engines.mpi:MpiBackend",
    "gloo": "ferrodist.backends.engines.torch:GlooBackend",
    "nccl": "ferrodist.backends.engines.torch:NcclBackend",
}
_EXTRAS = {"gloo": "torch", "nccl": "torch"}  # where it is not the name of the backend
_TORCHS = ("nccl", "gloo", "ucc")
_NO_NAME_NEEDED = (
    "init() without a name takes shared memory on one host and TCP between hosts, and copies "
    "arrays of a GPU through host memory"
)


def backend_names() -> list[str]:
    """List every known name, built in or installed by another package."""
    return sorted(_BUILT_IN.keys() | {entry.name for entry in _installed()})


def backend_class(name: str) -> type[Backend]:
    """Import the backend of this name."""
    target = _BUILT_IN.get(name) or next((e.value for e in _installed() if e.name == name), None)
    if target is None:
        raise _unknown(name)
    module, _, attribute = target.partition(":")
    try:
        found: type[Backend] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(name, name)
        raise BackendUnavailable(
            f"backend {name!r} needs {error.name}: pip install 'ferrodist[{extra}]'"
        ) from error
    return found


@functools.cache
def missing_engine(class_name: str, name: str, maker: str) -> type[Backend]:
    """Make a class that stands for an engine whose library is not installed.

    Programs can name it, also in ``isinstance``. Its use raises what ``init`` with its name does.
    """

    def refuse(*args: object, **options: object) -> NoReturn:
        backend_class(name)
        raise BackendUnavailable(f"backend {name!r} was not available when the program began")

    doc = f"Backend {name!r}, whose library is not installed: every use raises BackendUnavailable."
    body: dict[str, object] = {"__doc__": doc, "__module__": __name__}
    body.update(dict.fromkeys(("__new__", "join", maker), staticmethod(refuse)))
    made: type[Backend] = new_class(
        class_name, (Backend,), exec_body=lambda names: names.update(body)
    )
    return made


def _unknown(name: str) -> InvalidArgument:
    """Make the error for a name that is torch's, or misspelt."""
    from difflib import get_close_matches

    names, asked = backend_names(), name.lower()
    hint = ""
    if near := get_close_matches(asked, names, n=1):
        hint = f" (did you mean {near[0]!r}?)"
    elif "nccl" in asked:
        hint = ", which is a name of torch's: 'nccl' alone does arrays of the host by Gloo"
    elif any(word in asked for word in _TORCHS):
        hint = f", which is a name of torch's: {_NO_NAME_NEEDED}"
    return InvalidArgument(f"no backend named {name!r}{hint}; known: {', '.join(names)}", got=name)


def _installed() -> list[EntryPoint]:
    from importlib.metadata import entry_points  # takes as long as a third of NumPy

    return list(entry_points(group="ferrodist.backends"))


# -- the backend of this process -------------------------------------------------------------------


class _Process:
    """What this process has been initialised with."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.backend: Backend | None = None


_process = _Process()


def init(
    backend: str | None = None, *, timeout: Timeout = DEFAULT, pickle: bool | None = None
) -> Backend:
    """Join the job that this process was started for, and return its backend.

    Every rank calls it. It returns when all ranks have joined. If some do not within
    ``Config.join_timeout``, it raises RendezvousError, which names them. The launcher says which
    rank of which job this is: ``ferrodist run``, torchrun, mpiexec, srun, or RANK and WORLD_SIZE
    set by hand; of nested launchers the innermost counts. Without any,
    the world has one rank.

    Args:
        backend: the name of a backend. By default ``Config.backend``; if that is not set either,
            shared memory on one host, and on several hosts also TCP between them (``hybrid``).
        timeout: the timeout of calls that are not given one.
        pickle: if True on all ranks, object calls may send any object. Ranks then execute code
            that other ranks send.

    A second call returns the same backend, or raises InvalidArgument if its arguments differ.

    Example:
        >>> import ferrodist
        >>> backend = ferrodist.init()  # doctest: +SKIP
        >>> ferrodist.allreduce(1.0)  # doctest: +SKIP
        1.0
    """
    tracebacks.install()
    with _process.lock:
        if _process.backend is not None:
            return _check_same(_process.backend, backend, timeout, pickle)
        config = Config.from_environment()
        if timeout is not DEFAULT:
            config = replace(config, timeout=check_timeout(timeout))
        made = _join(backend, config)
        made._pickle = bool(pickle)
        return _keep(made)


def init_job(job: Job, config: Config) -> Backend:
    """Be a rank of a job that the program has made, as ``init`` is of one that it has found."""
    tracebacks.install()
    with _process.lock:
        if _process.backend is not None:
            raise InvalidArgument("this process was a rank before; a process joins one job, once")
        return _keep(join_job(job, config.backend, config))


def _keep(made: Backend) -> Backend:
    """Let calls that are given no backend use this one, and its ranks know how this one ends."""
    _process.backend = made
    program_end.watch(made)
    return made


def current_backend() -> Backend | None:
    """Return what ``init`` made; None before."""
    return _process.backend


def is_initialized() -> bool:
    """Return whether ``init`` was called; False after close(), and in a forked child.

    Example:
        >>> import ferrodist
        >>> ferrodist.is_initialized()
        False
    """
    made = _process.backend
    return made is not None and not made.is_closed and not made.is_forked


def rank() -> int:
    """Return this process's rank in the world that ``init`` joined, until it is closed.

    Example:
        >>> import ferrodist
        >>> print(f"rank {ferrodist.rank()} of {ferrodist.world_size()}")  # doctest: +SKIP
        rank 0 of 4
    """
    return _made("rank").rank


def world_size() -> int:
    """Return the number of ranks in the world that ``init`` joined, until it is closed.

    Example:
        >>> import ferrodist
        >>> print(f"one of {ferrodist.world_size()} ranks")  # doctest: +SKIP
        one of 4 ranks
    """
    return _made("world_size").world_size


def local_rank() -> int:
    """Return this process's rank among the ranks on its host, for example to choose a GPU.

    Example:
        >>> import ferrodist, torch
        >>> torch.cuda.set_device(ferrodist.local_rank())  # doctest: +SKIP
    """
    return _made("local_rank").local_rank


def _made(what: str) -> Backend:
    """Return what ``init`` made, also in a forked child: a worker may want to know whose it is."""
    made = _process.backend
    if made is None:
        raise NotInitialized(f"{what}: call ferrodist.init() first")
    if made.is_closed:
        raise NotInitialized(
            f"{what}: the backend that init() made was closed; backend.{what} stays valid"
        )
    return made


def _check_same(made: Backend, name: str | None, timeout: Timeout, pickle: bool | None) -> Backend:
    """Return the backend there is, unless something else is asked for."""
    made._check_process()
    if made.is_closed:
        raise InvalidArgument(
            "the backend that init() made was closed; a process joins its job once",
            this_rank=made.rank,
        )
    if name not in (None, AUTO) and backend_class(name) is not type(made):
        raise InvalidArgument(
            f"init() was called before and made a {type(made).__name__}, not {name!r}", got=name
        )
    is_chosen = not isinstance(made.timeout, DefaultTimeout)
    if timeout is not DEFAULT and not (is_chosen and check_timeout(timeout) == made.timeout):
        given = made.timeout if is_chosen else f"the default, {made.timeout}"
        raise InvalidArgument(
            f"init() was called before, and timeout is {given}, not {timeout!r}; set "
            "backend.timeout to change it",
            got=timeout,
            expected=made.timeout,
        )
    if pickle is not None and bool(pickle) != made._pickle:
        raise InvalidArgument(
            f"init() was called before, with pickle={made._pickle}; pass pickle= to the call that "
            "needs another",
            got=pickle,
        )
    return made


def _join(name: str | None, config: Config) -> Backend:
    asked = config.backend if name is None else name
    if asked != AUTO:
        join = _joining(asked, is_setting=name is None)  # raises before any rank is waited for
        if getattr(backend_class(asked), "finds_its_job", False):
            return join(_try_find_job(), config=config)
    job = _find_job()
    if job.status_board is not None:
        _print_by_lines()
    return join_job(job, asked, config)


def join_job(job: Job, name: str, config: Config) -> Backend:
    """Join a job with the backend of this name; every rank of the job calls it."""
    if name != AUTO:
        return _joining(name)(job, config=config)
    join = _joining("hybrid" if job.several_hosts else "shared_memory")
    return join(job, config=config)._simplest()  # for all may turn out to be on one host


def _find_job() -> Job:
    """Find which rank of which job this is, unless it is a worker that a rank has spawned."""
    from ferrodist.rendezvous.find_job import NO_SETTINGS, find_job  # only needed to join

    for name, meant in unread_variables(environment(), NO_SETTINGS).items():
        hint = f": did you mean {meant}?" if meant else ""
        logger.warning("%s is no setting of this version, and nobody reads it%s", name, hint)
    try:
        job = find_job(environment())
    except DistributedError:
        if (worker := _worker_at_import()) is not None:
            raise _not_a_rank(worker) from None
        raise
    if job.world_size > 1 and (worker := _worker_at_import()) is not None:
        raise _not_a_rank(worker)
    return job


def _try_find_job() -> Job | None:
    """Find what the launcher says for an engine that knows its job itself; it may say nonsense."""
    from ferrodist.rendezvous.job import PROGRAM

    try:
        job = _find_job()
        return job if job.launcher is not PROGRAM else None  # no launcher that we know
    except (InvalidArgument, AuthenticationError) as error:
        logger.info("not used: %s", error)
        return None


def _worker_at_import() -> str | None:
    """Name this process if it is a worker of multiprocessing that imports the main module again.

    Workers that are spawned, or come from a fork server, have a flag as long as they do that; later
    they may be ranks of their own.
    """
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is None:
        return None
    process = multiprocessing.current_process()
    return str(process.name) if getattr(process, "_inheriting", False) else None


def _not_a_rank(worker: str) -> RendezvousError:
    return RendezvousError(
        f"init() was called while {worker}, a worker process that a rank has started, imports the "
        "main module again: it is not a rank itself. put what only ranks do under "
        "'if __name__ == \"__main__\":', init() first"
    )


def _joining(name: str, *, is_setting: bool = False) -> Callable[..., Backend]:
    """Return how a process joins its job with the backend of this name."""
    try:
        kind = backend_class(name)
    except InvalidArgument as error:
        if not is_setting:
            raise
        raise InvalidArgument(f"{variable('backend')}: {error}", got=name) from error
    join: Callable[..., Backend] | None = getattr(kind, "join", None)
    if join is None:
        raise InvalidArgument(f"init() cannot make backend {name!r}: see {kind.__name__}")
    return join


def _print_by_lines() -> None:
    """Let our launcher have every line at once; Python keeps what it writes to a pipe for later."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


# -- the end of the program ------------------------------------------------------------------------

_EXIT_SECONDS = 2.0  # for calls that are in flight when the program ends

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class ProgramEnd:
    """Tells the other ranks, once, how this rank's program came to its end."""

    def __init__(self) -> None:
        self._backends: weakref.WeakSet[Backend] = weakref.WeakSet()
        self._exit = ""
        self._has_failed = False

    def watch(self, backend: Backend) -> None:
        """Tell the ranks of this group, too."""
        self._backends.add(backend)
        self._install()

    @functools.cache  # noqa: B019 -- there is one, and it is never dropped
    def _install(self) -> None:
        """Hook into all the ways in which a program can end."""
        previous_hook: _Hook = sys.excepthook
        previous_exit = sys.exit

        def hook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            try:
                self._fail(error)
            finally:
                previous_hook(kind, error, trace)

        def exit(status: object = None, /) -> NoReturn:  # noqa: A001 -- it stands for sys.exit
            if _is_in_main_thread():
                self._exit = f"sys.exit({_shown(status)}) at {caller_site()}"
            previous_exit(status)  # type: ignore[arg-type]  # whatever it was given

        sys.excepthook = hook
        sys.exit = exit
        atexit.register(self._end)

    def _fail(self, error: BaseException) -> None:
        goes_on = hasattr(sys, "ps1") or sys.flags.inspect  # at a prompt, or one comes after it
        goes_on = goes_on or not _is_in_main_thread()  # a thread's error does not end the program
        if not goes_on and not self._has_failed:
            self._has_failed = True
            for backend in list(self._backends):
                backend._fail(error)

    def _end(self) -> None:
        """Leave the groups, quietly and soon: calls in flight get a moment, no more.

        Without a thread to be waited for: Python 3.12 starts none any more.
        """
        # Python notes the error of a program before it calls the hook, which may be somebody
        # else's by now.
        error = getattr(sys, "last_value", None)
        if error is not None:
            self._fail(error)
        how = f"its program ended after {self._exit}" if self._exit else "its program ended"
        deadline = Deadline(_EXIT_SECONDS)
        for backend in list(self._backends):
            try:
                backend._end(how, deadline.remaining())
            except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 -- a Work's was logged
                logger.debug("rank %d: at the end of the program: %s", backend.rank, error)


program_end = ProgramEnd()


def _shown(status: object) -> str:
    """Show what sys.exit was given: a number, or a text in short."""
    if status is None:
        return ""
    if isinstance(status, int):
        return str(int(status))
    if not isinstance(status, str):
        return f"a {type(status).__name__}"
    return repr(status if len(status) <= 80 else f"{status[:80]}...")


def _is_in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
