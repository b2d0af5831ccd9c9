# SPDX-License-Identifier: MIT OR Apache-2.0
"""run on a Ray cluster: each rank is an actor in a placement group.

Hosts are Ray's nodes: ranks of one share memory, and speak TCP with the others. Actors and
placement group belong to this process: what it does not end itself, Ray ends when it is gone.
"""

from __future__ import annotations

import logging
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self

from ferrodist.config import Config, variable
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    GroupAborted,
    InvalidArgument,
    NotInitialized,
    RankLost,
    RendezvousError,
)
from ferrodist.launch.output.console import Console, console_of_streams
from ferrodist.launch.output.reader import PassThrough, Prefixer
from ferrodist.launch.output.streams import StreamSet
from ferrodist.launch.processes import sooner
from ferrodist.launch.ray_actors import STDERR, STDOUT, Board, Chunk, Rank, Task, import_ray
from ferrodist.launch.spawn import (
    NoResult,
    load_outcome,
    lost,
    pickled_call,
    results_of,
    sources_in_no_file,
)
from ferrodist.launch.worker import WorkerResult
from ferrodist.rendezvous.job import SECRET_NBYTES

logger = logging.getLogger("ferrodist")

_STRATEGIES = ("pack", "spread", "strict_pack", "strict_spread")
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # of an actor
_LONGEST_WAIT = 1.0


class Placement(NamedTuple):
    """What each of the ranks needs on its node, and how they are placed on the nodes."""

    num_ranks: int
    resources: Mapping[str, float]
    strategy: str

    def __str__(self) -> str:
        each = show_resources(self.resources)
        return f"{self.num_ranks} ranks with {each} each ({self.strategy})"


def run_on_ray(
    call: tuple[Callable[..., Any], tuple[Any, ...]],
    ranks: int | None,
    resources: Mapping[str, float] | None,
    strategy: str,
    deadline: Deadline,
    grace: float,
) -> list[Any]:
    ray = _connected_ray()
    wanted = _check_resources({"CPU": 1} if resources is None else resources, strategy)
    num_ranks = max(1, _num_that_fit(ray, wanted, strategy)) if ranks is None else ranks
    placement = Placement(num_ranks, wanted, strategy)
    task = pickled_call(*call)
    config = Config.from_environment()
    console = console_of_streams(sys.stdout, sys.stderr)
    with ExitStack() as stack:
        stack.callback(console.finish)
        output = _Output(console, num_ranks)
        stack.callback(output.finish)
        with (
            _placed(ray, placement, config, deadline) as group,
            _Actors(ray, group, placement, config, task) as actors,
        ):
            outcomes = actors.wait(output, deadline, grace)
        output.finish()
        console.finish(lambda: False)  # as any program waits for its reader
    results = results_of(outcomes, num_ranks, deadline)
    if isinstance(results, BaseException):
        raise results
    return results


# -- what is asked for, and where there is room ----------------------------------------------------


def _connected_ray() -> Any:
    ray = import_ray()
    if not ray.is_initialized():
        raise NotInitialized(
            "run: this process is not connected to a Ray cluster; call ray.init(address='auto') "
            "first on one of its nodes, or ray.init() for a cluster of this host alone"
        )
    return ray


def _check_resources(resources: Any, strategy: str) -> dict[str, float]:
    if strategy not in _STRATEGIES:
        known = ", ".join(_STRATEGIES)
        raise InvalidArgument(f"run: placement={strategy!r}: expected one of {known}", got=strategy)
    is_right = isinstance(resources, Mapping) and len(resources) > 0
    if not is_right or not all(_is_amount(*item) for item in resources.items()):
        raise InvalidArgument(
            f"run: resources={resources!r}: expected what each rank needs, as "
            "{'CPU': 2, 'GPU': 1}, in amounts above zero",
            got=resources,
        )
    return dict(resources)


def _is_amount(name: Any, amount: Any) -> bool:
    is_number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
    return isinstance(name, str) and is_number and amount > 0


def _num_that_fit(ray: Any, wanted: Mapping[str, float], strategy: str) -> int:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    each = [
        min(int(node.get(name, 0) / amount + 1e-6) for name, amount in wanted.items())
        for node in nodes
    ]
    if strategy == "strict_pack":
        return max(each, default=0)
    return sum(min(1, number) if strategy == "strict_spread" else number for number in each)


@contextmanager
def _placed(ray: Any, placement: Placement, config: Config, deadline: Deadline) -> Iterator[Any]:
    bundles = [dict(placement.resources) for _ in range(placement.num_ranks)]
    group = ray.util.placement_group(bundles, strategy=placement.strategy.upper())
    limit = sooner(deadline, Deadline(config.join_timeout))
    try:
        ready = group.ready()
        if not _is_done(ray, ready, sooner(limit, Deadline(config.log_wait_after))):
            room = f"{placement}; {_room(ray, placement)}"
            if limit.remaining() > 0:
                logger.warning("run waits for Ray to place %s", room)
            if not _is_done(ray, ready, limit):
                raise RendezvousError(
                    f"run: Ray had no room within {limit} for {room}. ask for less, end what holds "
                    f"resources, or raise {variable('join_timeout')} if nodes are still to come",
                    world_size=placement.num_ranks,
                )
        yield group
    finally:
        ray.util.remove_placement_group(group)


def _is_done(ray: Any, call: Any, deadline: Deadline) -> bool:
    return bool(ray.wait([call], timeout=max(0.0, deadline.remaining()))[0])


def _room(ray: Any, placement: Placement) -> str:
    num_fitting = _num_that_fit(ray, placement.resources, placement.strategy)
    return (
        f"the cluster has room for {num_fitting} when nothing else runs; free now: "
        f"{show_resources(ray.available_resources())}, of {show_resources(ray.cluster_resources())}"
    )


def show_resources(resources: Mapping[str, float]) -> str:
    """Show resources, without those by which Ray names nodes and placement groups."""
    parts = []
    for name, amount in sorted(resources.items()):
        if name == "memory":
            parts.append(f"{amount / 1e9:.3g} GB memory")
        elif name != "object_store_memory" and ":" not in name and "_group_" not in name:
            parts.append(f"{amount:g} {name}")
    return ", ".join(parts) or "nothing"


# -- this process ----------------------------------------------------------------------------------


class _Actors:
    """The ranks and their board. Leaving the context ends them all."""

    def __init__(
        self, ray: Any, group: Any, placement: Placement, config: Config, call: bytes
    ) -> None:
        self._ray = ray
        self._ranks: list[Any] = []
        self._running: dict[Any, int] = {}  # the call of each rank that has not ended
        bundles, self._addresses = _nodes_of_bundles(ray, group)
        num_ranks = placement.num_ranks
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True
        )
        board = ray.remote(Board).options(
            num_cpus=0, max_concurrency=4 * num_ranks + 8, scheduling_strategy=here
        )
        self._board = board.remote()
        try:
            name, secret = f"ray-{secrets.token_hex(8)}", secrets.token_bytes(SECRET_NBYTES)
            towards, sources = self._addresses[0], sources_in_no_file()
            task = ray.put(Task(name, num_ranks, secret, config, towards, call, sources))
            for rank, bundle in enumerate(bundles):
                options = _actor_options(ray, group, placement.resources, bundle)
                self._ranks.append(ray.remote(Rank).options(**options).remote(rank, self._board))
                self._running[self._ranks[-1].perform.remote(task)] = rank
        except BaseException:  # Ctrl-C too: no actor may be left on the cluster
            self.close()
            raise

    def wait(self, output: _Output, deadline: Deadline, grace: float) -> dict[int, Any]:
        """Return what became of the ranks, without those that had not ended in time.

        From the first failure on, the others get ``grace`` seconds.
        """
        outcomes: dict[int, Any] = {}
        reading = self._board.read.remote()
        while self._running and deadline.remaining() > 0:
            longest = min(deadline.remaining(), output.wait_seconds(), _LONGEST_WAIT)
            awaited = [*self._running, *([reading] if output.has_room else [])]
            done, _ = self._ray.wait(awaited, timeout=max(0.0, longest))
            if reading in done:
                output.take(self._read(reading))
                reading = self._board.read.remote()
            ended = self._take_ended()
            if any(isinstance(one, NoResult) for one in ended.values()):
                deadline = sooner(deadline, Deadline(grace))
            outcomes |= ended
            output.write_due()
        self._board.close.remote()
        for last in (reading, self._board.read.remote()):
            output.take(self._read(last))
        return outcomes

    def _read(self, reading: Any) -> list[Chunk]:
        try:
            chunks: list[Chunk] = self._ray.get(reading)
        except self._ray.exceptions.RayError as error:
            text = "run: the actor died that passes on what ranks print, and with it the job"
            raise GroupAborted(text, reason=str(error)) from error
        return chunks

    def _take_ended(self) -> dict[int, Any]:
        calls = list(self._running)
        done, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        ranks = [self._running.pop(call) for call in done]
        return {rank: self._outcome(rank, call) for rank, call in zip(ranks, done, strict=True)}

    def _outcome(self, rank: int, call: Any) -> Any:
        now = time.monotonic()  # clocks of other hosts say nothing here
        try:
            result = WorkerResult(*self._ray.get(call))
        except self._ray.exceptions.RayError as error:
            return NoResult(rank, now, _lost(rank, self._addresses[rank], error))
        return load_outcome(rank, result._replace(when=now))

    def close(self) -> None:
        for actor in [*self._ranks, self._board]:
            self._ray.kill(actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _nodes_of_bundles(ray: Any, group: Any) -> tuple[list[int], list[str]]:
    """Return the bundles and the addresses of their nodes, so that ranks of a node are in a row."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    node_ids = ray.util.placement_group_table(group)["bundles_to_node_id"]
    firsts = list(dict.fromkeys(node_ids[bundle] for bundle in sorted(node_ids)))
    bundles = sorted(node_ids, key=lambda bundle: (firsts.index(node_ids[bundle]), bundle))
    return bundles, [addresses[node_ids[bundle]] for bundle in bundles]


def _actor_options(
    ray: Any, group: Any, resources: Mapping[str, float], bundle: int
) -> dict[str, Any]:
    """Ask for all of the bundle, so that Ray gives the actor its GPUs."""
    where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=bundle
    )
    known = {_OPTIONS[name]: amount for name, amount in resources.items() if name in _OPTIONS}
    others = {name: amount for name, amount in resources.items() if name not in _OPTIONS}
    return {"num_cpus": 0, **known, "resources": others, "scheduling_strategy": where}


def _lost(rank: int, address: str, error: Exception) -> RankLost:
    text = re.sub(r"\x1b\[\d*m", "", str(error)).strip()
    pid = re.search(r"\bpid(?:: |=)(\d+)", text)
    if code := re.search(r"with an exit code (\d+)", text):
        how = f"ended with exit code {code[1]} without a result"
    elif "connection error code" in text:
        how = "died at once, as by SIGKILL, a crash or os._exit"
    elif "unavailable" in text or "node has died" in text:
        how = "is out of reach: its node died, or the way to it"
    else:
        how = f"died; Ray says: {text.splitlines()[-1].strip().rstrip('.')}"
    return lost(rank, f"pid {pid[1]} on {address}" if pid else f"on {address}", how)


class _Output(StreamSet):
    """What the ranks print, on its way to the console of this process."""

    def __init__(self, console: Console, num_ranks: int) -> None:
        super().__init__(console)
        self._by_file: dict[tuple[int, int], Prefixer] = {}
        for file, writer in ((STDOUT, console.stdout), (STDERR, console.stderr)):
            self._by_file[0, file] = PassThrough(writer)
            for rank in range(1, num_ranks):
                self._by_file[rank, file] = Prefixer(rank, writer)

    @property
    def _streams(self) -> list[Prefixer]:
        return list(self._by_file.values())

    @property
    def has_room(self) -> bool:
        return all(stream.has_room for stream in self._streams)

    def take(self, chunks: list[Chunk]) -> None:
        for rank, file, data in chunks:
            self._by_file[rank, file].take(data)
