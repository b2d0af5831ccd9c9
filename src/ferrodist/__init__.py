# SPDX-License-Identifier: MIT OR Apache-2.0
"""Distributed training for any array: backends, collectives and, on top of them, parallelism.

Public names and nothing else. Backend classes are imported when first asked for.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ferrodist.backends.base import Backend, Statistics
from ferrodist.backends.registry import init, is_initialized, local_rank, rank, world_size
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
    scatter,
    scatter_object,
    scatter_uneven,
    send,
    send_object,
    sendrecv,
    try_probe,
)
from ferrodist.collectives.messages import wait_all, wait_any
from ferrodist.config import DEFAULT, DEFAULT_COLLECTIVE_TIMEOUT, Config
from ferrodist.errors import (
    AuthenticationError,
    BackendClosed,
    BackendUnavailable,
    CollectiveMismatch,
    CollectiveTimeout,
    DistributedError,
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
from ferrodist.message_status import ANY_SOURCE, ANY_TAG, PROC_NULL, Status
from ferrodist.reduce_op import ReduceOp
from ferrodist.version import __version__ as __version__
from ferrodist.work import Work

if TYPE_CHECKING:
    from ferrodist.backends.grid import Grid
    from ferrodist.backends.hybrid import HybridBackend
    from ferrodist.backends.shared_memory import SharedMemoryBackend
    from ferrodist.backends.tcp import TcpBackend
    from ferrodist.backends.threads import SimulatedBackend
    from ferrodist.collectives.codec import register_type
    from ferrodist.launch.spawn import run
    from ferrodist.parallel.bucket import Bucket
    from ferrodist.parallel.compression import Compress, PowerSGD, TopK
    from ferrodist.parallel.data_parallel import DataParallel, average_gradients
    from ferrodist.parallel.ddp import DDP
    from ferrodist.parallel.sharding import IndexShards, ShardedSampler, shard_indices
    from ferrodist.parallel.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

__all__ = [
    # start
    "init",
    "run",
    "rank",
    "world_size",
    "local_rank",
    "is_initialized",
    # training
    "DDP",
    "Bucket",
    "Compress",
    "PowerSGD",
    "TopK",
    "SyncBatchNorm",
    "convert_sync_batchnorm",
    "DataParallel",
    "average_gradients",
    "ShardedSampler",
    "IndexShards",
    "shard_indices",
    # collectives
    "allreduce",
    "allreduce_",
    "broadcast",
    "broadcast_",
    "reduce",
    "all_gather",
    "all_gather_uneven",
    "gather",
    "gather_uneven",
    "scatter",
    "scatter_uneven",
    "reduce_scatter",
    "reduce_scatter_uneven",
    "scan",
    "exscan",
    "all_to_all",
    "all_to_all_uneven",
    "barrier",
    # point to point
    "send",
    "recv",
    "sendrecv",
    "send_object",
    "recv_object",
    "probe",
    "try_probe",
    "ANY_SOURCE",
    "ANY_TAG",
    "PROC_NULL",
    "Status",
    "wait_all",
    "wait_any",
    # objects
    "broadcast_object",
    "all_gather_object",
    "gather_object",
    "scatter_object",
    "register_type",
    # what they are given and give back
    "ReduceOp",
    "Work",
    "Backend",
    "Grid",
    "HybridBackend",
    "SharedMemoryBackend",
    "SimulatedBackend",
    "TcpBackend",
    "Statistics",
    "Config",
    "DEFAULT",
    "DEFAULT_COLLECTIVE_TIMEOUT",
    # errors
    "DistributedError",
    "InvalidArgument",
    "InvalidWorldSize",
    "InvalidRank",
    "InvalidShape",
    "SelfSend",
    "UnsupportedArray",
    "UnsupportedOp",
    "CollectiveMismatch",
    "SizeMismatch",
    "CollectiveTimeout",
    "RankLost",
    "GroupAborted",
    "RendezvousError",
    "AuthenticationError",
    "ProtocolError",
    "BackendUnavailable",
    "BackendClosed",
    "NotInitialized",
    "OutOfMemory",
]

_LAZY = {
    "run": "ferrodist.launch.spawn",
    "register_type": "ferrodist.collectives.codec",
    "SimulatedBackend": "ferrodist.backends.threads",
    "SharedMemoryBackend": "ferrodist.backends.shared_memory",
    "TcpBackend": "ferrodist.backends.tcp",
    "HybridBackend": "ferrodist.backends.hybrid",
    "Grid": "ferrodist.backends.grid",
    "DDP": "ferrodist.parallel.ddp",
    "Compress": "ferrodist.parallel.compression",
    "PowerSGD": "ferrodist.parallel.compression",
    "TopK": "ferrodist.parallel.compression",
    "Bucket": "ferrodist.parallel.bucket",
    "DataParallel": "ferrodist.parallel.data_parallel",
    "average_gradients": "ferrodist.parallel.data_parallel",
    "SyncBatchNorm": "ferrodist.parallel.sync_batch_norm",
    "convert_sync_batchnorm": "ferrodist.parallel.sync_batch_norm",
    "ShardedSampler": "ferrodist.parallel.sharding",
    "IndexShards": "ferrodist.parallel.sharding",
    "shard_indices": "ferrodist.parallel.sharding",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        module = sys.modules[__name__]  # lets Python suggest the name that was meant
        raise AttributeError(f"module 'ferrodist' has no attribute {name!r}", name=name, obj=module)
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
