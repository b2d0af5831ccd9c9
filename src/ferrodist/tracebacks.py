# SPDX-License-Identifier: MIT OR Apache-2.0
"""What users see of a traceback: their own frames, and at most one of ours for each of their calls.

Errors are left as they are until somebody is about to show them, so that nothing of this costs
anything before, and a debugger finds every frame. ``FERRODIST_FULL_TRACEBACK=1`` shows all.
"""

from __future__ import annotations

import functools
import io
import os
import sys
import threading
from collections.abc import Iterator
from types import TracebackType

from ferrodist.config import environment, variable
from ferrodist.errors import DistributedError

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_PACKAGES = ("site-packages", "dist-packages")  # within the folder of the library
# Errors that say what is wrong in their text; of all others, where they come from may matter.
_EXPLAINED = (DistributedError, KeyboardInterrupt, BaseExceptionGroup)


class RemoteTraceback(Exception):
    """The traceback of another process, as text; the cause of the error that it is about."""


def is_explained(error: BaseException) -> bool:
    """Tell whether our frames add nothing to what an error says, or to its traceback elsewhere."""
    return isinstance(error, _EXPLAINED) or isinstance(error.__cause__, RemoteTraceback)


def are_full() -> bool:
    """Tell whether the user wants to see all frames."""
    return environment().get(variable("full_traceback"), "").lower() not in ("", "0", "false", "no")


def cut(error: BaseException) -> None:
    """Remove our inner frames from an error, and from all that it is chained to."""
    if not are_full():
        for each in _chained(error, set()):
            each.__traceback__ = _relinked(_shown(each))


def are_alike(one: BaseException, other: BaseException) -> bool:
    """Tell whether two errors have come the same way."""
    ways = [
        [(t.tb_frame.f_code, t.tb_lineno) for t in _frames(e.__traceback__)] for e in (one, other)
    ]
    return ways[0] == ways[1]


@functools.cache
def install() -> None:
    """Shorten the tracebacks of unhandled errors, in the main program and in threads."""
    show, show_in_thread = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        cut(error)
        if show is sys.__excepthook__ and _try_write(error):
            return
        show(kind, error, error.__traceback__)

    def hook_of_threads(about: threading.ExceptHookArgs) -> None:
        error = about.exc_value
        if error is not None:
            cut(error)
            facts = about.exc_type, error, error.__traceback__, about.thread
            about = threading.ExceptHookArgs(facts)
        show_in_thread(about)

    sys.excepthook, threading.excepthook = hook, hook_of_threads


def _try_write(error: BaseException) -> bool:
    """Write a traceback in one piece, so that the lines of other ranks stay out of it."""
    stream = sys.stderr
    if not isinstance(stream, io.TextIOWrapper) or stream.isatty():
        return False  # Python itself shows it in colours
    import traceback  # not needed until something has failed

    stream.write("".join(traceback.format_exception(error)))
    stream.flush()
    return True


def is_ours(frame: TracebackType) -> bool:
    """Tell whether a frame is of this package."""
    return frame.tb_frame.f_code.co_filename.startswith(_OURS)


def _chained(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for other in (error.__cause__, error.__context__, *members):
        yield from _chained(other, seen)


def _shown(error: BaseException) -> list[TracebackType]:
    """List the frames to show: of every run of ours the first, and of a leading run none."""
    frames = list(_frames(error.__traceback__))
    users = [at for at, frame in enumerate(frames) if not is_ours(frame) and not _is_library(frame)]
    end = len(frames)
    if is_explained(error):
        after = range(users[-1] + 1 if users else 0, end)
        end = next((at + 1 for at in after if is_ours(frames[at])), end)
    else:
        end = users[-1] + 1 if users else 0
    begin = users[0] if users and all(map(is_ours, frames[: users[0]])) else 0
    kept = [
        frame
        for at, frame in enumerate(frames[begin:end], begin)
        if at == begin or not (is_ours(frame) and is_ours(frames[at - 1]))
    ]
    return kept if is_explained(error) else [*kept, *frames[end:]]


def _is_library(frame: TracebackType) -> bool:
    file = frame.tb_frame.f_code.co_filename
    is_inside = file.startswith((_LIBRARY, "<frozen "))
    return is_inside and not any(name in file for name in _PACKAGES)


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _relinked(frames: list[TracebackType]) -> TracebackType | None:
    """Make a traceback of some frames of another; that one stays as it is."""
    trace = None
    for frame in reversed(frames):
        trace = TracebackType(trace, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return trace
