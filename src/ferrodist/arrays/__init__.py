# SPDX-License-Identifier: MIT OR Apache-2.0
"""The door: any array becomes a Buffer, and a result becomes the caller's own kind of array.

Only this room knows array libraries, one file each. A framework is imported only when the caller's
array comes from it. Nothing here communicates.
"""

from ferrodist.arrays.door import new_result, numpy_result, take, take_out
from ferrodist.arrays.library import Library, Result, Span, Taken
from ferrodist.arrays.memory_overlap import Overlap, OverlapKind, find_crossing, overlap
from ferrodist.arrays.new_arrays import Form, array_over, form_like, parse_form
from ferrodist.arrays.python_numbers import check_number
from ferrodist.arrays.trees import flatten, is_tree

__all__ = [
    "take",
    "new_result",
    "numpy_result",
    "take_out",
    "overlap",
    "find_crossing",
    "check_number",
    "flatten",
    "is_tree",
    "array_over",
    "form_like",
    "parse_form",
    "Form",
    "Library",
    "Overlap",
    "OverlapKind",
    "Result",
    "Span",
    "Taken",
]
