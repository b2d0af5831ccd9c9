# SPDX-License-Identifier: MIT OR Apache-2.0
"""ProcessGroup: ferrodist's collectives under the names by which torch calls them.

torch calls a method from Python, from its C++ code, or through an operator; the last two are what
``operators.py`` is for. Blocking calls go straight to the public functions of ferrodist, those that
torch wants asynchronous with ``async_op=True``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

import ferrodist
from ferrodist.backends.base import Backend
from ferrodist.errors import CollectiveTimeout, InvalidArgument, UnsupportedOp
from ferrodist.reduce_op import ReduceOp
from ferrodist.torch.group_base import GroupBase, c10d, is_plain_call
from ferrodist.torch.reductions import OP, Reduction, plain_op
from ferrodist.torch.tensors import (
    Finish,
    all_of,
    cut_into,
    flat_input,
    flat_output,
    flat_outputs,
    is_plain,
    join_inputs,
)
from ferrodist.torch.work import FINISHED, MESSAGES, FinishedWork


class ProcessGroup(GroupBase):
    """A process group of torch on a backend of ferrodist (``backend``).

    Created by ``torch.distributed.init_process_group("ferrodist")`` and ``new_group``, or on an
    existing backend by ``ferrodist.torch.process_group``.
    """

    # -- reductions --------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
        """Reduce a tensor over all ranks, in place: ``torch.distributed.all_reduce``."""
        if not isinstance(opts, c10d.AllreduceOptions):
            return self._parse("allreduce", tensors, opts, *more, **named)
        if len(tensors) != 1:
            return self.allreduce_coalesced(tensors, opts)
        x = tensors[0]
        op = plain_op(opts.reduceOp, x)
        if op is None or not is_plain(x) or opts.timeout.days >= 0:
            return self._allreduce(x, opts)
        run = self._start if opts.asyncOp else self._run
        work = run("all_reduce", tensors, ferrodist.allreduce, x, self.backend, op, out=x)
        return work if opts.asyncOp else FINISHED

    def _allreduce(self, x: Tensor, opts: Any) -> Any:
        if x.layout is not torch.strided:
            return self._allreduce_sparse(x, opts)
        reduction = self._reduction("all_reduce", opts, [x])
        flat, finish = flat_output(x)
        args = reduction.input(flat), self.backend, reduction.op
        out, finish = reduction.output(flat, finish)
        call = ferrodist.allreduce
        return self._call("all_reduce", opts, [x], call, *args, out=out, finish=finish)

    def _reduction(self, name: str, opts: Any, tensors: Sequence[Tensor]) -> Reduction:
        return Reduction(name, opts.reduceOp, tensors, self.size())

    def _allreduce_sparse(self, x: Tensor, opts: Any) -> Any:
        """Add up sparse tensors: every rank gets the indices and values of all."""
        reduction = self._reduction("all_reduce", opts, [x])
        if opts.reduceOp.op not in (OP.SUM, OP.AVG):
            raise UnsupportedOp(f"all_reduce of a sparse tensor is sum or avg, got {opts.reduceOp}")
        own = x.detach().coalesce()
        indices, call = own.indices().t().contiguous(), ferrodist.all_gather_uneven
        rows = self._run("all_reduce", [x], call, indices, self.backend)
        values = self._run("all_reduce", [x], call, own.values(), self.backend)
        total = torch.sparse_coo_tensor(rows.t(), values, x.shape).coalesce()
        is_mean, found = reduction.op is ReduceOp.MEAN, total.values()
        found = found / self.size() if is_mean else reduction.result(found)
        total = torch.sparse_coo_tensor(total.indices(), found, x.shape)
        with torch.no_grad():  # of a sparse tensor detach() is a copy
            x.copy_(total)
        return FinishedWork([x])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce several tensors over all ranks, in place, in one call."""
        if opts is None:
            return self._parse("allreduce_coalesced", tensors)
        if len(tensors) == 1:
            return self._allreduce(tensors[0], opts)
        name = "all_reduce_coalesced"
        reduction = self._reduction(name, opts, tensors)
        rows = [flat_output(x) for x in tensors]
        args = [reduction.input(flat) for flat, _ in rows], self.backend, reduction.op
        outs, finish = reduction.outputs(rows)
        return self._call(name, opts, tensors, ferrodist.allreduce, *args, out=outs, finish=finish)

    def reduce(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
        """Reduce a tensor over all ranks to one of them: ``torch.distributed.reduce``."""
        if not isinstance(opts, c10d.ReduceOptions):
            return self._parse("reduce", tensors, opts, *more, **named)
        (x,) = tensors
        root, reduction = opts.rootRank, self._reduction("reduce", opts, tensors)
        flat, finish = flat_output(x)
        args = reduction.input(flat), self.backend, root, reduction.op
        out, finish = reduction.output(flat, finish) if root == self.rank() else (None, None)
        return self._call("reduce", opts, tensors, ferrodist.reduce, *args, out=out, finish=finish)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Reduce a tensor; rank r gets part r: ``torch.distributed.reduce_scatter_single``."""
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        op = plain_op(opts.reduceOp, input)
        if op is not None and is_plain(output) and is_plain(input) and is_plain_call(opts):
            call, args = ferrodist.reduce_scatter, (input, self.backend, op)
            self._run("reduce_scatter_single", (output, input), call, *args, out=output)
            return FINISHED
        name, tensors = "reduce_scatter_single", [output, input]
        reduction = self._reduction(name, opts, tensors)
        x, (flat, finish) = flat_input(input), flat_output(output)
        self._check_parts(name, x, flat)
        out, finish = reduction.output(flat, finish)
        call, args = ferrodist.reduce_scatter, (reduction.input(x), self.backend, reduction.op)
        return self._call(name, opts, tensors, call, *args, out=out, finish=finish)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        """Reduce lists of tensors; rank r gets item r: ``torch.distributed.reduce_scatter``."""
        if not isinstance(opts, c10d.ReduceScatterOptions):
            return self._parse("reduce_scatter", outputs, inputs, opts, *more)
        (output,), (parts,) = outputs, inputs
        self._check_list("reduce_scatter", parts)
        reduction = self._reduction("reduce_scatter", opts, [output, *parts])
        x = join_inputs(parts)
        args = reduction.input(x), self.backend, reduction.op
        if len({part.numel() for part in parts}) == 1:
            flat, finish = flat_output(output)
            self._check_parts("reduce_scatter", x, flat)
            out, finish = reduction.output(flat, finish)
            call, options = ferrodist.reduce_scatter, {"out": out}
        else:  # everybody gets everything, and takes a part
            start = sum(part.numel() for part in parts[: self.rank()])
            take, call, options = cut_into([output]), ferrodist.allreduce, {}

            def finish(total: Tensor) -> None:
                take(reduction.result(total[start : start + output.numel()]))

        shown = [output, *parts]
        return self._call("reduce_scatter", opts, shown, call, *args, finish=finish, **options)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """Run reduce_scatter_single on several tensors in one call."""
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        if len(inputs) == 1:  # as torch's functional collectives call it
            return self.reduce_scatter_single(outputs[0], inputs[0], opts)
        name = "reduce_scatter_single_coalesced"
        reduction = self._reduction(name, opts, [*outputs, *inputs])
        rows, xs = [flat_output(x) for x in outputs], [flat_input(x) for x in inputs]
        for x, (flat, _) in zip(xs, rows, strict=True):
            self._check_parts("reduce_scatter_single", x, flat)
        args = [reduction.input(x) for x in xs], self.backend, reduction.op
        outs, finish = reduction.outputs(rows)
        return self._call(
            name, opts, inputs, ferrodist.reduce_scatter, *args, out=outs, finish=finish
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- copies -----------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
        """Copy the tensor of one rank to all ranks: ``torch.distributed.broadcast``."""
        if not isinstance(opts, c10d.BroadcastOptions):
            return self._parse("broadcast", tensors, opts, *more, **named)
        (x,) = tensors
        root = opts.rootRank
        is_root = root == self.rank()
        if is_plain(x) and is_plain_call(opts):
            row = x.data if is_root else x
            self._run("broadcast", tensors, ferrodist.broadcast, row, self.backend, root, out=row)
            return FINISHED
        flat, finish = flat_output(x)
        if is_root:  # it is only read: a view with a version of its own is marked as changed
            flat, finish = flat.data, None
        args = flat, self.backend, root
        return self._call(
            "broadcast", opts, tensors, ferrodist.broadcast, *args, out=flat, finish=finish
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Concatenate the tensors of all ranks: ``torch.distributed.all_gather_single``."""
        opts = c10d.AllgatherOptions() if opts is None else opts
        if is_plain(output) and is_plain(input) and is_plain_call(opts):
            call, args = ferrodist.all_gather, (input, self.backend)
            self._run("all_gather_single", (output, input), call, *args, out=output)
            return FINISHED
        out, finish = flat_output(output)
        x = flat_input(input)
        self._check_parts("all_gather_single", out, x)
        tensors, args = [output, input], (x, self.backend)
        call = ferrodist.all_gather
        return self._call("all_gather_single", opts, tensors, call, *args, out=out, finish=finish)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """Run all_gather_single on several tensors in one call."""
        opts = c10d.AllgatherOptions() if opts is None else opts
        if len(inputs) == 1:  # as torch's functional collectives call it
            return self.all_gather_single(outputs[0], inputs[0], opts)
        flats, finishes = flat_outputs(outputs)
        xs = [flat_input(x) for x in inputs]
        for x, flat in zip(xs, flats, strict=True):
            self._check_parts("all_gather_single", flat, x)
        call, finish, name = ferrodist.all_gather, all_of(finishes), "all_gather_single_coalesced"
        return self._call(name, opts, inputs, call, xs, self.backend, out=flats, finish=finish)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        """Collect the tensors of all ranks in a list: ``torch.distributed.all_gather``."""
        if not isinstance(opts, c10d.AllgatherOptions):
            return self._parse("allgather", outputs, inputs, opts, *more)
        (parts,), (x,) = outputs, inputs
        self._check_list("all_gather", parts)
        is_even = all(part.numel() == x.numel() for part in parts)
        call = ferrodist.all_gather if is_even else ferrodist.all_gather_uneven
        self._check_own("all_gather", parts[self.rank()], x)
        args, finish = (flat_input(x), self.backend), cut_into(parts)
        return self._call("all_gather", opts, parts, call, *args, finish=finish)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """Collect several tensors of all ranks; ``output_lists[r]`` has those of rank r."""
        opts = c10d.AllgatherOptions() if opts is None else opts
        self._check_list("all_gather_coalesced", output_lists)
        cuts = [cut_into(parts) for parts in zip(*output_lists, strict=True)]

        def finish(rows: list[Tensor]) -> None:
            for cut, row in zip(cuts, rows, strict=True):
                cut(row)

        xs, call = [flat_input(x) for x in inputs], ferrodist.all_gather
        name = "all_gather_coalesced"
        return self._call(name, opts, inputs, call, xs, self.backend, finish=finish)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        """Collect the tensors of all ranks on one of them: ``torch.distributed.gather``."""
        if not isinstance(opts, c10d.GatherOptions):
            return self._parse("gather", outputs, inputs, opts, *more)
        (x,), root = inputs, opts.rootRank
        finish = None
        if root == self.rank():
            (parts,) = outputs
            self._check_list("gather", parts)
            self._check_own("gather", parts[root], x)
            finish = cut_into(parts)
        args = flat_input(x), self.backend, root
        return self._call("gather", opts, inputs, ferrodist.gather, *args, finish=finish)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        """Send item r of a list on one rank to rank r: ``torch.distributed.scatter``."""
        if not isinstance(opts, c10d.ScatterOptions):
            return self._parse("scatter", outputs, inputs, opts, *more)
        (output,), root, x = outputs, opts.rootRank, None
        out, finish = flat_output(output)
        if root == self.rank():
            (parts,) = inputs
            self._check_list("scatter", parts)
            x = join_inputs(parts)
            self._check_parts("scatter", x, out)
        args = x, self.backend, root
        call = ferrodist.scatter
        return self._call("scatter", opts, outputs, call, *args, out=out, finish=finish)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Any:
        """Send row block r to rank r: ``torch.distributed.all_to_all_single``."""
        if not isinstance(opts, c10d.AllToAllOptions):
            splits = output_split_sizes or [], input_split_sizes or []
            return self._parse("all_to_all_single", output, input, *splits, opts)
        name, tensors, call = "all_to_all_single", (output, input), ferrodist.all_to_all
        is_even = not output_split_sizes and not input_split_sizes
        if is_even and is_plain(output) and is_plain(input) and is_plain_call(opts):
            self._run(name, tensors, call, input, self.backend, out=output)
            return FINISHED
        out, finish = flat_output(output)
        x = flat_input(input)
        if is_even:
            args = x, self.backend
            return self._call(name, opts, tensors, call, *args, out=out, finish=finish)
        sends = self._counts(name, input, x, input_split_sizes)
        receives = self._counts(name, output, out, output_split_sizes)
        return self._exchange(name, opts, tensors, x, sends, out, receives, finish)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Send item r of a list to rank r: ``torch.distributed.all_to_all``."""
        if not isinstance(opts, c10d.AllToAllOptions):
            return self._parse("alltoall", outputs, inputs, opts)
        self._check_list("all_to_all", outputs)
        self._check_list("all_to_all", inputs)
        x, cut = join_inputs(inputs), cut_into(outputs)
        sends, receives = ([part.numel() for part in parts] for parts in (inputs, outputs))
        out = x.new_empty(sum(receives))
        tensors = [*outputs, *inputs]
        return self._exchange(
            "all_to_all", opts, tensors, x, sends, out, receives, lambda _: cut(out)
        )

    def _exchange(
        self,
        name: str,
        opts: Any,
        tensors: Sequence[Tensor],
        x: Tensor,
        sends: list[int],
        out: Tensor,
        receives: list[int],
        finish: Finish | None,
    ) -> Any:
        """Send parts of any sizes; what a rank expects is compared with what it is sent."""
        args, options = (x, sends, self.backend), {"recv_counts": receives, "out": out}
        call = ferrodist.all_to_all_uneven
        return self._call(name, opts, tensors, call, *args, finish=finish, **options)

    # -- point to point ---------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        """Send a tensor; the Work is over when it may change."""
        (x,) = tensors
        args = flat_input(x), dst, self.backend
        return self._start("send", tensors, ferrodist.send, *args, tag=tag, thread=MESSAGES)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Any:
        """Receive into a tensor."""
        (x,) = tensors
        flat, finish = flat_output(x)
        call, options = ferrodist.recv, {"out": flat, "tag": tag, "source": src, "finish": finish}
        return self._start("recv", tensors, call, src, self.backend, thread=MESSAGES, **options)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receive into a tensor from any rank; ``source_rank()`` of the Work names it."""
        (x,) = tensors
        flat, finish = flat_output(x)
        options = {"out": flat, "tag": tag, "with_status": True, "finish": finish}
        call, source = ferrodist.recv, ferrodist.ANY_SOURCE
        return self._start("recv", tensors, call, source, self.backend, thread=MESSAGES, **options)

    # -- barriers ---------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, **named: Any) -> Any:
        """Wait until all ranks have come; a timeout names those that have not."""
        if opts is not None and (work := self.handed_over()) is not None:
            return work
        if not isinstance(opts, c10d.BarrierOptions):
            return self._parse("barrier", opts, **named)
        return self._call("barrier", opts, [], ferrodist.barrier, self.backend)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until all ranks have come; on every rank the error names all that have not."""
        opts = c10d.BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = max(timeout, timedelta(milliseconds=1))
        try:
            self._call("monitored_barrier", opts, [], ferrodist.barrier, self.backend)
        except CollectiveTimeout as error:  # in the words by which programs know it
            error.args = (f"Rank {self.rank()} timed out in monitoredBarrier: {error}",)
            raise


def backend_of(group: Any = None) -> Backend:
    """Return the backend under a process group of torch, or under the default group.

    Raises InvalidArgument for a group that is not ferrodist's.

    Example:
        >>> import ferrodist.torch
        >>> ferrodist.torch.backend_of().statistics().slowest  # doctest: +SKIP
        3
    """
    found = torch.distributed.group.WORLD if group is None else group
    if not isinstance(found, ProcessGroup):
        name = "no group" if found is None else f"a group of {type(found).__name__}"
        raise InvalidArgument(
            f"backend_of: expected a process group of ferrodist's, got {name}; "
            'init_process_group("ferrodist") makes one',
            got=str(found),
        )
    return found.backend
