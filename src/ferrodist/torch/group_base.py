# SPDX-License-Identifier: MIT OR Apache-2.0
"""GroupBase: names and settings of a process group, how it ends, and how its calls are made."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed
from torch import Tensor

from ferrodist.backends.base import Backend
from ferrodist.errors import DistributedError, InvalidArgument
from ferrodist.torch.tensors import Finish
from ferrodist.torch.work import FINISHED, CallSite, FuturesThread, PendingWork

logger = logging.getLogger("ferrodist")

c10d = torch._C._distributed_c10d
_is_profiled = torch.autograd._profiler_enabled
_NOTHING = nullcontext()
_NO_OPTIONS = c10d.BarrierOptions()


class _HandedOver(threading.local):
    """The Work that a thread hands to torch."""

    work: Any = None


_handed_over = _HandedOver()


class GroupBase(torch._C._distributed_c10d.ProcessGroup):  # type: ignore[misc] # torch has no types
    """A process group of torch on a backend of ferrodist (``backend``), without its calls."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend.rank, backend.world_size)
        self.backend = backend
        self._group_name = self._description = ""
        self._futures = FuturesThread()

    # -- names and settings -----------------------------------------------------------------------

    def rank(self) -> int:
        """Return this rank's number in the group."""
        return self.backend.rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self.backend.world_size

    getRank, getSize = rank, size  # noqa: N815 -- what C++ calls them

    def name(self) -> str:
        """Return the name of the backend, as init_process_group takes it."""
        return "ferrodist"

    getBackendName = _get_backend_name = name  # noqa: N815 -- what C++ calls it

    @property
    def group_name(self) -> str:
        """The name under which torch registered the group."""
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802, D102 -- what C++ calls group_name
        return self._group_name

    setGroupName = _set_group_name  # noqa: N815 -- what C++ calls it

    @property
    def group_desc(self) -> str:
        """The description that the user gave."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802, D102 -- what C++ calls group_desc
        return self._description

    setGroupDesc = _set_group_desc  # noqa: N815 -- what C++ calls it

    bound_device_id = None
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Self:
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                f"No backend type associated with device type {device}: the group is ferrodist's, "
                'for CPU tensors; for CUDA tensors make one with dist.new_group(backend="nccl")'
            )
        return self

    def _has_hooks(self) -> bool:
        return False

    def _get_sequence_number_for_group(self) -> int:
        return self.backend.statistics().collectives

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: ferrodist numbers its calls itself."""

    def __repr__(self) -> str:
        return f"<ferrodist.torch.ProcessGroup {self._group_name!r} over {self.backend!r}>"

    # -- its end ----------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of calls that have none of their own."""
        self.backend.timeout = timeout

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """End the group: pending and later calls of all ranks raise GroupAborted."""
        self.backend.abort("abort() of the process group was called")

    def shutdown(self) -> None:
        """Close the group, after its calls in flight have finished."""
        try:
            self.backend.close()
        except DistributedError as error:  # of a call that nobody waited for; it was logged
            logger.debug("rank %d: while the process group was closed: %s", self.rank(), error)

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Self | None:
        """Create a group of some ranks of this one; returns None on all other ranks."""
        if self.rank() not in new_ranks:
            return None
        made = type(self)(self.backend.split(list(new_ranks)))
        if timeout is not None:
            made.set_timeout(timeout)
        made._set_group_name(group_name or "")
        made._set_group_desc(group_desc or "")
        return made

    # -- how calls are made -----------------------------------------------------------------------

    def _parse(self, method: str, *args: Any, **named: Any) -> Any:
        """Let torch read the short forms of its arguments; it then calls the method with lists."""
        given = [argument for argument in args if argument is not None]
        return getattr(super(), method)(*given, **named)

    def _call(
        self,
        name: str,
        opts: Any,
        tensors: Sequence[Tensor],
        function: Callable[..., Any],
        *args: Any,
        finish: Finish | None = None,
        **options: Any,
    ) -> Any:
        """Run a collective of ferrodist: now, or in flight where torch asks for that."""
        if opts.timeout.days >= 0:  # before zero it is unset
            options["timeout"] = opts.timeout
        if opts.asyncOp:
            return self._start(name, tensors, function, *args, finish=finish, **options)
        result = self._run(name, tensors, function, *args, **options)
        if finish is not None:
            finish(result)
        return FINISHED

    def _run(
        self,
        name: str,
        tensors: Sequence[Tensor],
        function: Callable[..., Any],
        *args: Any,
        **options: Any,
    ) -> Any:
        """Run a call of ferrodist and return its result."""
        try:
            if _is_profiled():
                with torch.profiler.record_function(f"ferrodist:{name}"):
                    return function(*args, **options)
            return function(*args, **options)
        except DistributedError as error:
            CallSite(name, tensors, self.backend).explain(error)
            raise

    def _start(
        self,
        name: str,
        tensors: Sequence[Tensor],
        function: Callable[..., Any],
        *args: Any,
        finish: Finish | None = None,
        source: int = -1,
        thread: FuturesThread | None = None,
        **options: Any,
    ) -> PendingWork:
        """Put a call of ferrodist in flight; ``thread`` finishes its future, if not the group's."""
        site = CallSite(name, tensors, self.backend)
        event = torch.profiler.record_function(f"ferrodist:{name}") if _is_profiled() else None
        try:
            with event or _NOTHING:
                pending = function(*args, **options, async_op=True)
                if event is not None:
                    finish = _also_end(event, finish)
        except DistributedError as error:
            site.explain(error)
            raise
        is_from_any = "with_status" in options
        thread = thread or self._futures
        return PendingWork(pending, tensors, site, finish, source, is_from_any, thread=thread)

    def kept_by_torch(self, work: Any) -> Any:
        """Return a Work of C++ that keeps one written in Python, which else ends with its caller.

        torch makes it of what a method returns that its C++ code has called, as ``barrier``.
        """
        _handed_over.work = work
        return super().barrier(_NO_OPTIONS)

    @staticmethod
    def handed_over() -> Any:
        """Return what this thread hands to torch in ``kept_by_torch``, once; None if nothing."""
        work, _handed_over.work = _handed_over.work, None
        return work

    # -- what can be seen to be wrong before anything is sent -------------------------------------

    def _check_list(self, name: str, parts: Sequence[Any]) -> None:
        if len(parts) != self.size():
            raise InvalidArgument(
                f"{name}: expected a list of {self.size()} tensors, one per rank, got {len(parts)}",
                expected=self.size(),
                got=len(parts),
                this_rank=self.rank(),
            )

    def _check_parts(self, name: str, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self.size() or whole.dtype != part.dtype:
            raise InvalidArgument(
                f"{name}: the larger tensor must have {self.size()} times the elements of the "
                f"other, and its dtype: got {whole.numel()} of {whole.dtype} and {part.numel()} of "
                f"{part.dtype}",
                expected=part.numel() * self.size(),
                got=whole.numel(),
                this_rank=self.rank(),
            )

    def _check_own(self, name: str, own: Tensor, x: Tensor) -> None:
        if own.numel() != x.numel() or own.dtype != x.dtype:
            raise InvalidArgument(
                f"{name}: this rank passes {x.numel()} elements of {x.dtype}, and makes room for "
                f"{own.numel()} of {own.dtype} from itself",
                expected=x.numel(),
                got=own.numel(),
                this_rank=self.rank(),
            )

    def _counts(
        self, name: str, x: Tensor, flat: Tensor, splits: Sequence[int] | None
    ) -> list[int]:
        """Turn numbers of rows into numbers of elements."""
        rows = x.shape[0] if x.ndim else 1
        if not splits:
            splits = [rows // self.size()] * self.size()
        if len(splits) != self.size() or sum(splits) != rows:
            raise InvalidArgument(
                f"{name}: the split sizes must be {self.size()} numbers that add up to the {rows} "
                f"rows of the tensor, got {list(splits)}",
                expected=rows,
                got=sum(splits),
                this_rank=self.rank(),
            )
        row = flat.numel() // rows if rows else 0
        return [row * split for split in splits]


def is_plain_call(opts: Any) -> bool:
    """Tell whether a call blocks and has the timeout of its group: one before zero."""
    return not opts.asyncOp and opts.timeout.days < 0


def _also_end(event: Any, finish: Finish | None) -> Finish:
    """Let an event of the profiler last until its call is finished.

    It ends before anybody hears that the call is over: a program may then stop the profiler, and
    an event that another thread ends at that moment crashes it.
    """
    end = torch.futures.Future()
    event._call_end_callbacks_on_future(end)

    def finish_both(result: Any) -> None:
        if finish is not None:
            finish(result)
        end.set_result(None)

    return finish_both
