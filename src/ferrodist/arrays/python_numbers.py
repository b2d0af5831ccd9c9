# SPDX-License-Identifier: MIT OR Apache-2.0
"""Python's bool, int, float and complex: numbers in, numbers out."""

from __future__ import annotations

from typing import Any

import numpy as np

from ferrodist.arrays.host_memory import buffer_of, fresh, numpy_dtype
from ferrodist.arrays.library import Library, Result, Taken, as_it_is, refuse, refuse_out, type_name
from ferrodist.buffer import DType
from ferrodist.reduce_op import ReduceOp

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# bool stands before int because it is a subclass of it.
_DTYPES = {
    bool: DType.BOOL,
    int: DType.INT64,
    float: DType.FLOAT64,
    complex: DType.COMPLEX128,
}
NUMBER_TYPES = tuple(_DTYPES)


class PythonNumbers:
    """Numbers, as 0-d arrays of the dtype NumPy gives them."""

    def take(self, x: Any, where: str) -> Taken:
        """Copy the number."""
        number, dtype = next((kind(x), _DTYPES[kind]) for kind in _DTYPES if isinstance(x, kind))
        if dtype is DType.INT64 and not INT64_MIN <= number <= INT64_MAX:
            raise refuse(where, f"the int {_short(number)}, outside int64", "pass float(x)")
        array = np.array(number, numpy_dtype(dtype))
        return Taken(buffer_of(array, dtype), self, number, is_number=True)

    def new_result(self, taken: Taken, shape: tuple[int, ...]) -> Result:
        """Make room for a number, or for a NumPy array of them."""
        dtype = taken.buffer.dtype
        array = np.empty(shape, numpy_dtype(dtype))
        return fresh(array, dtype, _number if shape == () else as_it_is)

    def take_out(self, out: Any, dtype: DType, shape: tuple[int, ...]) -> Result:
        """Refuse: a number cannot be written."""
        raise refuse_out(f"a Python {type_name(out)}", "pass a 0-d array, such as np.empty(())")

    def span(self, x: Any) -> None:
        """Tell that nothing can share a number's memory."""


PYTHON_NUMBERS: Library = PythonNumbers()


def check_number(taken: Taken, op: ReduceOp, world_size: int, where: str = "x") -> None:
    """Refuse a Python int whose reduction over the ranks could leave int64.

    A rank knows only its own number. If each of W numbers passes, so does what they give together.
    """
    if not taken.is_number or taken.buffer.dtype is not DType.INT64:
        return
    if not _stays_in_int64(taken.array, op, world_size):
        fate = f"{op.name} over {world_size} ranks could leave int64"
        what = f"the int {_short(taken.array)}, whose {fate}"
        raise refuse(where, what, "pass float(x), or an int64 array if it may wrap")


def _stays_in_int64(number: int, op: ReduceOp, world_size: int) -> bool:
    if op is ReduceOp.SUM:
        return INT64_MIN <= number * world_size <= INT64_MAX
    if op is ReduceOp.PROD:
        return int(abs(number) ** world_size) <= INT64_MAX
    return True


def _short(number: int) -> str:
    # An int of millions of digits takes minutes to print, and nobody reads it.
    return str(number) if number.bit_length() <= 256 else f"of {number.bit_length()} bits"


def _number(array: np.ndarray[Any, Any]) -> Any:
    return array.item()
