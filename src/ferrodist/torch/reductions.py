# SPDX-License-Identifier: MIT OR Apache-2.0
"""Operations of torch on tensors, as ferrodist does them.

Most are one of ferrodist's. PREMUL_SUM scales what goes in. AVG of integers divides what comes out,
rounding toward zero as NCCL does; ferrodist has no mean of integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferrodist.errors import UnsupportedOp
from ferrodist.reduce_op import ReduceOp
from ferrodist.torch.tensors import OWN_DTYPES, Finish, all_of

_c10d = torch._C._distributed_c10d
OP = _c10d.ReduceOp.RedOpType
_OPS = {
    OP.SUM: ReduceOp.SUM,
    OP.AVG: ReduceOp.MEAN,
    OP.PRODUCT: ReduceOp.PROD,
    OP.MIN: ReduceOp.MIN,
    OP.MAX: ReduceOp.MAX,
    OP.BAND: ReduceOp.BAND,
    OP.BOR: ReduceOp.BOR,
    OP.BXOR: ReduceOp.BXOR,
    OP.PREMUL_SUM: ReduceOp.SUM,
}
# By what hash(opts.reduceOp) gives, which is quicker than to ask for the member.
_PLAIN_OPS = {hash(_c10d.ReduceOp(op)): own for op, own in _OPS.items() if op != OP.PREMUL_SUM}
# Added up as int64, so that a mean is right where the sum would not fit; uint64 has no larger one.
_WIDENED = {torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32}
_INTEGERS = _WIDENED | {torch.int64, torch.uint64}


def plain_op(op: Any, x: Tensor) -> ReduceOp | None:
    """Return an operation that needs nothing before and after it; None for others."""
    found = _PLAIN_OPS.get(hash(op))
    return None if found is ReduceOp.MEAN and x.dtype in _INTEGERS else found


class Reduction:
    """An operation on tensors: what ferrodist does (``op``), and what is done around it."""

    def __init__(self, name: str, op: Any, tensors: Sequence[Tensor], world_size: int) -> None:
        for x in tensors:
            if x.dtype not in OWN_DTYPES:
                raise UnsupportedOp(
                    f"{name}: a {x.dtype} tensor can be sent but not reduced; convert it with "
                    ".to() to float32, bfloat16 or another dtype that can",
                    got=str(x.dtype),
                )
        is_mean = op.op == OP.AVG and all(x.dtype in _INTEGERS for x in tensors)
        self._divisor = world_size if is_mean else 1
        self._factor = op.__getstate__()[1] if op.op == OP.PREMUL_SUM else None
        self.op = ReduceOp.SUM if is_mean else _OPS[op.op]

    def input(self, row: Tensor) -> Tensor:
        """Return what ferrodist reduces instead of a row."""
        if self._factor is not None:
            return (row * self._factor).to(row.dtype)
        return row.to(torch.int64) if self._is_widened(row) else row

    def output(self, row: Tensor, finish: Finish | None) -> tuple[Tensor, Finish | None]:
        """Return what receives the result instead of a row, and what is done with it then."""
        if self._divisor == 1:
            return row, finish
        total = row.new_empty(row.shape, dtype=torch.int64) if self._is_widened(row) else row

        def divide(result: Any) -> None:
            row.copy_(self.result(total))
            if finish is not None:
                finish(result)

        return total, divide

    def outputs(
        self, rows: Sequence[tuple[Tensor, Finish | None]]
    ) -> tuple[list[Tensor], Finish | None]:
        """As output, for several rows."""
        pairs = [self.output(*row) for row in rows]
        return [out for out, _ in pairs], all_of([one for _, one in pairs if one is not None])

    def result(self, total: Tensor) -> Tensor:
        """Return the result of the operation, of what ferrodist has made."""
        if self._divisor == 1:
            return total
        if total.dtype is torch.uint64:  # which torch does not divide
            return torch.from_numpy(np.floor_divide(total.numpy(), np.uint64(self._divisor)))
        return total.div(self._divisor, rounding_mode="trunc")

    def _is_widened(self, row: Tensor) -> bool:
        return self._divisor > 1 and row.dtype in _WIDENED
