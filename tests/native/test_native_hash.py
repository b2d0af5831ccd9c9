# SPDX-License-Identifier: MIT OR Apache-2.0
"""The hashes ranks compare, and the stub of the native module."""

from __future__ import annotations

import ast
import inspect
import itertools
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferrodist.buffer
from ferrodist import _native

STUB = Path(ferrodist.buffer.__file__).with_name("_native.pyi")


def test_fingerprint_is_a_64_bit_number() -> None:
    hashes = [_native.fingerprint([number]) for number in range(1000)]
    assert all(0 <= value < 1 << 64 for value in hashes)
    assert max(hashes) > 1 << 63


def test_fingerprint_and_text_hash_are_the_same_on_every_machine() -> None:
    """Ranks may run on different machines: these values must never change within a version."""
    assert _native.fingerprint([0, -1, 2**64 - 1]) == 0x5AC0B74515EE2CE5
    assert _native.hash_text("ring") == 0x9B1881835550537B


def test_order_of_the_numbers_matters() -> None:
    hashes = {_native.fingerprint(numbers) for numbers in itertools.permutations(range(6))}
    assert len(hashes) == 720


def test_number_of_the_numbers_matters() -> None:
    assert len({_native.fingerprint([0] * length) for length in range(100)}) == 100


def test_sign_matters_where_the_bits_are_the_same() -> None:
    assert _native.fingerprint([-1]) != _native.fingerprint([2**64 - 1])
    assert _native.fingerprint([-(2**63)]) != _native.fingerprint([2**63])


def test_small_tuples_do_not_collide() -> None:
    values = [-1, 0, 1, 2, 3, 7, 8, 1024, 2**32, 2**63, 2**64 - 1]
    tuples = [
        numbers for length in range(6) for numbers in itertools.product(values, repeat=length)
    ]
    assert len({_native.fingerprint(numbers) for numbers in tuples}) == len(tuples)


def test_every_bit_of_a_number_moves_about_half_of_the_hash() -> None:
    flips = [
        (_native.fingerprint([number]) ^ _native.fingerprint([number ^ 1 << bit])).bit_count()
        for number in range(200)
        for bit in range(63)
    ]
    assert 31.5 < np.mean(flips) < 32.5
    assert min(flips) > 8


@pytest.mark.parametrize("numbers", [(1, 2, 3), np.array([1, 2, 3]), range(1, 4)])
def test_any_sequence_of_integers_gives_the_hash_of_the_list(numbers: Sequence[int]) -> None:
    assert _native.fingerprint(numbers) == _native.fingerprint([1, 2, 3])


def test_bool_counts_as_its_number() -> None:
    assert _native.fingerprint([True, False]) == _native.fingerprint([1, 0])


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
def test_number_beyond_64_bits_is_refused(number: int) -> None:
    with pytest.raises(OverflowError):
        _native.fingerprint([number])


@pytest.mark.parametrize("item", [1.5, "1", None])
def test_what_is_no_integer_is_refused(item: object) -> None:
    with pytest.raises(TypeError):
        _native.fingerprint([item])  # type: ignore[list-item]  # the point of the test


def test_texts_do_not_collide() -> None:
    words = ["", "\0", "\0\0", "a", "a\0", "ä", "rings"]
    words += [f"layers.{i}.{name}" for i in range(2000) for name in ("weight", "bias", "weight ")]
    words += ["x" * length for length in range(2, 100)]
    assert len({_native.hash_text(word) for word in words}) == len(words)


def test_words_in_another_order_hash_differently() -> None:
    assert _native.hash_text("12345678abcdefgh") != _native.hash_text("abcdefgh12345678")


Signature = tuple[list[str], int, str | None]


def describe(function: ast.FunctionDef) -> Signature:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    return names, len(function.args.defaults), ast.get_docstring(function)


def functions_of(nodes: list[ast.stmt], prefix: str = "") -> dict[str, Signature]:
    """Describe functions, and those of classes; of properties only that they can be read."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            found |= functions_of(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            is_setter = any(isinstance(mark, ast.Attribute) for mark in node.decorator_list)
            if not is_setter:
                found[prefix + node.name] = describe(node)
    return found


def signature_of(record: Any, name: str) -> Signature:
    """Read nanobind's own record; it writes a default as a backslash and a number."""
    text, docstring, *_ = record
    named = text.replace("\\", "").replace("def (", f"def {name}(")
    (function,) = ast.parse(named + ": ...").body
    assert isinstance(function, ast.FunctionDef)
    names, num_defaults, _ = describe(function)
    return names, num_defaults, docstring


def plain_signature_of(function: Any) -> Signature:
    """Read the signature of a function that is not nanobind's."""
    parameters = inspect.signature(function).parameters
    num_defaults = sum(one.default is not one.empty for one in parameters.values())
    return list(parameters), num_defaults, function.__doc__


def functions_of_module() -> dict[str, Signature]:
    found = {}
    for name, value in vars(_native).items():
        if name.startswith("_"):
            continue
        if not isinstance(value, type):
            records = getattr(value, "__nb_signature__", None)
            is_plain = records is None
            found[name] = plain_signature_of(value) if is_plain else signature_of(records[0], name)
            continue
        for member, function in vars(value).items():
            function = getattr(function, "fget", function)
            records = getattr(function, "__nb_signature__", None)
            if records and (member == "__init__" or not member.startswith("__")):
                found[f"{name}.{member}"] = signature_of(records[0], member)
            elif isinstance(function, types.MethodDescriptorType):
                found[f"{name}.{member}"] = plain_signature_of(function)
            elif isinstance(function, types.GetSetDescriptorType) and name in function.__qualname__:
                found[f"{name}.{member}"] = ["self"], 0, function.__doc__
    return found


def test_stub_says_what_the_module_has() -> None:
    assert functions_of(ast.parse(STUB.read_text()).body) == functions_of_module()
