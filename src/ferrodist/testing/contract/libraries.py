# SPDX-License-Identifier: MIT OR Apache-2.0
"""Arrays of every library that is installed, made from NumPy and read back.

``python`` stands for Python's own numbers, ``scalar`` for NumPy's.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import numpy as np

from ferrodist.testing.contract.dtypes import Array, numpy_dtype

NUMBERS = ("python", "scalar")
_PYTHON_TYPES = {"bool": bool, "int64": int, "float64": float, "complex128": complex}


@functools.cache
def available_libraries() -> tuple[str, ...]:
    """Name the array libraries that are installed, NumPy first."""
    optional = [name for name in ("torch", "jax") if importlib.util.find_spec(name) is not None]
    return ("numpy", *optional)


def can_hold(library: str, dtype: str) -> bool:
    """Tell whether every library named in ``numpy+torch+...`` has a dtype."""
    return all(_can_hold(name, dtype) for name in library.split("+"))


def _can_hold(library: str, dtype: str) -> bool:
    if library == "python":
        return dtype in _PYTHON_TYPES
    if library == "jax":  # without its x64 switch it has nothing wider
        return dtype not in ("int64", "uint64", "float64", "complex128")
    return True


def to_library(array: Array, library: str) -> Any:
    """Make an array, or a number, of a library; NumPy's is the array itself."""
    if library == "torch":
        return _to_torch(array)
    if library == "jax":
        return importlib.import_module("jax").device_put(array)
    if library == "python":
        return array.item()
    return array[()] if library == "scalar" else array


def _to_torch(array: Array) -> Any:
    torch = importlib.import_module("torch")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(x: Any, dtype: str) -> Array:
    """Read an array of any library; a torch tensor is seen in place."""
    if isinstance(x, np.ndarray):
        return x
    if type(x).__module__.partition(".")[0] != "torch":
        return np.asarray(x, numpy_dtype(dtype) if type(x) in _PYTHON_TYPES.values() else None)
    if dtype == "bfloat16":
        torch = importlib.import_module("torch")
        seen: Array = x.view(torch.int16).numpy().view(numpy_dtype(dtype))
        return seen
    array: Array = x.numpy()
    return array


def find_wrong_kind(x: Any, library: str, dtype: str) -> str | None:
    """Say what ``x`` is instead of an array of this library and dtype; None if it is one."""
    if library == "python":
        is_right = type(x) is _PYTHON_TYPES[dtype]
    elif library == "torch":
        is_right = isinstance(x, _array_type(library)) and str(x.dtype) == f"torch.{dtype}"
    else:
        is_right = isinstance(x, _array_type(library)) and x.dtype == numpy_dtype(dtype)
    if is_right:
        return None
    found = f"{type(x).__module__}.{type(x).__qualname__} {getattr(x, 'dtype', '')}"
    return f"a {found.rstrip()}, expected {library} {dtype}"


def _array_type(library: str) -> Any:
    """Return the class of a library's arrays."""
    if library in ("numpy", "scalar"):
        return np.ndarray if library == "numpy" else np.generic
    name = {"torch": "Tensor", "jax": "Array"}[library]
    return getattr(importlib.import_module(library), name)
