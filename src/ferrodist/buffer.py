# SPDX-License-Identifier: MIT OR Apache-2.0
"""Buffer: the contiguous memory of one array, and DType: what its elements are.

Below ``arrays/`` no array library exists; everything is a Buffer.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ferrodist.errors import out_of_memory


class DType(enum.IntEnum):
    """Element types ferrodist can move and reduce. The values are the native codes."""

    BOOL = 0
    INT8 = 1
    INT16 = 2
    INT32 = 3
    INT64 = 4
    UINT8 = 5
    UINT16 = 6
    UINT32 = 7
    UINT64 = 8
    FLOAT16 = 9
    BFLOAT16 = 10
    FLOAT32 = 11
    FLOAT64 = 12
    COMPLEX64 = 13
    COMPLEX128 = 14
    PAIR = 15  # of no array: what MINLOC and MAXLOC reduce, a key of a value and one of its index

    @property
    def label(self) -> str:
        """The name NumPy, torch and JAX share, such as ``float32``."""
        return self.name.lower()

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]

    @property
    def is_half(self) -> bool:
        """True for the 16-bit floats, which are accumulated in float32."""
        return self in (DType.FLOAT16, DType.BFLOAT16)

    @property
    def is_complex(self) -> bool:
        """True for complex64 and complex128."""
        return self in (DType.COMPLEX64, DType.COMPLEX128)

    @property
    def is_float(self) -> bool:
        """True for real floating-point types."""
        return DType.FLOAT16 <= self <= DType.FLOAT64

    @property
    def is_integer(self) -> bool:
        """True for signed and unsigned integers; bool is not one."""
        return DType.INT8 <= self <= DType.UINT64


class ArrayKind(enum.IntEnum):
    """What a caller's array is, so that a message comes back as it was sent.

    The values are the native codes. Arrays of other libraries, and on other devices, are NUMPY.
    """

    NUMPY = 1
    NUMPY_SCALAR = 2
    NUMBER = 3
    TORCH = 4
    BYTES = 6
    BYTEARRAY = 7
    PYTHON_ARRAY = 8
    MEMORY = 9
    JAX = 10
    OBJECT = 254  # the bytes of an object: what recv_object takes
    PICKLE = 255  # the same, pickled


_ITEMSIZE = (1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16, 16)

MAX_AXES = 64
"""How many axes an array may have, as in NumPy."""

ARRAY_DTYPES = tuple(dtype for dtype in DType if dtype is not DType.PAIR)
"""What the elements of an array may be."""

DTYPES_BY_LABEL = {dtype.label: dtype for dtype in ARRAY_DTYPES}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Buffer:
    """Contiguous memory of one array: what backends see.

    ``memory`` is a flat view of bytes. ``owner`` keeps the user's array alive while bytes are in
    flight.
    """

    memory: memoryview
    dtype: DType
    shape: tuple[int, ...]
    owner: object = None

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.memory.nbytes

    @classmethod
    def empty(cls, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        """Allocate fresh, uninitialised memory of our own."""
        nbytes = math.prod(shape) * dtype.itemsize
        try:
            return cls(np.empty(nbytes, np.uint8).data, dtype, shape)
        except MemoryError as error:
            raise out_of_memory(nbytes) from error

    @classmethod
    def of_numbers(cls, numbers: np.ndarray[Any, Any]) -> Buffer:
        """Show a contiguous array of int64."""
        memory = numbers.reshape(-1).view(np.uint8).data
        return cls(memory, DType.INT64, numbers.shape, numbers)

    def copy(self) -> Buffer:
        """Copy the content to memory of its own."""
        try:
            return Buffer(memoryview(bytes(self.memory)), self.dtype, self.shape)
        except MemoryError as error:
            raise out_of_memory(self.nbytes) from error


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DeviceBuffer(Buffer):
    """An array that stays on its device, for an engine that does a call there.

    ``owner`` is a contiguous tensor of torch's, ``memory`` is empty. What is done with it is done
    in the order of ``stream``, which was the current one when the call was made.
    """

    owner: Any = None
    stream: Any = None

    @property
    def nbytes(self) -> int:
        """Number of bytes on the device."""
        return self.count * self.dtype.itemsize
