# SPDX-License-Identifier: MIT OR Apache-2.0
"""Write a backend: ranks on one host, connected by Unix sockets. It is simple, not fast.

    python examples/own_backend.py

starts three ranks with it. Installed with the entry point

    [project.entry-points."ferrodist.backends"]
    sockets = "own_backend:SocketsBackend"

it is available as ``ferrodist.init(backend="sockets")`` under every launcher. docs/own_backend.md
walks through this file.
"""

# ruff: noqa: D102 -- ferrodist.backends.provider says what the methods do

import contextlib
import hashlib
import multiprocessing
import os
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Self

import numpy as np

from ferrodist import Config
from ferrodist.backends.provider_backend import ProviderBackend

ENVELOPE = struct.Struct("<16sq")  # the group and the tag, followed by the bytes of the message
WORLD = bytes(16)  # the group of all ranks


class Sent:
    """A completed send: the bytes are in the socket."""

    def test(self) -> bool:
        return True

    def cancel(self) -> bool:
        return False


class Receive:
    """A posted receive; the thread that reads from the peer completes it."""

    def __init__(self, sockets: "Sockets", queue: deque["Receive"], memory: memoryview) -> None:
        self._sockets, self._queue, self._memory = sockets, queue, memory
        self._done = threading.Event()

    def complete(self, data: bytes) -> None:
        fitting = data[: len(self._memory)]
        self._memory[: len(fitting)] = fitting
        self._done.set()

    def test(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> None:
        self._done.wait(seconds)

    def cancel(self) -> bool:
        with self._sockets.lock:
            if not self._done.is_set():
                self._queue.remove(self)
            return not self._done.is_set()


class Sockets:
    """The connections of a process and the messages received on them, shared by all groups."""

    def __init__(self, name: str, rank: int, world_size: int, key: bytes, seconds: float) -> None:
        self.lock = threading.Lock()
        self.lost: set[int] = set()
        self.messages: dict[Any, deque[bytes]] = defaultdict(deque)  # unexpected messages
        self.receives: dict[Any, deque[Receive]] = defaultdict(deque)  # posted receives
        self._locks = [threading.Lock() for _ in range(world_size)]  # one per peer, for senders
        self._connections: dict[int, Connection] = {}
        # The null byte makes it a name that is free again when its process ends.
        with Listener(f"\0{name}-{rank}", "AF_UNIX", backlog=world_size, authkey=key) as listener:
            for peer in range(rank):
                connection = _connect(f"\0{name}-{peer}", key, time.monotonic() + seconds)
                connection.send(rank)
                self._connections[peer] = connection
            for _ in range(rank + 1, world_size):
                connection = listener.accept()
                self._connections[connection.recv()] = connection
        for peer in self._connections:
            threading.Thread(target=self._read, args=[peer], daemon=True).start()

    def _read(self, peer: int) -> None:
        """Complete the first posted receive that matches a message, or store the message."""
        try:
            while message := self._connections[peer].recv_bytes():
                group, tag = ENVELOPE.unpack_from(message)
                with self.lock:
                    key, data = (group, peer, tag), message[ENVELOPE.size :]
                    if self.receives[key]:
                        self.receives[key].popleft().complete(data)
                    else:
                        self.messages[key].append(data)
        except (EOFError, OSError):
            pass  # that process is gone
        self.lost.add(peer)

    def send(self, peer: int, group: bytes, tag: int, data: memoryview) -> None:
        try:
            with self._locks[peer]:
                self._connections[peer].send_bytes(ENVELOPE.pack(group, tag) + data)
        except OSError:
            raise ConnectionError(peer) from None

    def close(self) -> None:
        for peer, connection in self._connections.items():
            with contextlib.suppress(OSError), self._locks[peer]:
                connection.send_bytes(b"")  # the last message


def _connect(address: str, key: bytes, end: float) -> Connection:
    while True:
        try:
            return Client(address, "AF_UNIX", authkey=key)
        except ConnectionRefusedError:  # that rank does not listen yet
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


class SocketsProvider:
    """One rank of a group; ``members`` are the ranks of its members in the world."""

    def __init__(self, sockets: Sockets, members: Sequence[int], rank: int, group: bytes) -> None:
        self.rank = self.local_rank = rank
        self.world_size = self.local_world_size = len(members)
        self._sockets, self._members, self._group = sockets, members, group
        self._splits: dict[tuple[int, ...], int] = defaultdict(int)

    def collective(self, kind: Any, input: Any, output: Any, args: Any, deadline: Any) -> Any:
        return NotImplemented  # the base runs schedules on our messages

    def isend(self, data: memoryview, peer: int, tag: int) -> Sent:
        self._sockets.send(self._members[peer], self._group, tag, data)
        return Sent()

    def irecv(self, memory: memoryview, peer: int, tag: int) -> Receive:
        sockets, key = self._sockets, (self._group, self._members[peer], tag)
        with sockets.lock:
            receive = Receive(sockets, sockets.receives[key], memory)
            if sockets.messages[key]:
                receive.complete(sockets.messages[key].popleft())
            else:
                sockets.receives[key].append(receive)
        return receive

    def iprobe(self, peer: int, tag: int) -> int | None:
        with self._sockets.lock:
            found = self._sockets.messages.get((self._group, self._members[peer], tag))
            return len(found[0]) if found else None

    def split(self, ranks: Sequence[int]) -> "SocketsProvider":
        ranks = tuple(ranks)
        self._splits[ranks] += 1
        name = repr((self._group, ranks, self._splits[ranks])).encode()
        members = [self._members[rank] for rank in ranks]
        group = hashlib.blake2b(name, digest_size=16).digest()
        return SocketsProvider(self._sockets, members, ranks.index(self.rank), group)

    def abort(self, reason: str) -> None:
        pass  # only collectives of our own would have to stop

    def close(self) -> None:
        if self._group == WORLD:
            self._sockets.close()

    def status(self, rank: int) -> str:
        return "lost" if self._members[rank] in self._sockets.lost else "alive"


class SocketsBackend(ProviderBackend):
    """What the entry point names; ``ferrodist.init`` calls its ``join``."""

    @classmethod
    def join(cls, job: Any, *, config: Config) -> Self:
        """Join the job that the launcher has started."""
        return cls(new_world(job.name, job.rank, job.world_size, job.secret, config), config)


def new_world(
    name: str, rank: int, world_size: int, secret: bytes, config: Config
) -> SocketsProvider:
    sockets = Sockets(name, rank, world_size, secret, config.join_timeout)
    return SocketsProvider(sockets, range(world_size), rank, WORLD)


def show(rank: int, name: str) -> None:
    config = Config()
    with SocketsBackend(new_world(name, rank, 3, b"known to all", config), config) as backend:
        total = backend.allreduce(np.full(2, rank))
        everybody = backend.all_gather_object(f"rank {rank}")
        if rank == 0:
            print(f"sum {total}, from {', '.join(everybody)}")


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    name = f"own-backend-{os.getpid()}"
    ranks = [context.Process(target=show, args=(rank, name)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
