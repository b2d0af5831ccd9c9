# SPDX-License-Identifier: MIT OR Apache-2.0
"""TorchDistributedBackend: the engines of torch, Gloo and NCCL. ``docs/engines.md`` says more.

Messages, and the exchange before each collective, go over a Gloo group of our own, also where the
collectives are those of NCCL or of a group that the program has made. Groups that are split off
have Gloo groups of their own, whose members meet at a store that their first rank serves.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Self

from ferrodist.backends.peers import describe_difference
from ferrodist.backends.progress import ProgressThread
from ferrodist.backends.provider import RankStatus
from ferrodist.backends.provider_backend import ProviderBackend
from ferrodist.backends.provider_link import EAGER_NBYTES
from ferrodist.backends.registry import program_end
from ferrodist.backends.running_call import CollectiveArgs
from ferrodist.backends.torch_calls import Caller, EngineCall, Exchange
from ferrodist.backends.torch_messages import FOREVER, Key, Messages, Receive, Send, hang_up, torch
from ferrodist.buffer import Buffer, DeviceBuffer, DType
from ferrodist.call import Kind
from ferrodist.config import Config, variable
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    BackendUnavailable,
    DistributedError,
    InvalidArgument,
    RendezvousError,
)
from ferrodist.rendezvous import Job
from ferrodist.rendezvous.interfaces import choose_address
from ferrodist.rendezvous.mesh import host_id, open_exchange

_c10d = torch.distributed.distributed_c10d
_LOOPBACK = "127.0.0.1"
_WORLD = b"world".ljust(16)  # the group of all ranks
_STORE_TAG = -1  # of the message that says where the members of a split meet
_SHORTEST_WAIT = timedelta(milliseconds=1)  # torch takes less for no limit at all
_SPIN_SECONDS = 2e-4
_NAP = 1e-3  # seconds between looks at a call that has failed, until it is known by whom
_LEAST_TIMEOUT = 1.0  # seconds for torch's own meeting, also right before the deadline
_ADDRESS_NBYTES = 128


class Started:
    """A collective that was started, as a request."""

    __slots__ = ("_call", "_engine", "_has_failed", "_is_over", "_kept", "_spins")

    def __init__(
        self, engine: TorchEngine, call: EngineCall, kept: object, *, is_small: bool
    ) -> None:
        self._engine, self._call, self._kept = engine, call, kept
        self._is_over = self._has_failed = False
        # Half the time of a small call is that of waking threads.
        self._spins = is_small and not isinstance(threading.current_thread(), ProgressThread)

    def test(self) -> bool:
        """Tell whether it is done; raises if a rank is lost, without which it never will be."""
        call = self._call
        if self._is_over:
            return True
        with using(call.stream):
            return self._test(call)

    def _test(self, call: EngineCall) -> bool:
        if call.work is not None:
            if call.stream is None and not call.work.is_completed():
                return False
            try:
                call.work.wait()  # on a device the stream waits, not the program
            except RuntimeError as error:
                self._has_failed = True
                self._engine.explain(error)
                return False
        if call.finish is not None:
            call.finish()
        self._is_over, self._kept = True, None
        return True

    def wait(self, seconds: float) -> None:
        """Wait until it is done, or for a while; first awake, if it may be done soon."""
        work = self._call.work
        if self._is_over or work is None:
            return
        end = time.perf_counter() + min(seconds, _SPIN_SECONDS)
        while self._spins and not work.is_completed():
            os.sched_yield()
            self._spins = time.perf_counter() < end
        if work.is_completed():
            if self._has_failed:
                time.sleep(min(seconds, _NAP))
            return
        try:
            work.wait(max(_SHORTEST_WAIT, timedelta(seconds=seconds)))
        except RuntimeError:
            return  # time is up, or it has failed: test tells

    def cancel(self) -> bool:
        """Give it up; torch may still use its memory, which is kept."""
        if not self._is_over:
            self._engine.give_up(self)
        return not self._is_over


class TorchEngine:
    """One rank of a group; ``members`` are the ranks of its members in the world.

    ``host`` does the collectives of memory of the host, ``device`` those of a device, if any.
    """

    blocks = False  # a collective that waits for a rank that has died would wait for ever

    def __init__(
        self,
        world: World,
        members: Sequence[int],
        group: bytes,
        control: Any,
        host: Any,
        device: Any,
    ) -> None:
        self.rank, self.world_size = members.index(world.rank), len(members)
        hosts = [world.hosts[member] for member in members]
        self.local_rank = hosts[: self.rank].count(hosts[self.rank])
        self.local_world_size = hosts.count(hosts[self.rank])
        self.given_up: list[Started] = []
        self._world, self._members, self._group = world, tuple(members), group
        self._control: Any = control
        self._host: Any = Caller(host, self.rank, self.world_size, "cpu")
        self._device: Any = None
        if device is not None:
            self._device = Caller(device, self.rank, self.world_size, world.device)
        self._exchange: Exchange | None = None
        self._splits: dict[tuple[int, ...], int] = defaultdict(int)

    def give_up(self, started: Started) -> None:
        """Keep what torch may still use."""
        self.given_up.append(started)
        self._exchange = None

    # -- collectives ----------------------------------------------------------------------------

    def start_minimum(self, words: memoryview) -> Started:
        """Start the exchange of an entry."""
        if self._exchange is None:
            self._exchange = Exchange(self._control, self.world_size, len(words))
        exchange = self._exchange
        return Started(self, exchange.start(words), (exchange, words), is_small=True)

    def collective(self, *args: Any) -> Any:
        """Do nothing: ``start`` does all of them."""
        raise NotImplementedError

    def start(
        self, kind: Kind, input: Buffer | None, output: Buffer | None, args: CollectiveArgs
    ) -> Any:
        """Start a collective that torch does as we promise."""
        sample = input if input is not None else output
        caller, stream = self._host, None
        if isinstance(sample, DeviceBuffer):
            caller, stream = self._device, sample.stream
        with using(stream):
            call = caller.start(kind, input, output, args)
        if call is None:
            return NotImplemented
        is_small = sample is None or sample.nbytes <= EAGER_NBYTES
        return Started(self, call._replace(stream=stream), (input, output, call), is_small=is_small)

    def explain(self, error: RuntimeError) -> None:
        """Raise what an error of torch means, unless a rank was lost and it is not known which."""
        if "gloo/transport" not in str(error):
            raise error
        for rank, member in enumerate(self._members):
            if member in self._world.messages.lost:
                raise ConnectionError(rank) from error

    @property
    def device(self) -> str:
        """The type of devices on which collectives are done; '' if there is none."""
        return self._world.device if self._device is not None else ""

    def runs_on_device(self, kind: Kind, dtype: DType, args: CollectiveArgs) -> bool:
        """Tell whether a collective is done there."""
        return bool(self._device.does(kind, dtype, args))

    def does(self, kind: Kind, dtype: DType, args: CollectiveArgs) -> bool:
        """Tell whether Gloo does a collective of arrays of the host."""
        return bool(self._host.does(kind, dtype, args))

    def bind(self, *args: Any) -> None:
        """Leave it to ``start``: torch takes ten times as long as the way there."""

    # -- messages -------------------------------------------------------------------------------

    def isend(self, data: memoryview, peer: int, tag: int) -> Send:
        """Send bytes."""
        return self._world.messages.isend(self._key(peer, tag), data, peer)

    def irecv(self, memory: memoryview, peer: int, tag: int) -> Receive:
        """Receive the next message of a rank with this tag."""
        return self._world.messages.irecv(self._key(peer, tag), memory, peer)

    def iprobe(self, peer: int, tag: int) -> int | None:
        """Return the length of the next message; None if none came."""
        return self._world.messages.iprobe(self._key(peer, tag))

    def has_message(self, tag: int) -> bool:
        """Tell whether anybody has sent something with this tag that nobody receives."""
        return self._world.messages.has_message(self._group, tag)

    def _key(self, peer: int, tag: int) -> Key:
        return self._group, self._members[peer], tag

    # -- groups and ends ------------------------------------------------------------------------

    def split(self, ranks: Sequence[int]) -> TorchEngine:
        """Make a group of some ranks of this one, which meet at a store of the first of them."""
        ranks, world = tuple(ranks), self._world
        self._splits[ranks] += 1
        name = repr((self._group, ranks, self._splits[ranks])).encode()
        group = hashlib.blake2b(name, digest_size=16).digest()
        members = [self._members[rank] for rank in ranks]
        deadline = Deadline(world.join_timeout)
        try:
            store = self._meet(group, members, deadline)
            place = (store, members.index(world.rank), len(members))
            control = world.new_gloo_group(*place, deadline)
            device = None if self._device is None else world.new_device_group(*place)
        except (ConnectionError, TimeoutError, RuntimeError) as error:
            raise RendezvousError(
                f"split({list(ranks)}): a member did not get through: {_first_line(error)}",
                this_rank=self.rank,
            ) from error
        return TorchEngine(world, members, group, control, control, device)

    def _meet(self, group: bytes, members: Sequence[int], deadline: Deadline) -> Any:
        """Open the store of a new group; its first rank tells the others where it is."""
        world, messages = self._world, self._world.messages
        if len(members) == 1:
            return torch.distributed.HashStore()
        if world.rank == members[0]:
            store = _serve_store(world.address, deadline)
            told = f"{world.address} {store.port}".encode()
            for member in members[1:]:
                messages.isend((group, member, _STORE_TAG), memoryview(told), member)
            return store
        memory = bytearray(_ADDRESS_NBYTES)
        request = messages.irecv((group, members[0], _STORE_TAG), memoryview(memory), members[0])
        while not request.test():
            if deadline.remaining() <= 0:
                raise TimeoutError(f"nothing has come within {deadline}")
            request.wait(_NAP)
        return _open_store(bytes(memory).rstrip(b"\0"), deadline)

    def abort(self, reason: str) -> None:
        """Do nothing: nobody is inside torch, and what was started is given up by who waits."""

    def close(self) -> None:
        """Leave; the world closes the connections of all messages."""
        if self._group == _WORLD:
            self._world.messages.close()
        else:
            self._world.messages.forget(self._group)
            if self.given_up:  # torch waits for it when the group is dropped
                hang_up(self._control, [one for one in range(self.world_size) if one != self.rank])
        self._control = self._host = self._device = None

    def status(self, rank: int) -> RankStatus:
        """Tell whether the connection to a rank stands."""
        return "lost" if self._members[rank] in self._world.messages.lost else "alive"


def using(stream: Any) -> AbstractContextManager[Any]:
    """Make a stream of a device the current one, if there is one."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


# -- a process of the world ------------------------------------------------------------------------


class World:
    """What a process has once, for all its groups."""

    messages: Messages
    hosts: Sequence[str]

    def __init__(self, rank: int, world_size: int, address: str, config: Config) -> None:
        self.rank, self.world_size, self.address = rank, world_size, address
        self.join_timeout = config.join_timeout
        self.device = "cuda"
        self._gloo_device = _c10d.ProcessGroupGloo.create_device(hostname=address)

    def open(self, store: Any, config: Config, deadline: Deadline) -> Any:
        """Connect all ranks of the world; return the Gloo group of all."""
        if config.tls:
            raise InvalidArgument(
                f"{variable('tls')}=1: what Gloo sends is not encrypted by ferrodist; unset it, or "
                "use another backend"
            )
        control = self.new_gloo_group(store, self.rank, self.world_size, deadline)
        told = _gather(control, {"host": config.host_id or host_id(), **config.shared()})
        self.hosts = [str(one.pop("host")) for one in told]
        difference = describe_difference(told)
        if difference:
            raise InvalidArgument(f"{difference}; set it to the same on all ranks")
        self.messages = Messages(control, self.rank, self.world_size)
        return control

    def new_gloo_group(self, store: Any, rank: int, size: int, deadline: Deadline) -> Any:
        """Make a Gloo group of torch's of those who share a store."""
        options = _c10d.ProcessGroupGloo._Options()
        options._devices, options._threads = [self._gloo_device], 2
        options._timeout = _timeout(deadline)
        store = torch.distributed.PrefixStore("ferrodist/gloo", store)
        return _c10d.ProcessGroupGloo(store, rank, size, options)

    def new_device_group(self, store: Any, rank: int, size: int) -> Any:
        """Make an NCCL group of torch's; it connects in its first collective."""
        store = torch.distributed.PrefixStore("ferrodist/nccl", store)
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        return _c10d.ProcessGroupNCCL(store, rank, size, options)


def _gather(process_group: Any, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Gather what each rank has to tell."""
    own = json.dumps(facts).encode()
    length = torch.tensor([len(own)])
    process_group.allreduce([length], torch.distributed.ReduceOp.MAX).wait()
    padded = torch.frombuffer(bytearray(own.ljust(int(length))), dtype=torch.uint8)
    told = torch.empty(process_group.size() * len(padded), dtype=torch.uint8)
    process_group._allgather_base(told, padded).wait()
    return [json.loads(bytes(one.numpy())) for one in told.chunk(process_group.size())]


def _serve_store(address: str, deadline: Deadline) -> Any:
    """Serve a store at this address only: by itself torch listens at all of the host's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=1024) as listener:
        return torch.distributed.TCPStore(
            address,
            listener.getsockname()[1],
            is_master=True,
            timeout=_timeout(deadline),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def _open_store(told: bytes, deadline: Deadline) -> Any:
    host, port = told.decode().split()
    return torch.distributed.TCPStore(host, int(port), is_master=False, timeout=_timeout(deadline))


def _timeout(deadline: Deadline) -> timedelta:
    return timedelta(seconds=min(max(deadline.remaining(), _LEAST_TIMEOUT), 1e6))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["?"])[0][:200]


# -- joining ---------------------------------------------------------------------------------------


class TorchDistributedBackend(ProviderBackend):
    """Ranks that communicate through torch.distributed: Gloo on the host, NCCL on GPUs."""

    _has_nccl = False
    _device_engine = "nccl"
    _provider: TorchEngine

    @property
    def _device(self) -> str:  # type: ignore[override]  # it has one, or none
        return self._provider.device

    def _runs_on_device(self, kind: Kind, dtype: DType, args: CollectiveArgs) -> bool:
        return self._provider.runs_on_device(kind, dtype, args)

    @classmethod
    def join(cls, job: Job, *, config: Config | None = None) -> Self:
        """Connect to the other ranks of the job; torch's default group stays the program's."""
        config = Config.from_environment() if config is None else config
        if cls._has_nccl:
            _check_nccl()
        deadline = Deadline(config.join_timeout)
        if job.world_size == 1:
            world = World(0, 1, _LOOPBACK, config)
            return cls._open(world, torch.distributed.HashStore(), config, deadline)
        with open_exchange(job, config, deadline) as exchange:
            address = _LOOPBACK
            if not job.meets_here:
                _, address = choose_address(config.socket_ifname, exchange.towards)
            store = _serve_store(address, deadline) if job.rank == 0 else None
            told = exchange.gather(f"{address} {0 if store is None else store.port}".encode())
            try:
                store = _open_store(told[0], deadline) if store is None else store
                world = World(job.rank, job.world_size, address, config)
                return cls._open(world, store, config, deadline)
            except RuntimeError as error:  # whatever torch raises
                if isinstance(error, DistributedError):
                    raise
                raise RendezvousError(
                    f"job {job.name!r}: rank {job.rank} could not connect by Gloo at {address}: "
                    f"{_first_line(error)}",
                    this_rank=job.rank,
                ) from error

    @classmethod
    def _open(cls, world: World, store: Any, config: Config, deadline: Deadline) -> Self:
        control = world.open(store, config, deadline)
        device = None
        if cls._has_nccl:
            device = world.new_device_group(store, world.rank, world.world_size)
        members = range(world.world_size)
        return cls(TorchEngine(world, members, _WORLD, control, control, device), config)

    @staticmethod
    def from_process_group(
        process_group: Any, config: Config | None = None
    ) -> TorchDistributedBackend:
        """Make a backend of a group of torch.distributed; all its ranks call it.

        Collectives are those of the group: of Gloo for arrays of the host, of NCCL for tensors of
        GPUs, whatever it has. Its calls and those of the backend must come in one order on all
        ranks. What travels besides goes over a Gloo group of the backend's own.

        Example:
            >>> import ferrodist, torch.distributed as dist
            >>> dist.init_process_group("gloo")  # doctest: +SKIP
            >>> group = dist.group.WORLD
            >>> backend = ferrodist.TorchDistributedBackend.from_process_group(
            ...     group
            ... )  # doctest: +SKIP
        """
        config = Config.from_environment() if config is None else config
        if not isinstance(process_group, torch.distributed.ProcessGroup):
            name = type(process_group).__name__
            text = f"from_process_group: expected a group of torch.distributed, got {name}"
            raise InvalidArgument(text, got=name)
        host, device = _find_engine(process_group, "cpu"), _find_engine(process_group, "cuda")
        if host is None and device is None:
            found = process_group.name()
            text = f"from_process_group: expected a group of gloo or nccl, got one of {found}"
            raise InvalidArgument(text, got=found)
        deadline = Deadline(config.join_timeout)
        rank, world_size = process_group.rank(), process_group.size()
        store = _store_of(process_group, rank)
        address = _address_of(store, rank, world_size, config)
        world = World(rank, world_size, address, config)
        control = world.open(store, config, deadline)
        kind = GlooBackend if device is None else NcclBackend
        engine = TorchEngine(
            world, range(world_size), _WORLD, control, control if host is None else host, device
        )
        made = kind(engine, config)
        program_end.watch(made)
        return made


class GlooBackend(TorchDistributedBackend):
    """Arrays of the host, by Gloo; those of a device go through host memory."""


class NcclBackend(TorchDistributedBackend):
    """Tensors of GPUs by NCCL, on the device; everything else by Gloo."""

    _has_nccl = True


def _check_nccl() -> None:
    if not torch.distributed.is_nccl_available():
        raise BackendUnavailable(
            f"backend 'nccl' needs a torch that was built with NCCL, and this is torch "
            f"{torch.__version__}: install one for CUDA, or use backend 'gloo'"
        )
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            "backend 'nccl' needs a GPU, and torch finds none: 'ferrodist doctor' says what it "
            "sees; on CPUs use backend 'gloo'"
        )


def _find_engine(process_group: Any, device: str) -> Any:
    """Return the part of a group that serves a device, if it is one we know."""
    try:
        found = process_group._get_backend(torch.device(device))
    except RuntimeError:
        return None
    return found if found.name() == {"cpu": "gloo", "cuda": "nccl"}[device] else None


def _store_of(process_group: Any, rank: int) -> Any:
    """Return a part of the group's store in which nobody has written before."""
    if hasattr(process_group, "get_group_store"):
        store = process_group.get_group_store()
    else:
        _, store = _c10d._world.pg_map[process_group]
    nth = store.add(f"ferrodist/{rank}", 1)
    return torch.distributed.PrefixStore(f"ferrodist/{nth}", store)


def _address_of(store: Any, rank: int, world_size: int, config: Config) -> str:
    """Choose where other ranks find this one: on loopback if all are on one host."""
    store.set(f"host/{rank}", host_id())
    hosts = {store.get(f"host/{peer}") for peer in range(world_size)}
    if len(hosts) == 1:
        return _LOOPBACK
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return choose_address(config.socket_ifname, str(getattr(store, "host", "")))[1]
