# SPDX-License-Identifier: MIT OR Apache-2.0
"""HostMap: which ranks of a group are on which host, and who leads each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostMap:
    """The hosts of a group, in the order of their lowest ranks; ``here`` is this rank's host."""

    hosts: tuple[tuple[int, ...], ...]
    here: int
    rank: int

    @classmethod
    def of(cls, names: Sequence[str], rank: int) -> HostMap:
        """Sort ranks by the names of their hosts; ``names[i]`` is that of rank i."""
        ranks: dict[str, list[int]] = {}
        for other, name in enumerate(names):
            ranks.setdefault(name, []).append(other)
        return cls(tuple(map(tuple, ranks.values())), list(ranks).index(names[rank]), rank)

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks on this host."""
        return self.hosts[self.here]

    @property
    def local_rank(self) -> int:
        """This rank's number among those on its host."""
        return self.local.index(self.rank)

    @property
    def are_equal(self) -> bool:
        """Whether every host has as many ranks as every other."""
        return len(set(map(len, self.hosts))) == 1

    @property
    def are_in_order(self) -> bool:
        """Whether the ranks of each host follow each other, so that its blocks lie together."""
        return all(ranks[-1] - ranks[0] == len(ranks) - 1 for ranks in self.hosts)

    def node_leaders(self, root: int | None = None) -> list[int]:
        """List one rank per host: the root for its own, the lowest for the others."""
        return [root if root is not None and root in ranks else ranks[0] for ranks in self.hosts]

    def host_of(self, rank: int) -> int:
        """Return the number of the host that a rank is on."""
        return next(host for host, ranks in enumerate(self.hosts) if rank in ranks)

    def rail(self) -> list[int]:
        """List the ranks that have this rank's number on their hosts."""
        return [ranks[self.local_rank] for ranks in self.hosts]
