# SPDX-License-Identifier: MIT OR Apache-2.0
"""One rank of ``ferrodist.run``: ``worker.py <file of the task> <pipe for the report>``.

Run as a file: nothing of ferrodist is imported before the path is that of the process that called
run.
"""

from __future__ import annotations

import linecache
import os
import pickle
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ferrodist.launch.task import Report


def main() -> None:
    """Do the task and report how it went."""
    task_file, report_file = map(int, sys.argv[1:])
    os.set_inheritable(report_file, False)
    task = os.pread(task_file, os.fstat(task_file).st_size, 0)  # all ranks share one offset
    os.close(task_file)
    sys.path[:], sys.argv[:], sources, call = pickle.loads(task)
    linecache.cache.update(sources)

    from ferrodist.launch.task import write_report

    write_report(report_file, _perform(call))


def _perform(call: bytes) -> Report:
    """Join the job, call the function and leave; the other ranks are told of an error."""
    import ferrodist
    from ferrodist.backends.default import current_backend
    from ferrodist.launch.task import report_error, report_result

    try:
        fn, args = pickle.loads(call)
        backend = ferrodist.init()
        report = report_result(fn(backend, *args), backend.rank)
        backend._end()
    except SystemExit:
        raise  # the process ends as it asks for, without a result
    except BaseException as error:  # noqa: BLE001 -- the top of a rank: the caller of run raises it
        report = report_error(error)
        joined = current_backend()
        if joined is not None:
            with suppress(Exception):  # what comes second must not hide what came first
                joined._fail(error)
    return report


if __name__ == "__main__":
    main()
