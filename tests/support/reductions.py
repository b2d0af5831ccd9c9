"""Digests of every reduction, by which the bits of two backends, or of two runs, are compared."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

import ferrodist
from ferrodist.testing import distinct_values
from ferrodist.testing.contract.values import INTEGERS, available_dtypes, legal_ops, numpy_dtype


def digest_without_nan_payloads(x: Any) -> str:
    """Hash an array; all NaNs are the same."""
    if x.dtype.kind in "fcV" or x.dtype.name == "bfloat16":
        x = np.where(np.isnan(x), x.dtype.type(np.nan), x)
    return hashlib.sha256(f"{x.dtype}{x.shape}".encode() + x.tobytes()).hexdigest()


def special_values(dtype: str) -> list[str]:
    if dtype == "bool":
        return ["distinct"]
    return ["distinct", "wrapping" if dtype in INTEGERS else "special"]


def reductions(backend: Any, nbytes: int, **options: Any) -> dict[Any, str]:
    """Reduce arrays of every dtype with every operation; return digests of the results."""
    found = {}
    world = backend.world_size
    for number, dtype in enumerate(available_dtypes()):
        count = nbytes // numpy_dtype(dtype).itemsize // world * world
        for op in legal_ops(dtype):
            for values in special_values(dtype):
                x = distinct_values(backend.rank, (count,), dtype, seed=number, values=values)
                results = {
                    "allreduce": ferrodist.allreduce(x, backend, op, **options),
                    "reduce_scatter": ferrodist.reduce_scatter(x, backend, op, **options),
                    "reduce": ferrodist.reduce(x, backend, number % world, op, **options),
                }
                for name, result in results.items():
                    if result is not None:
                        found[name, dtype, op, values] = digest_without_nan_payloads(result)
    return found
