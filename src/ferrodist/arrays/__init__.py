# SPDX-License-Identifier: MIT OR Apache-2.0
"""Conversion: any array becomes a Buffer, and a result becomes the caller's own kind of array.

Only this package knows array libraries, one file each. A framework is imported only when the
caller's array comes from it. Nothing here communicates.
"""

from ferrodist.arrays.convert import (
    Form,
    array_over,
    as_device_input,
    as_device_output,
    as_input,
    as_output,
    as_output_of_its_form,
    form_like,
    is_on_device,
    new_result,
    numpy_result,
    parse_form,
    received_array,
    split_blocks,
    split_rows,
)
from ferrodist.arrays.host_arrays import check_number
from ferrodist.arrays.library import (
    InputArray,
    Library,
    OutputArray,
    Span,
    advise_objects,
    is_writable_in_part,
    numpy_dtype,
    type_name,
)
from ferrodist.arrays.memory_overlap import Overlap, OverlapKind, find_crossing, overlap
from ferrodist.arrays.trees import flatten, is_tree

__all__ = [
    "as_input", "as_device_input", "as_device_output", "is_on_device", "new_result", "numpy_result",
    "as_output", "split_blocks", "split_rows", "overlap", "find_crossing", "check_number",
    "flatten", "is_tree", "array_over", "received_array", "advise_objects", "is_writable_in_part",
    "numpy_dtype", "type_name", "form_like", "parse_form", "Form", "Library", "Overlap",
    "OverlapKind", "Span", "InputArray", "OutputArray", "as_output_of_its_form",
]  # fmt: skip
