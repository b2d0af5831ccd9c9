# SPDX-License-Identifier: MIT OR Apache-2.0
"""Flow: one stream of one rank, from its pipe or terminal to the console, a file and the memory."""

from __future__ import annotations

import math

from ferrodist.launch.output.last_words import Tail
from ferrodist.launch.output.pipes import Inlet, Watcher
from ferrodist.launch.output.sinks import FileSink
from ferrodist.launch.output.speakers import Speaker


class Flow:
    """What is read from a file and where it goes."""

    def __init__(self, file: int, speaker: Speaker, log: FileSink | None) -> None:
        self.log = log
        self.tail = Tail()
        self._speaker = speaker
        self._inlet = Inlet(file, self._take, waits_for_lines=speaker.waits_for_lines)
        self._crew: Watcher | None = None
        self._is_dammed = False  # not watched, because there was no room
        self._has_ended = False

    def watch(self, crew: Watcher) -> None:
        """Let it flow while the crew is waited for."""
        self._crew = crew
        self._inlet.watch(crew, self._read)

    def write_due(self) -> None:
        """Write what was held long enough; if it was dammed and there is room, let it flow."""
        if not self._is_dammed:
            self._speaker.write_due()
        elif self._crew is not None and self._speaker.has_room:
            self._is_dammed = False
            self.watch(self._crew)

    def wait_seconds(self) -> float:
        """Return how long ``write_due`` will have nothing to do, unless something is read."""
        return math.inf if self._is_dammed else self._speaker.wait_seconds()

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
        """Take a little; tell whether to be called again."""
        if not self._speaker.has_room:
            self._is_dammed = True  # else we would be called at once, and again and again
            return False
        if self._inlet.read():
            return True
        self.end()
        return False

    def _take(self, data: bytes) -> None:
        self.tail.add(data)
        if self.log is not None:
            self.log.write(data)
        self._speaker.take(data)
