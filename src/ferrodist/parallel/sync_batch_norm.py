# SPDX-License-Identifier: MIT OR Apache-2.0
"""SyncBatchNorm: batch normalization over the batches of all ranks, as if they were one.

Every rank sends how many values it has in a channel, their mean and the sum of their squared
deviations from it. These can be combined for any counts, and without the difference of two large
squares in which digits are lost.

The calls are made in a second group of the ranks: in backward their order against the buckets of
DDP is not the same on every rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

import ferrodist
from ferrodist.parallel import backend_of


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]  # types of torch are not looked at
    """Batch normalization over the batches of all ranks, with the arguments of torch's BatchNorm.

    Inputs have two or more dimensions, channels second. In training, all ranks call forward and
    backward; their batches may have different lengths, even zero. Evaluation, and a world of one,
    make no calls. Statistics are float32 (float64 for float64 inputs). ``backend`` is by default
    that of the DDP around the layer, else the one that ``init`` made.

    Example:
        >>> import torch, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def body(backend):
        ...     layer = ferrodist.SyncBatchNorm(1, momentum=1.0, backend=backend)
        ...     layer(torch.full((1 + backend.rank, 1), float(backend.rank)))
        ...     return layer.running_mean.tolist()
        >>> run_ranks(2, body)  # the mean of 0, 1 and 1
        [[0.6666666865348816], [0.6666666865348816]]
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        backend: ferrodist.Backend | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)
        self.backend = backend
        self.backend_of_ddp: ferrodist.Backend | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave backends out of copies and pickles: they belong to this process."""
        return {**self.__dict__, "backend": None, "backend_of_ddp": None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize; in training every rank calls it, and the running statistics stay equal."""
        self._check_input_dim(x)
        if not self.training:
            return super().forward(x)
        backend = backend_of(self.backend or self.backend_of_ddp, "SyncBatchNorm")
        if backend.world_size == 1:
            return super().forward(x)
        normalize = self._normalize
        if torch.compiler.is_compiling():  # calls are not for its graphs
            normalize = torch.compiler.disable(normalize)
        return normalize(x, backend)

    def _normalize(self, x: torch.Tensor, backend: ferrodist.Backend) -> torch.Tensor:
        group = backend._second_group()
        statistics = _gather_statistics(x.detach(), group)
        if self.track_running_stats:
            self._track(statistics)
        return _Normalize.apply(x, self.weight, self.bias, statistics, self.eps, group)

    def _check_input_dim(self, x: torch.Tensor) -> None:
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ferrodist.InvalidArgument(
                f"SyncBatchNorm: expected a batch of {self.num_features} channels, "
                f"[N, {self.num_features}, ...], got shape {list(x.shape)}",
                got=tuple(x.shape),
            )

    def _track(self, statistics: _BatchStatistics) -> None:
        """Bring the running statistics up to date, on every rank by the same numbers."""
        num_values, mean, variance = statistics
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1 / self.num_batches_tracked.item()
        if num_values == 0:
            return
        unbiased = variance * (num_values / (num_values - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(torch.lerp(running.to(new.dtype), new, momentum))


class _BatchStatistics(NamedTuple):
    """Of one batch over all ranks: values per channel, and by channel their mean and variance."""

    num_values: float
    mean: torch.Tensor
    variance: torch.Tensor


def _gather_statistics(x: torch.Tensor, group: ferrodist.Backend) -> _BatchStatistics:
    wide, channels = torch.promote_types(x.dtype, torch.float32), x.shape[1]
    everybodys = ferrodist.all_gather(_statistics_of(x.to(wide)), group)
    counts, means, squares = everybodys.split([1, channels, channels], dim=1)
    total = counts.sum().item()
    if total == 1:
        raise ferrodist.InvalidArgument(
            f"SyncBatchNorm: the batches of all {group.world_size} ranks have one value per "
            "channel together, which has no variance; pass more samples, or call eval()",
            this_rank=group.rank,
        )
    mean = (counts * means).sum(0) / total
    squares = (squares + counts * (means - mean).square()).sum(0)
    return _BatchStatistics(total, *(one.to(x.device, wide) for one in (mean, squares / total)))


def _statistics_of(x: torch.Tensor) -> torch.Tensor:
    """Return count, means and sums of squared deviations of one rank, in a row of float64.

    A float32 is too short for a mean far from zero: the means of ranks differ by little.
    """
    channels, others = x.shape[1], [dim for dim in range(x.dim()) if dim != 1]
    row = torch.zeros(1, 1 + 2 * channels, dtype=torch.float64, device="cpu")
    if count := x.numel() // channels:
        rounded = x.mean(others, keepdim=True)
        deviations = x - rounded
        rest = deviations.sum(others).cpu().double() / count  # what rounding has left of the mean
        squares = deviations.square_().sum(others).cpu().double() - count * rest.square()
        row[0, 0] = count
        row[0, 1:] = torch.cat([rounded.flatten().cpu().double() + rest, squares])
    return row


class _Normalize(torch.autograd.Function):  # type: ignore[misc]  # types of torch are not looked at
    """Normalizes by statistics of all ranks; backward is through these too."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: _BatchStatistics,
        eps: float,
        group: ferrodist.Backend,
    ) -> torch.Tensor:
        num_values, mean, variance = statistics
        ctx.save_for_backward(x, weight, bias, mean, variance)
        ctx.num_values, ctx.eps, ctx.group = num_values, eps, group
        affine = [None if one is None else one.to(mean.dtype) for one in (weight, bias)]
        return torch.nn.functional.batch_norm(x, mean, variance, *affine, False, 0.0, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]  # as above
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given, weight, bias, mean, variance = ctx.saved_tensors
        x, gradient = given.to(mean.dtype), gradient.to(mean.dtype)
        sums = _gradient_sums(x, gradient, mean, variance, ctx.eps)
        of_x = None
        if ctx.needs_input_grad[0]:
            scale = (variance + ctx.eps).rsqrt()
            if weight is not None:
                scale = scale * weight
            affine = -scale * ferrodist.allreduce(sums, ctx.group) / ctx.num_values
            of_x = torch.nn.functional.batch_norm(
                x, mean, variance, affine[0], affine[1], False, 0.0, ctx.eps
            )
            of_x.addcmul_(gradient, scale.view([1, -1] + [1] * (x.dim() - 2)))
            of_x = of_x.to(given.dtype)
        of_weight = None if weight is None else sums[0].to(weight.dtype)
        of_bias = None if bias is None else sums[1].to(bias.dtype)
        return of_x, of_weight, of_bias, None, None, None


def _gradient_sums(
    x: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, eps: float
) -> torch.Tensor:
    """Sum up, by channel, the gradient times the normalized input, and the gradient."""
    if x.numel() == 0:  # which torch's kernel divides by
        return torch.zeros(2, len(mean), dtype=mean.dtype, device=mean.device)
    _, products, plain = torch.ops.aten.native_batch_norm_backward(
        gradient, x, None, mean, variance, None, None, False, eps, [False, True, True]
    )
    return torch.stack([products, plain])


# -- modules that have such layers -----------------------------------------------------------------


def convert_sync_batchnorm(
    module: torch.nn.Module, backend: ferrodist.Backend | None = None
) -> torch.nn.Module:
    """Replace every BatchNorm in a module with a SyncBatchNorm, in place, and return the module.

    Parameters, buffers and hooks are kept, so optimizers and checkpoints stay valid. If the module
    itself is a BatchNorm, a new SyncBatchNorm is returned.

    Example:
        >>> import torch, ferrodist
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> type(ferrodist.convert_sync_batchnorm(net)[1]).__name__
        'SyncBatchNorm'
    """
    if isinstance(module, _BatchNorm):
        return _converted(module, "", backend)
    made: dict[torch.nn.Module, SyncBatchNorm] = {}
    for path, part in [*module.named_modules()]:
        for name, layer in part._modules.items():
            if isinstance(layer, _BatchNorm):
                if layer not in made:  # one that is in two places stays one
                    made[layer] = _converted(layer, f"{path}.{name}".lstrip("."), backend)
                part._modules[name] = made[layer]
    return module


def _converted(
    layer: torch.nn.Module, name: str, backend: ferrodist.Backend | None
) -> SyncBatchNorm:
    if isinstance(layer, SyncBatchNorm):
        return layer
    if isinstance(layer, LazyModuleMixin):
        raise ferrodist.InvalidArgument(
            f"convert_sync_batchnorm: layer '{name}' is a {type(layer).__name__} that has seen no "
            "batch yet; pass one through the module first"
        )
    if type(layer).forward not in (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward):
        raise ferrodist.InvalidArgument(
            f"convert_sync_batchnorm: layer '{name}' is a {type(layer).__name__}, whose forward "
            "does something else than BatchNorm; put a ferrodist.SyncBatchNorm in its place"
        )
    converted: SyncBatchNorm = SyncBatchNorm.__new__(SyncBatchNorm)
    converted.__dict__.update(layer.__dict__)
    converted.__dict__.pop("process_group", None)
    converted.backend, converted.backend_of_ddp = backend, None
    return converted


def adopt_layers(module: torch.nn.Module, backend: ferrodist.Backend) -> None:
    """Tell layers which backend the DDP around them has; refuse torch's own ones.

    Those run as plain BatchNorm, in silence, where there is no process group of torch.
    """
    is_served = torch.distributed.is_available() and torch.distributed.is_initialized()
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm) and not is_served:
            raise ferrodist.InvalidArgument(
                f"DDP: layer '{name}' is torch's SyncBatchNorm, which would see this rank's batch "
                "alone; pass ferrodist.convert_sync_batchnorm(module) to DDP"
            )
        if isinstance(layer, SyncBatchNorm):
            layer.backend_of_ddp = backend


def refuse_join(module: torch.nn.Module) -> None:
    """Refuse to let ranks have different numbers of steps: in each, layers need all ranks."""
    for name, layer in module.named_modules():
        if isinstance(layer, SyncBatchNorm):
            raise ferrodist.InvalidArgument(
                f"DDP.join: layer '{name}' is a SyncBatchNorm, whose forward needs every rank; "
                "give ranks equal numbers of batches (ShardedSampler does), or empty ones"
            )
