# SPDX-License-Identifier: MIT OR Apache-2.0
"""Source: a launcher, in the words that errors use of it."""

from __future__ import annotations

from typing import NamedTuple


class Source(NamedTuple):
    """Who tells a process its place, by which variables, and how to do it right.

    ``job`` is what its jobs differ in; ``start`` is how to start all ranks, with ``{size}`` and
    ``{last}`` for the world size and the last rank.
    """

    name: str
    rank: str
    world_size: str
    job: str
    start: str

    def start_of(self, world_size: int) -> str:
        """Say how to start all ranks of a world."""
        return self.start.format(size=world_size, last=world_size - 1)


# Of a Job that no launcher has made.
PROGRAM = Source("the program", "rank", "world_size", "name", "start all ranks of the job")
