# SPDX-License-Identifier: MIT OR Apache-2.0
"""One rank of ``ferrodist.run``: ``worker.py <file of the task> <pipe for the result>``.

Run as a file: nothing of ferrodist is imported before the path is that of the process that called
run. The task and the results go through files that only the two processes have open, and nothing of
them comes from a network, which is why pickle may be used here.
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
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend

_LENGTH = struct.Struct("!Q")


class WorkerResult(NamedTuple):
    """How a rank ended: with a pickled result, or with an error.

    ``when`` is the time of the error by the clock that all processes of a host share. ``error`` is
    None if it could not be pickled; its text and its traceback are always there.
    """

    result: bytes | None
    when: float = 0.0
    error: bytes | None = None
    text: str = ""
    trace: str = ""


def main() -> None:
    task_file, result_file = map(int, sys.argv[1:])
    os.set_inheritable(result_file, False)
    task = os.pread(task_file, os.fstat(task_file).st_size, 0)  # all ranks share one offset
    os.close(task_file)
    sys.path[:], sys.argv[:], sources, call = pickle.loads(task)
    linecache.cache.update(sources)
    result = pickle.dumps(tuple(perform(call)))
    with open(result_file, "wb") as stream:
        stream.write(_LENGTH.pack(len(result)))
        stream.write(result)


def pickled(value: Any) -> bytes:
    """Pickle with cloudpickle: lambdas, closures and what is defined in a script go by value."""
    import cloudpickle

    data: bytes = cloudpickle.dumps(value)
    return data


def try_read_result(data: bytearray) -> WorkerResult | None:
    """Read what ``main`` has written; None if not all of it has arrived."""
    if len(data) < _LENGTH.size:
        return None
    (nbytes,) = _LENGTH.unpack_from(data)
    if len(data) < _LENGTH.size + nbytes:
        return None
    return WorkerResult(*pickle.loads(memoryview(data)[_LENGTH.size :]))


def perform(call: bytes, join: Callable[[], Backend] | None = None) -> WorkerResult:
    """Join the job, call the function and leave; the other ranks are told of an error."""
    import ferrodist
    from ferrodist.backends.registry import current_backend

    try:
        fn, args = pickle.loads(call)
        backend = ferrodist.init() if join is None else join()
        result = _result_of(fn(backend, *args), backend.rank)
        backend._end()
    except SystemExit:
        raise  # the process ends as it asks for, without a result
    except BaseException as error:  # noqa: BLE001 -- the top of a rank: the caller of run raises it
        result = _result_of_error(error)
        joined = current_backend()
        if joined is not None:
            with suppress(Exception):  # a second error must not hide the first
                joined._fail(error)
    return result


def _result_of(value: Any, rank: int) -> WorkerResult:
    from ferrodist.backends.failures import describe
    from ferrodist.errors import UnsupportedArray

    try:
        return WorkerResult(pickled(value))
    except Exception as error:  # a pickler calls the user's code, which may raise anything
        raise UnsupportedArray(
            f"run: rank {rank} returned a {type(value).__qualname__} that cannot be pickled: "
            f"{describe(error)}",
            rank=rank,
        ) from error


def _result_of_error(error: BaseException) -> WorkerResult:
    from ferrodist import tracebacks
    from ferrodist.backends.failures import describe

    when = time.monotonic()
    try:
        data = pickled(error)
    except Exception:  # noqa: BLE001 -- the user's error; its text must do
        data = None
    tracebacks.cut(error)  # it begins where the user's code does
    trace = "".join(traceback.format_exception(error))
    return WorkerResult(None, when, data, describe(error), trace)


if __name__ == "__main__":
    main()
