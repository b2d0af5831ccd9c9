# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sparse gradients: rows of large tables, of which each rank has a few.

They are in no bucket. At the end of a round every rank gets the indices and values of all, and adds
them up in rank order. Before that all learn, in one call, who has gradients for what.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import ferrodist
from ferrodist.parallel.reducer import explain
from ferrodist.parallel.replicas import DDP_ADVICE


def makes_sparse_gradients(module: torch.nn.Module) -> bool:
    """Tell whether it is a table that was asked for sparse gradients of its weight."""
    return isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse


class SparseGradients:
    """The gradients of some parameters; ``touched`` are those with one since the last round.

    ``weight`` is that of all ranks together in the last round.
    """

    def __init__(
        self,
        backend: ferrodist.Backend,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        before: SparseGradients | None = None,
    ) -> None:
        self._backend = backend
        self._names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        touched = {id(before.parameters[number]) for number in before.touched} if before else ()
        self.touched: set[int] = {n for n, one in enumerate(self.parameters) if id(one) in touched}
        self.weight = 0.0

    def reduce(self, weight: float | None, divisor: float | None) -> None:
        """Make means of the gradients that some rank has; weighted ones if there is a weight."""
        if not self.parameters:
            return
        own = 1.0 if weight is None else weight
        flags = [float(number in self.touched) for number in range(len(self.parameters))]
        try:
            mine = torch.tensor([[*flags, own]], dtype=torch.float64)
            everybodys = ferrodist.all_gather(mine, self._backend)
            *used, self.weight = everybodys.sum(dim=0).tolist()
            for number in (number for number, count in enumerate(used) if count):
                self._reduce(number, own, divisor or self.weight)
        except ferrodist.DistributedError as error:
            names = ", ".join(self._names)
            explain(error, f"DDP: sparse gradients of {names}", DDP_ADVICE)
            raise
        self.touched.clear()

    def _reduce(self, number: int, weight: float, divisor: float) -> None:
        parameter = self.parameters[number]
        gradient = parameter.grad
        if gradient is None or weight == 0:
            gradient = parameter.new_zeros((0, *parameter.shape[1:])).to_sparse(1)
            gradient.sparse_resize_(parameter.shape, 1, parameter.dim() - 1)
        elif gradient.layout is torch.strided:
            gradient = gradient.to_sparse(1)
        gradient = gradient.detach().coalesce()
        rows = gradient.indices().t().contiguous()
        # 16 bits have no room for weights, nor for sums of many.
        wide = torch.float32 if parameter.element_size() == 2 else parameter.dtype
        values = gradient.values().to(wide) * weight
        rows = ferrodist.all_gather_uneven(rows, self._backend)
        values = ferrodist.all_gather_uneven(values, self._backend)
        total = torch.sparse_coo_tensor(rows.t(), values, gradient.shape).coalesce()
        parameter.grad = torch.sparse_coo_tensor(
            total.indices(), (total.values() / divisor).to(parameter.dtype), total.shape
        ).coalesce()
