# SPDX-License-Identifier: MIT OR Apache-2.0
"""A world of torch.distributed whose ranks are threads of one process, for tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from ferrodist.backends.base import Backend
from ferrodist.errors import InvalidArgument
from ferrodist.torch.joining import over

T = TypeVar("T")

HashStore = dist.HashStore


@contextmanager
def thread_worlds() -> Iterator[None]:
    """Give every thread its own world of torch.distributed."""
    # What torch tests its own code with; it comes with every torch.
    from torch.testing._internal.distributed import multi_threaded_pg

    if dist.is_initialized():
        raise InvalidArgument(
            "run_torch_ranks: this process is a rank of torch.distributed already; call "
            "destroy_process_group() first"
        )
    hook = sys.excepthook  # every init_process_group puts another around it
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    try:
        yield
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        sys.excepthook = hook


def run_in_world(backend: Backend, store: dist.Store, fn: Callable[[int], T]) -> T:
    """Run a function on this thread, in a world of torch.distributed over the backend."""
    with torch.autograd.set_multithreading_enabled(False), over(backend):
        dist.init_process_group(
            "ferrodist",
            store=store,
            rank=backend.rank,
            world_size=backend.world_size,
            timeout=timedelta(seconds=backend.timeout or 3600.0),
        )
        try:
            return fn(backend.rank)
        except BaseException as error:  # also SystemExit and Ctrl-C: the others must hear of it
            backend._fail(error)  # before this rank has left
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
