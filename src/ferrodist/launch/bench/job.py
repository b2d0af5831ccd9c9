# SPDX-License-Identifier: MIT OR Apache-2.0
"""The running ranks of one engine: start them, give them orders, hear their answers, end them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Self

from ferrodist import RankLost, RendezvousError
from ferrodist.launch.bench.engines import Engine

START_SECONDS = 120  # importing torch on an oversubscribed machine is slow
ANSWER_SECONDS = 180
_END_SECONDS = 10
_POLL_SECONDS = 0.2


class Job:
    """All ranks of one engine, asleep in the kernel unless they carry out an order."""

    def __init__(self, engine: Engine, ranks: int) -> None:
        self.engine = engine
        self.ranks = ranks
        self.versions: dict[str, str] = {}
        self._lines: list[IO[str]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def _start(self) -> None:
        folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        self._output = self._open.enter_context((folder / "output").open("w+b"))
        listener = self._open.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(folder / "driver"))
        listener.listen(self.ranks)
        listener.settimeout(_POLL_SECONDS)
        for command in self.engine.start_commands(self.ranks, folder / "driver"):
            # Its own session: Ctrl-C reaches the driver alone, which then ends everything in order.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                process_group=0,  # no session: Linux shares the cores out by session
            )
            self._processes.append(process)
        self._greet(listener)

    def _greet(self, listener: socket.socket) -> None:
        """Wait until every rank has called back."""
        deadline = time.monotonic() + START_SECONDS
        by_rank: dict[int, IO[str]] = {}
        while len(by_rank) < self.ranks:
            if any(process.poll() is not None for process in self._processes):
                raise RendezvousError(
                    f"{self.engine.label} ended at its start: {self._last_words()}"
                )
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"{self.engine.label}: {len(by_rank)} of {self.ranks} ranks came within "
                    f"{START_SECONDS} s: {self._last_words()}"
                )
            with suppress(TimeoutError):
                connection = self._open.enter_context(listener.accept()[0])
                connection.settimeout(ANSWER_SECONDS)
                lines = self._open.enter_context(connection.makefile("rw", encoding="utf-8"))
                hello = json.loads(lines.readline())
                by_rank[hello["rank"]] = lines
                self.versions = hello["versions"]
        self._lines = [by_rank[rank] for rank in range(self.ranks)]

    def measure(self, order: dict[str, Any]) -> list[list[float]]:
        """Have all ranks carry out an order; return the microseconds of each call, by rank.

        Raises ``ValueError`` if the ranks could not do it but live on, ``RankLost`` if one is gone.
        """
        for lines in self._lines:
            print(json.dumps(order), file=lines, flush=True)
        answers = [self._answer(rank, lines) for rank, lines in enumerate(self._lines)]
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise ValueError(errors[0])
        return [answer["microseconds"] for answer in answers]

    def _answer(self, rank: int, lines: IO[str]) -> dict[str, Any]:
        try:
            line = lines.readline()
        except OSError:  # took too long, or the connection broke
            line = ""
        if not line:
            raise RankLost(
                f"{self.engine.label}: rank {rank} gave no answer: {self._last_words()}", rank=rank
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return " | ".join([line for line in lines if line.strip()][-6:]) or "it said nothing"

    def close(self) -> None:
        """Hang up, which ends the ranks; end those that do not go by themselves."""
        with suppress(OSError):  # an order that could not be sent cannot be sent at the end either
            self._open.close()
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
