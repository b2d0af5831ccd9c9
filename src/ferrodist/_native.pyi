# SPDX-License-Identifier: MIT OR Apache-2.0
"""The native part of ferrodist: fold kernels and hashes.

Codes are those of DType and ReduceOp. Buffers are C-contiguous, of any alignment, and taken as
bytes. A test holds names, parameters and docstrings against the module.
"""

from collections.abc import Sequence

from _typeshed import ReadableBuffer, WriteableBuffer

def hash_text(text: str) -> int:
    """Hash text to 64 bits."""

def fingerprint(numbers: Sequence[int]) -> int:
    """Hash 64-bit numbers, signed or not, to 64 bits; order, length and sign matter."""

def fold(
    dtype: int,
    op: int,
    into: WriteableBuffer,
    operands: Sequence[ReadableBuffer],
    divisor: int = 1,
) -> None:
    """Fold the operands from left to right into one buffer; MEAN divides by divisor."""

def widen(dtype: int, into: WriteableBuffer, source: ReadableBuffer) -> None:
    """Convert 16-bit floats to float32."""

def narrow(dtype: int, into: WriteableBuffer, source: ReadableBuffer) -> None:
    """Round float32 to 16-bit floats, to nearest even."""

def cpu_levels() -> list[str]:
    """Name the variants of the kernels this machine can run, best first."""

def cpu_level() -> str:
    """Name the variant of the kernels in use."""

def use_cpu_level(name: str) -> None:
    """Use another variant of the kernels; all give the same bits."""
