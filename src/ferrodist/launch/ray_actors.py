# SPDX-License-Identifier: MIT OR Apache-2.0
"""The actors of a job on a Ray cluster: its ranks, and the board at which they meet.

The board also passes on what the ranks print: a thread of each rank sends it there. The only file
that imports ray, when it is used.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import fcntl
import linecache
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ferrodist.backends.base import Backend
from ferrodist.backends.registry import init_job
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable
from ferrodist.launch.worker import perform
from ferrodist.rendezvous.exchange import StoreExchange, absent
from ferrodist.rendezvous.job import Job

STDOUT, STDERR = 1, 2
_MOST_NBYTES = 4 << 20  # of output that the board holds; the rest stays where the ranks are
_READ_NBYTES = 1 << 18  # of it at once
_PAUSE = 0.03  # seconds between two looks whether a rank has printed
_MOST_SPOOLED = 64 << 20  # bytes that a rank has printed, to stdout or stderr, and not sent
_LOOK = 0.2  # seconds between two looks whether they are more, while the board takes none
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE

Chunk = tuple[int, int, bytes]  # rank, file, what it wrote


def import_ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise BackendUnavailable(
            f"run: cluster='ray' needs ray, which cannot be imported ({error}): pip install "
            "'ferrodist[ray]', on all nodes of the cluster"
        ) from error
    return ray


class Board:
    """An actor: a store at which the ranks meet, and their output until it is read."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._output: list[Chunk] = []
        self._nbytes = 0
        self._is_closed = False
        self._changed = asyncio.Condition()

    async def set(self, key: str, value: bytes) -> None:
        async with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    async def get(self, key: str, timeout: float) -> bytes | None:
        async with self._changed:
            with suppress(TimeoutError):
                is_there = self._changed.wait_for(lambda: key in self._values)
                await asyncio.wait_for(is_there, timeout)
        return self._values.get(key)

    async def write(self, chunk: Chunk) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._nbytes < _MOST_NBYTES)
            self._output.append(chunk)
            self._nbytes += len(chunk[-1])
            self._changed.notify_all()

    async def read(self) -> list[Chunk]:
        """Wait for output and return all there is; after ``close``, without waiting."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._output or self._is_closed)
            output, self._output, self._nbytes = self._output, [], 0
            self._changed.notify_all()
        return output

    async def close(self) -> None:
        async with self._changed:
            self._is_closed = True
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Task:
    """What all ranks are told; ``towards`` is the address of rank 0's node."""

    name: str
    world_size: int
    secret: bytes = field(repr=False)
    config: Config
    towards: str
    call: bytes = field(repr=False)
    sources: dict[str, Any]


class Rank:
    """An actor: one rank, in a process of its own; to meet the others it is a store."""

    def __init__(self, rank: int, board: Any) -> None:
        self._ray = import_ray()
        self._rank = rank
        self._board = board

    def perform(self, task: Task) -> tuple[Any, ...]:
        """Do what ``worker.main`` does for ranks of one host."""
        linecache.cache.update(task.sources)
        with _sent_on(STDOUT, self._write), _sent_on(STDERR, self._write) as kept:
            faulthandler.enable(kept, all_threads=False)  # a crash leaves nobody to send it on
            return tuple(perform(task.call, lambda: self._join(task)))

    def _join(self, task: Task) -> Backend:
        job = Job(task.name, self._rank, task.world_size, task.secret, hosts="Ray")
        deadline = Deadline(task.config.join_timeout)
        exchange = StoreExchange(job, self, deadline, task.towards, "the function of run()")
        node = self._ray.get_runtime_context().get_node_id()
        return init_job(replace(job, exchange=exchange), replace(task.config, host_id=node))

    def set(self, key: str, value: bytes) -> None:
        self._ray.get(self._board.set.remote(key, value))

    def get(self, key: str, timeout: float) -> bytes:
        value: bytes | None = self._ray.get(self._board.get.remote(key, timeout))
        if value is None:
            raise absent(key, Deadline(timeout))
        return value

    def has(self, key: str) -> bool:
        return self._ray.get(self._board.get.remote(key, 0.0)) is not None

    def _write(self, file: int, data: bytes, while_waiting: Callable[[], None]) -> None:
        written = self._board.write.remote((self._rank, file, data))
        while not self._ray.wait([written], timeout=_LOOK)[0]:
            while_waiting()
        self._ray.get(written)


Write = Callable[[int, bytes, Callable[[], None]], None]


@contextmanager
def _sent_on(file: int, write: Write) -> Iterator[int]:
    """Send on what this process and its children write to a file; give a copy of the file.

    It waits in a file without a name, not in a pipe, which native code could fill while it keeps
    the thread below from reading. At the end all of it is sent, for as long as that takes.
    """
    kept = os.dup(file)
    with tempfile.TemporaryFile(buffering=0) as unnamed:
        fcntl.fcntl(unnamed, fcntl.F_SETFL, os.O_APPEND)
        os.dup2(unnamed.fileno(), file)
        spool = _Spool(unnamed.fileno(), partial(write, file))
        try:
            yield kept
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):  # no room for it, or closed by the program
                    stream.flush()
            os.dup2(kept, file)  # the process ends soon, and with it the copy
            spool.finish()


class _Spool:
    """What was written to a file and is not sent yet; a thread sends it, from the oldest on.

    It takes no more room than ``_MOST_SPOOLED``: if more is written than the reader takes, what is
    oldest is dropped, and a line says how much. What is sent or dropped takes none, where the file
    system can make holes in a file.
    """

    def __init__(self, file: int, write: Callable[[bytes, Callable[[], None]], None]) -> None:
        self._file, self._write = file, write
        self._offset = 0  # from here on it is not sent
        self._dropped = 0
        self._fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until all is sent."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_over.wait(_PAUSE)
            while data := os.pread(self._file, _READ_NBYTES, self._offset):
                self._free(self._offset + len(data))
                self._send(data)
                while self._dropped:
                    dropped, self._dropped = self._dropped, 0
                    self._send(_note_of(dropped, is_in_line=not data.endswith(b"\n")))

    def _send(self, data: bytes) -> None:
        with suppress(Exception):  # without a board nobody reads it, and the rank goes on
            self._write(data, self._drop_oldest)

    def _drop_oldest(self) -> None:
        """Drop half of what may wait if it is more than that; the rest begins with a whole line."""
        num_waiting = os.fstat(self._file).st_size - self._offset
        if num_waiting <= _MOST_SPOOLED:
            return
        start = self._offset + num_waiting - _MOST_SPOOLED // 2
        start += os.pread(self._file, _READ_NBYTES, start).find(b"\n") + 1
        self._dropped += start - self._offset
        self._free(start)

    def _free(self, offset: int) -> None:
        self._offset = offset
        self._fallocate(self._file, _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(offset))


def _note_of(nbytes: int, is_in_line: bool) -> bytes:
    start = "\n" if is_in_line else ""
    text = f"[ferrodist: {nbytes} bytes were dropped here: printed faster than they could be sent]"
    return f"{start}{text}\n".encode()
