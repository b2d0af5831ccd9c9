# SPDX-License-Identifier: MIT OR Apache-2.0
"""Flow: one stream of one rank, from its pipe or terminal to the console, a file and the memory."""

from __future__ import annotations

from ferrodist.launch.output.last_words import Tail
from ferrodist.launch.output.pipes import Inlet
from ferrodist.launch.output.sinks import FileSink
from ferrodist.launch.output.speakers import Speaker
from ferrodist.launch.processes import Crew


class Flow:
    """What is read from a file and where it goes."""

    def __init__(self, file: int, speaker: Speaker, log: FileSink | None) -> None:
        self.log = log
        self.tail = Tail()
        self._speaker = speaker
        self._inlet = Inlet(file, self._take, waits_for_lines=speaker.waits_for_lines)
        self._has_ended = False

    def watch(self, crew: Crew) -> None:
        """Let it flow while the crew is waited for."""
        self._inlet.watch(crew, self._read)

    def retire(self) -> None:
        """Take all that its process, which has ended, has written; others may go on writing."""
        self._inlet.drain()
        self._speaker.retire()

    def end(self) -> None:
        """Take all that has been written, and no more."""
        if not self._has_ended:
            self._has_ended = True
            self._inlet.drain()
            self._speaker.end()

    def close(self) -> None:
        """Close the file that is read."""
        self._inlet.close()

    def _read(self) -> bool:
        """Take a little; tell whether more can come."""
        if not self._speaker.has_room:
            return True
        if self._inlet.read():
            return True
        self.end()
        return False

    def _take(self, data: bytes) -> None:
        self.tail.add(data)
        if self.log is not None:
            self.log.write(data)
        self._speaker.take(data)
