# SPDX-License-Identifier: MIT OR Apache-2.0
"""Comparing arrays: to the bit, or within a bound; NaN equals NaN, whatever its payload."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from ferrodist.testing.contract.dtypes import Array, real_view


def find_difference(
    got: Array, wanted: Array, bound: Array | None = None, *, signs_of_zero: bool = True
) -> str | None:
    """Say in which way ``got`` is not ``wanted``; None if it is."""
    if got.dtype != wanted.dtype:
        return f"dtype {got.dtype}, expected {wanted.dtype}"
    if got.shape != wanted.shape:
        return f"shape {got.shape}, expected {wanted.shape}"
    found, right = _parts(got), _parts(wanted)
    if bound is not None:
        is_wrong = _are_apart(found, right, bound)
    elif signs_of_zero:
        is_wrong = _bits(found) != _bits(right)
    else:
        is_wrong = ~((found == right) | (_is_nan(found) & _is_nan(right)))
    return _describe(found, right, is_wrong) if is_wrong.any() else None


def digest(array: Array, before: int = 0) -> int:
    """Hash an array's bits; arrays that differ in NaN payloads only have the same digest."""
    return zlib.crc32(_bits(_parts(array)).tobytes(), before)


def _parts(array: Array) -> Array:
    return np.ascontiguousarray(real_view(array)).reshape(-1)


def _bits(parts: Array) -> Array:
    if parts.dtype.kind not in "biu":
        parts = parts.copy()
        parts[_is_nan(parts)] = np.nan
    return parts.view(f"uint{8 * parts.dtype.itemsize}")


def _is_nan(parts: Array) -> Array:
    return np.asarray(parts != parts)


def _are_apart(got: Array, wanted: Array, bound: Array) -> Array:
    bound = bound.reshape(-1)
    with np.errstate(all="ignore"):
        distance = np.abs(got.astype(np.float64) - wanted.astype(np.float64))
        is_same = (got == wanted) | (_is_nan(got) & _is_nan(wanted))
    return np.asarray(~(is_same | (distance <= bound) | np.isinf(bound)))


def _describe(got: Array, wanted: Array, is_wrong: Array) -> str:
    place = int(np.argmax(is_wrong))
    number = f"{int(is_wrong.sum())} of {is_wrong.size} numbers"
    return (
        f"{number} differ, first at {place}: {_show(got[place])}, expected {_show(wanted[place])}"
    )


def _show(number: Any) -> str:
    return repr(number.item()) if number.dtype.kind in "biu" else f"{float(number)!r}"
