# SPDX-License-Identifier: MIT OR Apache-2.0
"""Distributed training for any array: backends, collectives and, on top of them, parallelism.

Public names and nothing else. Each is imported when first asked for, so that the command line
starts without NumPy and a program without the parts that it does not use.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ferrodist.version import __version__ as __version__

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend, Statistics
    from ferrodist.backends.engines.mpi import MpiBackend as MpiBackend
    from ferrodist.backends.engines.torch import TorchDistributedBackend as TorchDistributedBackend
    from ferrodist.backends.grid import Grid
    from ferrodist.backends.hybrid import HybridBackend
    from ferrodist.backends.registry import init, is_initialized, local_rank, rank, world_size
    from ferrodist.backends.shared_memory import SharedMemoryBackend
    from ferrodist.backends.tcp import TcpBackend
    from ferrodist.backends.threads import SimulatedBackend
    from ferrodist.collectives import (
        all_gather,
        all_gather_object,
        all_gather_uneven,
        all_to_all,
        all_to_all_uneven,
        allreduce,
        allreduce_,
        barrier,
        broadcast,
        broadcast_,
        broadcast_object,
        exscan,
        gather,
        gather_object,
        gather_uneven,
        probe,
        recv,
        recv_object,
        reduce,
        reduce_scatter,
        reduce_scatter_uneven,
        scan,
        scatter_object,
        send,
        send_object,
        sendrecv,
        try_probe,
    )
    from ferrodist.collectives.codec import register_type
    from ferrodist.collectives.scatter import scatter, scatter_uneven
    from ferrodist.config import DEFAULT, DEFAULT_COLLECTIVE_TIMEOUT, Config
    from ferrodist.errors import (
        AuthenticationError,
        BackendClosed,
        BackendUnavailable,
        CollectiveMismatch,
        CollectiveTimeout,
        DistributedError,
        Evicted,
        GroupAborted,
        InvalidArgument,
        InvalidRank,
        InvalidShape,
        InvalidWorldSize,
        NotInitialized,
        OutOfMemory,
        ProtocolError,
        RankLost,
        RendezvousError,
        SelfSend,
        SizeMismatch,
        UnsupportedArray,
        UnsupportedOp,
    )
    from ferrodist.launch.spawn import run
    from ferrodist.message_status import ANY_SOURCE, ANY_TAG, PROC_NULL, Status
    from ferrodist.parallel.bucket import Bucket
    from ferrodist.parallel.compression import Compress, PowerSGD, TopK
    from ferrodist.parallel.data_parallel import DataParallel, average_gradients
    from ferrodist.parallel.ddp import DDP
    from ferrodist.parallel.sharding import IndexShards, ShardedSampler, shard_indices
    from ferrodist.parallel.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
    from ferrodist.reduce_op import ReduceOp
    from ferrodist.work import Work, wait_all, wait_any

__all__ = [
    # start
    "init", "run", "rank", "world_size", "local_rank", "is_initialized",
    # training
    "DDP", "Bucket", "Compress", "PowerSGD", "TopK", "SyncBatchNorm", "convert_sync_batchnorm",
    "DataParallel", "average_gradients", "ShardedSampler", "IndexShards", "shard_indices",
    # collectives
    "allreduce", "allreduce_", "broadcast", "broadcast_", "reduce", "all_gather",
    "all_gather_uneven", "gather", "gather_uneven", "scatter", "scatter_uneven", "reduce_scatter",
    "reduce_scatter_uneven", "scan", "exscan", "all_to_all", "all_to_all_uneven", "barrier",
    # point to point
    "send", "recv", "sendrecv", "send_object", "recv_object", "probe", "try_probe", "ANY_SOURCE",
    "ANY_TAG", "PROC_NULL", "Status", "wait_all", "wait_any",
    # objects
    "broadcast_object", "all_gather_object", "gather_object", "scatter_object", "register_type",
    # what they are given and give back
    "ReduceOp", "Work", "Backend", "Grid", "HybridBackend", "SharedMemoryBackend",
    "SimulatedBackend", "TcpBackend", "Statistics", "Config", "DEFAULT",
    "DEFAULT_COLLECTIVE_TIMEOUT",
    # errors
    "DistributedError", "InvalidArgument", "InvalidWorldSize", "InvalidRank", "InvalidShape",
    "SelfSend", "UnsupportedArray", "UnsupportedOp", "CollectiveMismatch", "SizeMismatch",
    "CollectiveTimeout", "RankLost", "GroupAborted", "Evicted", "RendezvousError",
    "AuthenticationError", "ProtocolError", "BackendUnavailable", "BackendClosed",
    "NotInitialized", "OutOfMemory",
]  # fmt: skip

_NAMES_OF = {
    "backends.base": "Backend Statistics",
    "backends.grid": "Grid",
    "backends.hybrid": "HybridBackend",
    "backends.engines.mpi": "MpiBackend",  # not in __all__: "import *" would import MPI
    "backends.registry": "init is_initialized local_rank rank world_size",
    "backends.shared_memory": "SharedMemoryBackend",
    "backends.tcp": "TcpBackend",
    "backends.threads": "SimulatedBackend",
    "backends.engines.torch": "TorchDistributedBackend",  # not in __all__ either: torch
    "collectives": (
        "all_gather all_gather_object all_gather_uneven all_to_all all_to_all_uneven allreduce "
        "allreduce_ barrier broadcast broadcast_ broadcast_object exscan gather gather_object "
        "gather_uneven probe recv recv_object reduce reduce_scatter reduce_scatter_uneven scan "
        "scatter_object send send_object sendrecv try_probe"
    ),
    "collectives.codec": "register_type",
    "collectives.scatter": "scatter scatter_uneven",
    "config": "Config DEFAULT DEFAULT_COLLECTIVE_TIMEOUT",
    "errors": (
        "AuthenticationError BackendClosed BackendUnavailable CollectiveMismatch "
        "CollectiveTimeout DistributedError Evicted GroupAborted InvalidArgument InvalidRank "
        "InvalidShape InvalidWorldSize NotInitialized OutOfMemory ProtocolError RankLost "
        "RendezvousError SelfSend SizeMismatch UnsupportedArray UnsupportedOp"
    ),
    "launch.spawn": "run",
    "message_status": "ANY_SOURCE ANY_TAG PROC_NULL Status",
    "parallel.bucket": "Bucket",
    "parallel.compression": "Compress PowerSGD TopK",
    "parallel.data_parallel": "DataParallel average_gradients",
    "parallel.ddp": "DDP",
    "parallel.sharding": "IndexShards ShardedSampler shard_indices",
    "parallel.sync_batch_norm": "SyncBatchNorm convert_sync_batchnorm",
    "reduce_op": "ReduceOp",
    "work": "Work wait_all wait_any",
}
_ENGINES = {  # classes that can be named where their library is missing; for missing_engine
    "MpiBackend": ("mpi", "from_comm"),
    "TorchDistributedBackend": ("gloo", "from_process_group"),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
_PACKAGES = {module.partition(".")[0] for module in _NAMES_OF}  # ferrodist.errors, to name one


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF and name not in _PACKAGES:
        module = sys.modules[__name__]  # lets Python suggest the name that was meant
        raise AttributeError(f"module 'ferrodist' has no attribute {name!r}", name=name, obj=module)
    import importlib

    if _MODULE_OF.get(name, "").startswith("backends."):
        importlib.import_module("ferrodist.collectives")  # adds the calls to Backend as methods
    try:
        found = importlib.import_module(f"ferrodist.{_MODULE_OF.get(name, name)}")
    except ImportError:
        if name not in _ENGINES:
            raise
        from ferrodist.backends.registry import missing_engine

        return missing_engine(name, *_ENGINES[name])
    if name in _MODULE_OF:
        found = globals()[name] = getattr(found, name)  # next time without this function
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
