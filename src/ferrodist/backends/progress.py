# SPDX-License-Identifier: MIT OR Apache-2.0
"""Progress: the thread that runs calls in flight, and the kind of thread that finishes Works."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ferrodist import _native
from ferrodist.deadline import Deadline

logger = logging.getLogger("ferrodist")


class ProgressThread(threading.Thread):
    """A thread that finishes Works, and so runs their callbacks."""

    def run(self) -> None:
        """Run, known to native code as a thread on which nobody may communicate."""
        _native.mark_progress_thread()
        super().run()


class Progress:
    """The one thread that runs calls in flight; it sleeps while there are none."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = ProgressThread(target=_run_jobs, args=(self._jobs,), name=name, daemon=True)
        self.thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Let the thread end after the jobs queued so far."""
        self._jobs.put(None)

    def join(self, deadline: Deadline) -> None:
        """Wait for the thread to end."""
        if threading.current_thread() is not self.thread:
            self.thread.join(deadline.timeout())


def _run_jobs(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException:
            logger.exception("a callback of a Work failed")
        del job  # a finished job must not keep the user's arrays alive while the thread sleeps
