# SPDX-License-Identifier: MIT OR Apache-2.0
"""SimulatedBackend: ranks are threads of this process. Not a mock: it keeps the whole contract.

Tests, tutorials and debugging run on it with nothing installed and nothing started.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Self

from ferrodist import _native
from ferrodist.backends import verdict
from ferrodist.backends.base import Statistics
from ferrodist.backends.control import Control, MessageWatch
from ferrodist.backends.scheduled import ScheduledBackend
from ferrodist.backends.verdict import Departure
from ferrodist.config import DEFAULT, Config, Timeout, check_timeout
from ferrodist.deadline import Deadline
from ferrodist.errors import CollectiveTimeout, InvalidRank, InvalidWorldSize, RankLost
from ferrodist.schedules.cost import LinkModel
from ferrodist.transports.faulty import Faults
from ferrodist.transports.threads import Switch, ThreadTransport

_WORLD = 0  # the group number of the first group


class _World:
    """What the ranks of one simulated world share: the switch and the register of groups."""

    def __init__(self, size: int, config: Config, faults: Faults | None) -> None:
        self.config = config
        self.switch = Switch(size, faults)
        self.switch.on_kill = self._kill
        self.model = LinkModel(*config.threads_link, is_serial=True)
        self.root = Control(self.switch, tuple(range(size)), _WORLD, config.notice)
        self.root.joined.update(range(size))
        self._groups: dict[int, Control] = {_WORLD: self.root}

    def group(self, parent: Control, members: tuple[int, ...], group: int) -> Control:
        """Find or make the control of a group that is being split off. Lock held."""
        if group not in self._groups:
            control = Control(self.switch, members, group, self.config.notice)
            for rank, world_rank in enumerate(members):
                control.desks[rank].departure = self.root.desks[world_rank].departure
            parent.children.append(control)
            self._groups[group] = control
        return self._groups[group]

    def leave(self, control: Control, rank: int, departure: Departure) -> None:
        """Let a rank leave a group and every group split off it; forget what all have left."""
        with self.switch.lock:
            self._leave_locked(control, control.members[rank], departure)

    def _leave_locked(self, control: Control, world_rank: int, departure: Departure) -> None:
        for child in [child for child in control.children if world_rank in child.members]:
            self._leave_locked(child, world_rank, departure)
        control.leave(control.rank_of(world_rank), departure)
        if all(desk.departure is not None for desk in control.desks):
            self._forget(control)

    def _forget(self, control: Control) -> None:
        self.switch.forget(control.group)
        self._groups.pop(control.group, None)
        for other in self._groups.values():
            if control in other.children:
                other.children.remove(control)
        if control is self.root:
            self.switch.close()

    def _kill(self, world_rank: int, how: str) -> NoReturn:
        self.leave(self.root, world_rank, verdict.died(f"was {how}"))
        raise RankLost(
            f"rank {world_rank} was {how}", rank=world_rank, this_rank=world_rank, how=how
        )


class SimulatedBackend(ScheduledBackend):
    """One rank of a world whose ranks are threads of this process.

    Example:
        >>> import threading, numpy as np, ferrodist
        >>> from ferrodist import SimulatedBackend
        >>> sums = {}
        >>> def train(backend):
        ...     sums[backend.rank] = ferrodist.allreduce(np.full(2, backend.rank), backend)
        >>> group = SimulatedBackend.create_group(3)
        >>> threads = [threading.Thread(target=train, args=(backend,)) for backend in group]
        >>> for thread in threads: thread.start()
        >>> for thread in threads: thread.join()
        >>> sums[0]
        array([3, 3])
    """

    def __init__(self, world: _World, control: Control, rank: int, config: Config) -> None:
        transport = ThreadTransport(world.switch, control.members[rank])
        super().__init__(transport, control, rank, config, world.model)
        self._world = world
        self._splits: dict[tuple[int, ...], int] = {}

    @classmethod
    def create_group(
        cls, world_size: int, *, config: Config | None = None, faults: Faults | None = None
    ) -> list[SimulatedBackend]:
        """Make a world of ``world_size`` ranks: one backend for each thread, in rank order."""
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise InvalidWorldSize(
                f"a group needs at least one rank, got {world_size!r}", got=world_size
            )
        config = Config.from_environment() if config is None else config
        world = _World(world_size, config, faults)
        return [cls(world, world.root, rank, config) for rank in range(world_size)]

    def split(self, ranks: Sequence[int], *, timeout: Timeout = DEFAULT) -> Self:
        """Make a group of some ranks of this one.

        Only the members call it, all with the same list; their ranks in the new group follow its
        order. Waits for all of them and names those missing.
        """
        self.check_usable()
        members = self._check_members(ranks)
        deadline = Deadline(self.timeout if timeout is DEFAULT else check_timeout(timeout))
        nth = self._splits[members] = self._splits.get(members, 0) + 1
        group = _native.fingerprint([self._control.group, nth, *members])
        world_members = tuple(self._control.members[rank] for rank in members)
        rank = members.index(self.rank)
        world, switch = self._world, self._world.switch
        with switch.lock:
            control = world.group(self._control, world_members, group)
            control.join(rank)
            watch = _SplitWatch(control, rank, members, deadline)
            while absent := watch.absent():
                self._transport.sleep(world_members[absent[0]], watch)
            if not control.is_complete:
                control.refuse_if_final(rank)
        backend = type(self)(world, control, rank, self.config)
        backend.timeout, backend.reproducible = self.timeout, self.reproducible
        return backend

    def _check_members(self, ranks: Sequence[int]) -> tuple[int, ...]:
        members = tuple(ranks)
        if not members:
            raise InvalidWorldSize(
                "split([]): a group needs at least one rank", this_rank=self.rank
            )
        for rank in members:
            self.check_rank(rank, "split")
        if len(set(members)) != len(members):
            twice = next(rank for rank in members if members.count(rank) > 1)
            raise InvalidRank(f"split({list(members)}): rank {twice} is named twice", rank=twice)
        if self.rank not in members:
            raise InvalidRank(
                f"split({list(members)}): called by rank {self.rank}, which is not a member; "
                "only members call split",
                rank=self.rank,
                this_rank=self.rank,
            )
        return members

    def statistics(self) -> Statistics:
        """Count what this rank's world has exchanged and who came late to this group's calls."""
        switch, desks = self._world.switch, self._control.desks
        with switch.lock:
            return Statistics(
                rank=self.rank,
                world_size=self.world_size,
                collectives=self._turns.last_ended,
                sent_nbytes=switch.sent_nbytes[self._transport.rank],
                received_nbytes=switch.received_nbytes[self._transport.rank],
                waiting_for=desks[self.rank].waiting_for,
                lateness=tuple(desk.lateness for desk in desks),
            )

    def give_up(self, reason: str) -> None:
        """Abort the group from outside, with no rank to blame."""
        with self._world.switch.lock:
            self._control.abort(None, reason)

    def _leave(self, departure: Departure) -> None:
        self._world.leave(self._control, self.rank, departure)


class _SplitWatch(MessageWatch):
    """Waits for members to join; gives the new group up if they do not."""

    def __init__(
        self, control: Control, rank: int, members: tuple[int, ...], deadline: Deadline
    ) -> None:
        super().__init__(control, rank, f"split({list(members)})", deadline)
        self._members = members

    def absent(self) -> list[int]:
        """List the ranks of the new group that have not called split."""
        return [rank for rank in range(len(self._members)) if rank not in self.control.joined]

    def look(self, peer: int) -> float:
        """Raise as a message would, and leave no half-made group behind."""
        try:
            return super().look(peer)
        except BaseException as error:
            self.control.abort(self.rank, str(error))
            raise

    def timed_out(self, peer: int) -> CollectiveTimeout:
        """Name all members that have not called, by their ranks in the parent group."""
        missing = [self._members[rank] for rank in self.absent()]
        return CollectiveTimeout(
            f"{self.what}: {verdict.names_of_ranks(missing)} did not call it within "
            f"{self.deadline}; every member must, with the same list",
            missing=missing,
            rank=missing[0],
            this_rank=self._members[self.rank],
        )
