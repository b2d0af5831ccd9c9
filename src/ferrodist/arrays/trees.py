# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trees of arrays: lists, tuples, dicts and JAX's registered nodes, taken apart and put together.

None has no leaf and stays None. Dicts are walked in sorted key order, so that ranks agree, and come
back in their own order.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ferrodist.arrays.library import refuse

_MAX_DEPTH = 200

_Build = Callable[[Iterator[Any]], Any]


class _Node(NamedTuple):
    """One level of a tree: the way to each child, the children, and how to put them together."""

    steps: list[str]
    children: list[Any]
    join: Callable[[list[Any]], Any]


def is_tree(x: Any) -> bool:
    """Tell whether ``x`` holds arrays rather than being one; a lone None is no tree."""
    return isinstance(x, (list, tuple, dict)) or _is_jax_node(x)


def flatten(
    tree: Any, where: str = "x"
) -> tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]]:
    """Return ``[(path, leaf), ...]``, and a function that builds the same tree of other leaves.

    A path is like ``['a'][0].field``, and empty for a lone array. ``where`` names the tree in
    errors.
    """
    leaves: list[tuple[str, Any]] = []
    build = _Walk(where, leaves).visit(tree, "")

    def rebuild(values: list[Any]) -> Any:
        assert len(values) == len(leaves), "one value for each leaf"
        return build(iter(values))

    return leaves, rebuild


class _Walk:
    """One pass over a tree; ``ancestors`` are the nodes above the one at hand."""

    def __init__(self, where: str, leaves: list[tuple[str, Any]]) -> None:
        self.where = where
        self.leaves = leaves
        self.ancestors: set[int] = set()

    def visit(self, x: Any, path: str) -> _Build:
        """Collect the leaves of ``x``; return what builds it again from an iterator of values."""
        if x is None:
            return lambda values: None
        if not is_tree(x):
            self.leaves.append((path, x))
            return next
        self._check_end(x, path)
        self.ancestors.add(id(x))
        node = _take_apart(x, self._place(path))
        parts = [
            self.visit(child, path + step)
            for step, child in zip(node.steps, node.children, strict=True)
        ]
        self.ancestors.remove(id(x))
        return lambda values: node.join([build(values) for build in parts])

    def _check_end(self, x: Any, path: str) -> None:
        if id(x) in self.ancestors:
            raise refuse(self._place(path), "a container that contains itself", "pass a tree")
        if len(self.ancestors) == _MAX_DEPTH:
            raise refuse(self._place(path), f"nested {_MAX_DEPTH} levels deep", "flatten it")

    def _place(self, path: str) -> str:
        return self.where + (path if len(path) <= 60 else path[:60] + "...")


def _take_apart(x: Any, place: str) -> _Node:
    if isinstance(x, dict):
        return _take_dict_apart(x, place)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        make: Callable[[list[Any]], Any] = type(x)._make  # type: ignore[attr-defined] # named tuple
        return _Node([f".{field}" for field in x._fields], list(x), make)
    if isinstance(x, list):
        return _Node(_indices(x), list(x), functools.partial(_join_list, x))
    if isinstance(x, tuple):
        return _Node(_indices(x), list(x), functools.partial(_join_tuple, x))
    return _take_jax_node_apart(x)


def _indices(x: Sequence[Any]) -> list[str]:
    return [f"[{index}]" for index in range(len(x))]


def _take_dict_apart(x: dict[Any, Any], place: str) -> _Node:
    try:
        keys = sorted(x)
    except TypeError as error:
        kinds = ", ".join(sorted({type(key).__name__ for key in x}))
        # Ranks must agree on the order, and they need not have inserted the keys alike.
        what = f"a dict whose keys cannot be sorted ({kinds})"
        raise refuse(place, what, "use keys of one type, such as str") from error
    steps = [f"[{key!r}]" for key in keys]
    return _Node(steps, [x[key] for key in keys], functools.partial(_join_dict, x, keys))


def _join_dict(like: dict[Any, Any], keys: list[Any], values: list[Any]) -> dict[Any, Any]:
    by_key = dict(zip(keys, values, strict=True))
    if type(like) is dict:
        return {key: by_key[key] for key in like}
    joined = copy.copy(like)  # keeps what a subclass adds, such as default_factory
    for key in like:
        joined[key] = by_key[key]
    return joined


def _join_list(like: list[Any], values: list[Any]) -> list[Any]:
    if type(like) is list:
        return values
    joined = copy.copy(like)
    joined[:] = values
    return joined


def _join_tuple(like: tuple[Any, ...], values: list[Any]) -> Any:
    if hasattr(like, "n_fields"):  # a named tuple made in C, such as torch.return_types.max
        return type(like)(values)
    try:
        return tuple.__new__(type(like), values)
    except TypeError:  # torch.Size holds ints only, and the leaves may be anything
        return tuple(values)


def _is_jax_node(x: Any) -> bool:
    # A node was registered with jax, so jax is imported. Arrays are not worth the question.
    jax_trees = sys.modules.get("jax.tree_util")
    if jax_trees is None or x is None or isinstance(x, (np.ndarray, np.generic, int, float)):
        return False
    return not jax_trees.all_leaves([x])


def _take_jax_node_apart(x: Any) -> _Node:
    jax_trees = sys.modules["jax.tree_util"]
    below_root = itertools.chain([False], itertools.repeat(True))
    # jax asks this of the root first. Not "y is not x": a node may contain itself.
    keyed, structure = jax_trees.tree_flatten_with_path(x, is_leaf=lambda y: next(below_root))
    steps = [jax_trees.keystr(keys) for keys, _ in keyed]
    return _Node(steps, [child for _, child in keyed], structure.unflatten)
