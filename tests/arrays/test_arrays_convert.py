# SPDX-License-Identifier: MIT OR Apache-2.0
"""Conversion: which library takes what, what is refused, and what is imported."""

from __future__ import annotations

import decimal
import pickle
import subprocess
import sys
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from ferrodist.arrays import as_input, as_output, numpy_result
from ferrodist.buffer import ARRAY_DTYPES, DType
from ferrodist.errors import InvalidArgument, UnsupportedArray


class OnlyArray:
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.zeros(3)


class OnlyCuda:
    __cuda_array_interface__: ClassVar = {"shape": (3,), "typestr": "<f4", "version": 3}


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (None, "x is None; pass an array"),
        ("text", "x is a str; pass an array or a number, or use broadcast_object"),
        ({1, 2}, "x is a set; pass an array"),
        (object(), "x is a object"),
        (decimal.Decimal(1), "x is a decimal.Decimal"),
        (np.float32, "x is the type float32"),
        (OnlyArray(), r"x is a .*OnlyArray; pass np\.asarray\(x\)"),
        (OnlyCuda(), r"x is a .*OnlyCuda; pass cupy\.asarray\(x\), or copy it to the host"),
    ],
    ids=["None", "str", "set", "object", "decimal", "type", "array", "cuda"],
)
def test_what_is_no_array_is_refused(x: Any, message: str) -> None:
    with pytest.raises(UnsupportedArray, match=message):
        as_input(x)
    with pytest.raises(InvalidArgument, match="; pass a writable array"):
        as_output(x, DType.FLOAT32, (3,))


def test_error_names_the_place_and_keeps_the_fact() -> None:
    with pytest.raises(UnsupportedArray, match=r"^tree leaf \['a'\]\[0\] is a str") as caught:
        as_input("text", "tree leaf ['a'][0]")
    assert pickle.loads(pickle.dumps(caught.value)).got == "a str"


@pytest.mark.parametrize("dtype", ARRAY_DTYPES, ids=lambda dtype: dtype.label)
def test_numpy_result_has_dtype_and_shape(dtype: DType) -> None:
    result = numpy_result(dtype, (2, 3))
    assert result.buffer.nbytes == 6 * dtype.itemsize
    assert result.finish().dtype.name == dtype.label
    assert result.finish().shape == (2, 3)


def test_numpy_result_of_bfloat16_is_that_of_ml_dtypes() -> None:
    result = numpy_result(DType.BFLOAT16, (1,))
    result.buffer.memory[:] = b"\x80\x3f"
    assert result.finish() == ml_dtypes.bfloat16(1)


def test_numpy_result_of_bfloat16_names_the_missing_package(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(UnsupportedArray, match="bfloat16 needs the package ml_dtypes; install it"):
        numpy_result(DType.BFLOAT16, (1,))


NO_FRAMEWORKS = """
import array, sys
import numpy as np
from ferrodist.arrays import flatten, new_result, as_input, as_output
from ferrodist.errors import UnsupportedArray

tree = {"a": [np.zeros(3), 1.0, b"x"], "b": (np.float32(1), array.array("f", [1]), None)}
for path, leaf in flatten(tree)[0]:
    taken = as_input(leaf)
    new_result(taken, taken.buffer.shape).finish()
try:
    as_input(object())
except UnsupportedArray:
    pass
loaded = {"torch", "jax", "cupy", "ml_dtypes"} & set(sys.modules)
assert not loaded, loaded
"""

NO_OTHER_FRAMEWORK = """
import sys, torch
before = set(sys.modules)
from ferrodist.arrays import new_result, as_input
taken = as_input(torch.ones(3, dtype=torch.bfloat16))
assert new_result(taken, (2,)).finish().dtype is torch.bfloat16
loaded = {"jax", "cupy", "ml_dtypes"} & (set(sys.modules) - before)
assert not loaded, loaded
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [NO_FRAMEWORKS, NO_OTHER_FRAMEWORK], ids=["none", "torch"])
def test_frameworks_are_imported_only_for_their_own_arrays(program: str) -> None:
    if program is NO_OTHER_FRAMEWORK:
        pytest.importorskip("torch", reason="the program converts a tensor of torch")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
