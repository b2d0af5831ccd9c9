# SPDX-License-Identifier: MIT OR Apache-2.0
"""Speed of the native reduce kernels against NumPy on cached data, for every dtype and op.

Run ``python benchmarks/kernels.py``; a ratio of 2 means that ferrodist is twice as quick.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from ferrodist import _native
from ferrodist.buffer import ARRAY_DTYPES, DType
from ferrodist.reduce_op import ReduceOp

Array = np.ndarray[Any, Any]
Call = Callable[[], object]

_SECONDS_PER_SAMPLE = 0.0003
_BIT_OPS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
_ORDER_OPS: dict[ReduceOp, np.ufunc] = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}
_ARITHMETIC_OPS: dict[ReduceOp, np.ufunc] = {ReduceOp.SUM: np.add, ReduceOp.PROD: np.multiply}


class Result(NamedTuple):
    """Median microseconds per call of one kernel and of what it is held against."""

    name: str
    op: str
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """How many times as quick as the other ours is."""
        return self.theirs / self.ours


def ufuncs(dtype: DType) -> dict[ReduceOp, np.ufunc]:
    """Return NumPy's equivalent of every op the dtype has, but for MEAN."""
    if dtype.is_complex:
        return _ARITHMETIC_OPS
    if dtype.is_float:
        return _ARITHMETIC_OPS | _ORDER_OPS
    return _ARITHMETIC_OPS | _ORDER_OPS | _BIT_OPS


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if dtype is DType.BFLOAT16 else dtype.label)


def make_operands(dtype: DType, nbytes: int, *, number: int) -> list[Array]:
    """Return arrays of ordinary numbers: nothing subnormal, nothing infinite."""
    random = np.random.default_rng(0)
    count = nbytes // dtype.itemsize
    high = 2 if dtype is DType.BOOL else 100
    return [random.integers(0, high, count).astype(numpy_dtype(dtype)) for _ in range(number)]


def native_fold(dtype: DType, op: ReduceOp, into: Array, operands: list[Array]) -> Call:
    target = into.view(np.uint8).data
    sources = [operand.view(np.uint8).data for operand in operands]
    return lambda: _native.local_reduce(dtype, op, target, sources, len(sources))


def binary_folds(dtype: DType, op: ReduceOp, into: Array, operands: list[Array]) -> Call:
    """Reduce many operands two at a time, as a caller without a reduction of many would."""
    first, *rest = operands
    pairs = [[first, rest[0]]] + [[into, operand] for operand in rest[1:]]
    steps = [native_fold(dtype, op, into, pair) for pair in pairs]
    return lambda: [step() for step in steps]


def numpy_fold(dtype: DType, op: ReduceOp, into: Array, operands: list[Array]) -> Call:
    left, right = operands
    if op is not ReduceOp.MEAN:
        ufunc = ufuncs(dtype)[op]
        return lambda: ufunc(left, right, out=into)
    divisor = into.dtype.type(2)
    return lambda: np.divide(np.add(left, right, out=into), divisor, out=into)


def time_call(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats * 1e6


def race(ours: Call, theirs: Call, samples: int) -> tuple[float, float]:
    """Time both in turn, so that a busy machine slows both alike, and return the medians."""
    calls = (ours, theirs)
    repeats = [max(3, int(_SECONDS_PER_SAMPLE * 1e6 / time_call(call, 3))) for call in calls]
    timings = [
        [time_call(call, n) for call, n in zip(calls, repeats, strict=True)] for _ in range(samples)
    ]
    ours_all, theirs_all = zip(*timings, strict=True)
    return statistics.median(ours_all), statistics.median(theirs_all)


def race_numpy(dtype: DType, op: ReduceOp, nbytes: int, samples: int) -> Result:
    into, *operands = make_operands(dtype, nbytes, number=3)
    ours, theirs = native_fold(dtype, op, into, operands), numpy_fold(dtype, op, into, operands)
    return Result(dtype.label, op.name, *race(ours, theirs, samples))


def race_binary_folds(dtype: DType, op: ReduceOp, nbytes: int, samples: int) -> Result:
    into, *operands = make_operands(dtype, nbytes, number=5)
    ours, theirs = native_fold(dtype, op, into, operands), binary_folds(dtype, op, into, operands)
    return Result(f"{dtype.label} of 4 / 3 of 2", op.name, *race(ours, theirs, samples))


def run_all(nbytes: int, samples: int) -> list[Result]:
    results = []
    for dtype in ARRAY_DTYPES:
        ops = set(ufuncs(dtype)) | ({ReduceOp.MEAN} if dtype >= DType.FLOAT16 else set())
        results += [race_numpy(dtype, op, nbytes, samples) for op in sorted(ops)]
    for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.INT32):
        results.append(race_binary_folds(dtype, ReduceOp.SUM, nbytes, samples))
    return results


def make_table(results: list[Result], nbytes: int) -> Table:
    table = Table(
        title=f"reduce of {nbytes // 1024} KiB, times NumPy's speed, {_native.cpu_level()}"
    )
    table.add_column("dtype")
    for op in ReduceOp:
        table.add_column(op.name, justify="right")
    for name in dict.fromkeys(result.name for result in results):
        ratios = {result.op: f"{result.ratio:.2f}" for result in results if result.name == name}
        table.add_row(name, *(ratios.get(op.name, "") for op in ReduceOp))
    return table


def as_json(results: list[Result], nbytes: int) -> dict[str, Any]:
    return {
        "machine": platform.processor() or platform.machine(),
        "cpu_level": _native.cpu_level(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "nbytes": nbytes,
        "results": [result._asdict() | {"ratio": result.ratio} for result in results],
    }


@click.command(help=__doc__)
@click.option("--nbytes", default=64 * 1024, show_default=True, help="Size of every array.")
@click.option("--samples", default=21, show_default=True, help="Interleaved repeats.")
@click.option("--level", type=click.Choice(_native.cpu_levels()), help="CPU level to measure.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write JSON here.")
def main(nbytes: int, samples: int, level: str | None, json_file: Path | None) -> None:
    if level is not None:
        _native.use_cpu_level(level)
    results = run_all(nbytes, samples)
    Console(width=120).print(make_table(results, nbytes))
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(results, nbytes), indent=2) + "\n")


if __name__ == "__main__":
    main()
