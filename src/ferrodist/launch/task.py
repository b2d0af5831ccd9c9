# SPDX-License-Identifier: MIT OR Apache-2.0
"""What ``ferrodist.run`` passes to the processes it starts, and what they pass back.

All of it goes through files that only the two have open and nothing of it comes from a network,
which is why pickle may be used here.
"""

from __future__ import annotations

import linecache
import os
import pickle
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from ferrodist.backends.verdict import words_of
from ferrodist.errors import UnsupportedArray

_LENGTH = struct.Struct("!Q")
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Report(NamedTuple):
    """How a rank ended: with a pickled result, or with an error.

    ``when`` is the time of the error by the clock that all processes of a host share. ``error`` is
    None if it could not be pickled; its words and its traceback are always there.
    """

    result: bytes | None
    when: float = 0.0
    error: bytes | None = None
    words: str = ""
    trace: str = ""


def open_task(fn: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Write down what the ranks are to do, in an anonymous file; return its number.

    The call itself is pickled on its own: to read it a rank needs this process's path.
    """
    try:
        call = _pickled((fn, args))
    except Exception as error:  # a pickler calls the user's code, which may raise anything
        raise UnsupportedArray(
            f"run: the function or its arguments cannot be pickled: {words_of(error)}"
        ) from error
    file = os.memfd_create("ferrodist-task")
    with open(file, "wb", closefd=False) as stream:
        pickle.dump((sys.path, sys.argv, _sources(), call), stream)
    return file


def _sources() -> dict[str, Any]:
    """List the lines of code that are in no file, as in a notebook: tracebacks show them."""
    return {name: entry for name, entry in linecache.cache.items() if entry[1:2] == (None,)}


def report_result(result: Any, rank: int) -> Report:
    """Make the report of a rank that has finished."""
    try:
        return Report(_pickled(result))
    except Exception as error:  # a pickler calls the user's code, which may raise anything
        raise UnsupportedArray(
            f"run: rank {rank} returned a {type(result).__qualname__} that cannot be pickled: "
            f"{words_of(error)}",
            rank=rank,
        ) from error


def report_error(error: BaseException) -> Report:
    """Make the report of a rank that has failed."""
    when = time.monotonic()
    try:
        pickled = _pickled(error)
    except Exception:  # noqa: BLE001 -- the user's error; its words must do
        pickled = None
    return Report(None, when, pickled, words_of(error), _trace_of(error))


def write_report(file: int, report: Report) -> None:
    """Write a report into a pipe and close it."""
    data = pickle.dumps(tuple(report))
    with open(file, "wb") as stream:
        stream.write(_LENGTH.pack(len(data)))
        stream.write(data)


def try_read_report(data: bytearray) -> Report | None:
    """Read a report; None if not all of it has arrived."""
    if len(data) < _LENGTH.size:
        return None
    (nbytes,) = _LENGTH.unpack_from(data)
    if len(data) < _LENGTH.size + nbytes:
        return None
    return Report(*pickle.loads(memoryview(data)[_LENGTH.size :]))


def unpickled(data: bytes) -> Any:
    """Make again what a rank has pickled."""
    return pickle.loads(data)


def _pickled(value: Any) -> bytes:
    import cloudpickle  # lambdas, closures and what is defined in a script travel by value

    data: bytes = cloudpickle.dumps(value)
    return data


def _trace_of(error: BaseException) -> str:
    """Write down a traceback, from where the user's code begins."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
