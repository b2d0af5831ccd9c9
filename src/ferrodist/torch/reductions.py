# SPDX-License-Identifier: MIT OR Apache-2.0
"""The reductions of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ferrodist
from ferrodist.errors import UnsupportedOp
from ferrodist.reduce_op import ReduceOp
from ferrodist.torch.group_base import GroupBase, all_of, c10d, flat_outputs, is_plain_call
from ferrodist.torch.tensors import cut_into, flat_input, flat_output, is_plain, join_inputs
from ferrodist.torch.work import FINISHED, FinishedWork

_OP = c10d.ReduceOp.RedOpType
_OPS = {
    _OP.SUM: ReduceOp.SUM,
    _OP.AVG: ReduceOp.MEAN,
    _OP.PRODUCT: ReduceOp.PROD,
    _OP.MIN: ReduceOp.MIN,
    _OP.MAX: ReduceOp.MAX,
    _OP.BAND: ReduceOp.BAND,
    _OP.BOR: ReduceOp.BOR,
    _OP.BXOR: ReduceOp.BXOR,
    _OP.PREMUL_SUM: ReduceOp.SUM,
}


# By what hash(opts.reduceOp) gives, which is quicker than to ask for the member.
_PLAIN_OPS = {hash(c10d.ReduceOp(op)): own for op, own in _OPS.items() if op != _OP.PREMUL_SUM}


class Reductions(GroupBase):
    """A process group with the calls that combine tensors."""

    def allreduce(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
        """Combine a tensor of all ranks in place: ``torch.distributed.all_reduce``."""
        if not isinstance(opts, c10d.AllreduceOptions):
            return self._parse("allreduce", tensors, opts, *more, **named)
        if len(tensors) != 1:
            return self.allreduce_coalesced(tensors, opts)
        x = tensors[0]
        op = _PLAIN_OPS.get(hash(opts.reduceOp))
        if op is None or not is_plain(x) or opts.timeout.days >= 0:
            return self._allreduce(x, opts)
        run = self._start if opts.asyncOp else self._run
        work = run("all_reduce", tensors, ferrodist.allreduce, x, self.backend, op, out=x)
        return work if opts.asyncOp else FINISHED

    def _allreduce(self, x: Tensor, opts: Any) -> Any:
        if x.layout is not torch.strided:
            return self._allreduce_sparse(x, opts)
        flat, finish = flat_output(x)
        call, scaled = ferrodist.allreduce, self._scaled(flat, opts.reduceOp)
        op = _OPS[opts.reduceOp.op]
        return self._call(
            "all_reduce", opts, [x], call, scaled, self.backend, op, out=flat, finish=finish
        )

    def _scaled(self, flat: Tensor, op: Any) -> Tensor:
        """Multiply a tensor with the factor of PREMUL_SUM; other operations have none."""
        if op.op != _OP.PREMUL_SUM:
            return flat
        _, factor = op.__getstate__()
        return (flat * factor).to(flat.dtype)

    def _allreduce_sparse(self, x: Tensor, opts: Any) -> Any:
        """Add up sparse tensors: every rank gets the indices and values of all."""
        if opts.reduceOp.op not in (_OP.SUM, _OP.AVG):
            raise UnsupportedOp(f"all_reduce of a sparse tensor is sum or avg, got {opts.reduceOp}")
        own = x.detach().coalesce()
        indices, call = own.indices().t().contiguous(), ferrodist.all_gather_uneven
        rows = self._run("all_reduce", [x], call, indices, self.backend)
        values = self._run("all_reduce", [x], call, own.values(), self.backend)
        total = torch.sparse_coo_tensor(rows.t(), values, x.shape).coalesce()
        if opts.reduceOp.op == _OP.AVG:
            total = total / self.size()
        with torch.no_grad():  # of a sparse tensor detach() is a copy
            x.copy_(total)
        return FinishedWork([x])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Combine several tensors of all ranks in place, in one call."""
        if opts is None:
            return self._parse("allreduce_coalesced", tensors)
        flats, finishes = flat_outputs(tensors)
        scaled = [self._scaled(flat, opts.reduceOp) for flat in flats]
        args = scaled, self.backend, _OPS[opts.reduceOp.op]
        call, finish = ferrodist.allreduce, all_of(finishes)
        name = "all_reduce_coalesced"
        return self._call(name, opts, tensors, call, *args, out=flats, finish=finish)

    def reduce(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
        """Combine a tensor of all ranks on one of them: ``torch.distributed.reduce``."""
        if not isinstance(opts, c10d.ReduceOptions):
            return self._parse("reduce", tensors, opts, *more, **named)
        (x,) = tensors
        flat, finish = flat_output(x)
        root = opts.rootRank
        args = self._scaled(flat, opts.reduceOp), self.backend, root, _OPS[opts.reduceOp.op]
        out, finish = (flat, finish) if root == self.rank() else (None, None)
        return self._call("reduce", opts, tensors, ferrodist.reduce, *args, out=out, finish=finish)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Combine tensors and give rank r part r: ``torch.distributed.reduce_scatter_single``."""
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        op = _PLAIN_OPS.get(hash(opts.reduceOp))
        if op is not None and is_plain(output) and is_plain(input) and is_plain_call(opts):
            call, args = ferrodist.reduce_scatter, (input, self.backend, op)
            self._run("reduce_scatter_single", (output, input), call, *args, out=output)
            return FINISHED
        out, finish = flat_output(output)
        x = self._scaled(flat_input(input), opts.reduceOp)
        self._check_parts("reduce_scatter_single", x, out)
        call, args = ferrodist.reduce_scatter, (x, self.backend, _OPS[opts.reduceOp.op])
        tensors = [output, input]
        return self._call(
            "reduce_scatter_single", opts, tensors, call, *args, out=out, finish=finish
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        """Combine lists of tensors, of which rank r gets the r-th of all."""
        if not isinstance(opts, c10d.ReduceScatterOptions):
            return self._parse("reduce_scatter", outputs, inputs, opts, *more)
        (output,), (parts,) = outputs, inputs
        self._check_list("reduce_scatter", parts)
        x = self._scaled(join_inputs(parts), opts.reduceOp)
        args = x, self.backend, _OPS[opts.reduceOp.op]
        if len({part.numel() for part in parts}) == 1:
            out, finish = flat_output(output)
            self._check_parts("reduce_scatter", x, out)
            call, options = ferrodist.reduce_scatter, {"out": out}
        else:  # everybody gets everything, and takes a part
            start = sum(part.numel() for part in parts[: self.rank()])
            take, call, options = cut_into([output]), ferrodist.allreduce, {}

            def finish(total: Tensor) -> None:
                take(total[start : start + output.numel()])

        shown = [output, *parts]
        return self._call("reduce_scatter", opts, shown, call, *args, finish=finish, **options)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """Do several of reduce_scatter_single in one call."""
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        flats, finishes = flat_outputs(outputs)
        xs = [self._scaled(flat_input(x), opts.reduceOp) for x in inputs]
        for x, flat in zip(xs, flats, strict=True):
            self._check_parts("reduce_scatter_single", x, flat)
        args = xs, self.backend, _OPS[opts.reduceOp.op]
        call, finish = ferrodist.reduce_scatter, all_of(finishes)
        name = "reduce_scatter_single_coalesced"
        return self._call(name, opts, inputs, call, *args, out=flats, finish=finish)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
