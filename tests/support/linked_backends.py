"""Backends over links of a third party: the example of the docs, as it is and spoiled."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from ferrodist import Config
from ferrodist.rendezvous import Job


def _load_example() -> ModuleType:
    file = Path(__file__).parents[2] / "examples" / "own_backend.py"
    spec = importlib.util.spec_from_file_location("own_backend", file)
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


SocketsBackend: Any = _load_example().SocketsBackend


class PipeStream:
    """A connection of multiprocessing, as docs/own_backend.md wraps it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def read(self) -> bytes:
        return self._connection.recv_bytes()

    def write(self, data: memoryview) -> None:
        self._connection.send_bytes(data)

    def close(self) -> None:
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)


class PipesBackend(SocketsBackend):
    """Its links are connections of multiprocessing, which are no sockets for native code."""

    @classmethod
    def connect(cls, job: Job, config: Config) -> Sequence[PipeStream | None]:
        links = super().connect(job, config)
        return [link and PipeStream(Connection(link.detach())) for link in links]
