# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trees of arrays, taken apart and put together."""

from __future__ import annotations

import collections
import dataclasses
import enum
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ferrodist.arrays import as_input, flatten, is_tree
from ferrodist.errors import UnsupportedArray


class Point(NamedTuple):
    x: Any
    y: Any = None


class Settings(dict[str, Any]):
    """A dict with something of its own."""

    def __init__(self, name: str) -> None:
        self.name = name


class Stack(list[Any]):
    pass


class Pair(tuple[Any, ...]):
    def __new__(cls, left: Any, right: Any) -> Pair:
        return super().__new__(cls, (left, right))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: Any
    bias: Any
    name: str = dataclasses.field(default="", metadata={"static": True})


@jax.tree_util.register_pytree_node_class
class Ring:
    """A JAX node that can contain itself."""

    def __init__(self, child: Any = None) -> None:
        self.child = child

    def tree_flatten(self) -> Any:
        return (self.child,), None

    @classmethod
    def tree_unflatten(cls, fixed: Any, children: Any) -> Ring:
        return cls(*children)


def paths(tree: Any) -> list[str]:
    return [path for path, _ in flatten(tree)[0]]


def leaves(tree: Any) -> list[Any]:
    return [leaf for _, leaf in flatten(tree)[0]]


def rebuilt(tree: Any) -> Any:
    found, rebuild = flatten(tree)
    return rebuild([leaf for _, leaf in found])


def replaced(tree: Any) -> Any:
    """Build the tree again with the numbers 0, 1, ... as leaves, in the order of the walk."""
    found, rebuild = flatten(tree)
    return rebuild(list(range(len(found))))


def test_lone_array_is_one_leaf_with_an_empty_path() -> None:
    x = np.zeros(3)
    assert flatten(x)[0] == [("", x)]
    assert flatten(x)[1](["y"]) == "y"
    assert not is_tree(x)


def test_lone_none_has_no_leaf_and_is_no_tree() -> None:
    assert flatten(None)[0] == []
    assert flatten(None)[1]([]) is None
    assert not is_tree(None)


@pytest.mark.parametrize(
    "x",
    [[], (), {}, [1], {"a": 1}, Point(1), Settings("s"), Layer(1, 2), torch.Size([1])],
    ids=type,
)
def test_containers_are_trees(x: Any) -> None:
    assert is_tree(x)


@pytest.mark.parametrize(
    "x",
    [1, 1.0, "ab", b"ab", {1}, np.zeros(2), np.float32(1), torch.ones(2), jnp.ones(2), object()],
)
def test_everything_else_is_a_leaf(x: Any) -> None:
    assert not is_tree(x)
    assert len(flatten(x)[0]) == 1


def test_paths_read_like_the_code_that_gets_there() -> None:
    tree = {"a": [1, (2, 3)], "b": Point(4, {"c": 5}), 0.5: None} | {}
    del tree[0.5]
    assert paths(tree) == ["['a'][0]", "['a'][1][0]", "['a'][1][1]", "['b'].x", "['b'].y['c']"]
    assert leaves(tree) == [1, 2, 3, 4, 5]


def test_dict_is_walked_in_sorted_order_and_comes_back_in_its_own() -> None:
    tree = {"b": 1, "c": 2, "a": 3}
    assert paths(tree) == ["['a']", "['b']", "['c']"]
    assert leaves(tree) == [3, 1, 2]
    assert list(replaced(tree).items()) == [("b", 1), ("c", 2), ("a", 0)]


def test_integer_keys_are_sorted_as_numbers() -> None:
    assert paths({10: 1, 9: 1}) == ["[9]", "[10]"]


def test_named_tuples_come_back_as_they_were() -> None:
    assert replaced(Point(5, Point(6))) == Point(0, Point(1, None))
    assert type(replaced(Point(5))) is Point


def test_named_tuples_made_in_c_come_back_as_they_were() -> None:
    found = rebuilt(torch.ones(2, 3).max(0))
    assert type(found) is torch.return_types.max
    assert found.values.tolist() == [1, 1, 1]
    assert type(replaced(time.struct_time(range(9)))) is time.struct_time


def test_dict_types_come_back_as_they_were() -> None:
    ordered = collections.OrderedDict([("b", 5), ("a", 6)])
    assert replaced(ordered) == collections.OrderedDict([("b", 1), ("a", 0)])
    default = replaced(collections.defaultdict(list, b=5, a=6))
    assert default == {"b": 1, "a": 0}
    assert default.default_factory is list
    settings = Settings("mine")
    settings["k"] = 5
    assert type(replaced(settings)) is Settings
    assert (replaced(settings).name, replaced(settings)["k"]) == ("mine", 0)
    assert settings["k"] == 5


def test_other_subclasses_come_back_as_they_were() -> None:
    assert type(replaced(Stack([5, 6]))) is Stack
    assert replaced(Stack([5, 6])) == [0, 1]
    assert type(replaced(Pair(5, 6))) is Pair
    assert replaced(Pair(5, 6)) == (0, 1)


def test_tuple_that_cannot_hold_the_leaves_comes_back_as_a_tuple() -> None:
    assert flatten(torch.Size([2, 3]))[1](["a", "b"]) == ("a", "b")


def test_none_stays_none() -> None:
    tree = [None, {"a": None, "b": 5}, Point(6, None)]
    assert leaves(tree) == [5, 6]
    assert replaced(tree) == [None, {"a": None, "b": 0}, Point(1, None)]


@pytest.mark.parametrize("tree", [[], (), {}, [[], {}], {"a": ()}, [None], Point(None)])
def test_empty_trees_are_fine(tree: Any) -> None:
    assert leaves(tree) == []
    assert rebuilt(tree) == tree


def test_rebuilt_tree_is_a_new_one() -> None:
    tree: dict[str, list[int]] = {"a": [1]}
    found = rebuilt(tree)
    found["a"].append(2)
    assert tree == {"a": [1]}


def test_leaf_used_twice_is_two_leaves() -> None:
    shared = [1]
    assert paths([shared, shared]) == ["[0][0]", "[1][0]"]


@pytest.mark.parametrize("keys", [("a", 1), (None, "a"), (1j, 2j)])
def test_keys_without_order_are_refused_with_their_place(keys: tuple[Any, ...]) -> None:
    tree = {"grads": [dict.fromkeys(keys, 1.0)]}
    with pytest.raises(
        UnsupportedArray, match=r"^x\['grads'\]\[0\] is a dict whose keys cannot be"
    ):
        flatten(tree)


def test_error_names_the_types_of_the_keys() -> None:
    class Color(enum.Enum):
        RED = 1
        BLUE = 2

    with pytest.raises(
        UnsupportedArray, match=r"^out is .* sorted \(Color\); use keys of one type"
    ):
        flatten(dict.fromkeys(Color), "out")


def test_list_that_contains_itself_is_refused() -> None:
    tree: list[Any] = [1]
    tree.append({"self": tree})
    with pytest.raises(
        UnsupportedArray, match=r"^x\[1\]\['self'\] is a container that contains itself"
    ):
        flatten(tree)


def test_tree_of_endless_depth_is_refused() -> None:
    tree: list[Any] = []
    for _ in range(5000):
        tree = [tree]
    with pytest.raises(UnsupportedArray, match=r"^x(\[0\])+\.\.\. is nested 200 levels deep"):
        flatten(tree)


def test_jax_node_that_contains_itself_is_refused() -> None:
    ring = Ring()
    ring.child = [ring]
    with pytest.raises(UnsupportedArray, match="contains itself"):
        flatten(ring)
    ring.child = ring
    with pytest.raises(UnsupportedArray, match="contains itself"):
        flatten(ring)


def test_jax_nodes_are_taken_apart_by_jax() -> None:
    tree = {"first": Layer(5, {"b": 6, "a": None}, "linear"), "second": Ring(7)}
    assert paths(tree) == ["['first'].weight", "['first'].bias['b']", "['second'][<flat index 0>]"]
    found = replaced(tree)
    assert found["first"] == Layer(0, {"b": 1, "a": None}, "linear")
    assert (type(found["second"]), found["second"].child) == (Ring, 2)


def test_our_rules_hold_inside_a_jax_node() -> None:
    found = replaced(Layer(collections.defaultdict(int, b=5, a=6), None))
    assert found.weight.default_factory is int
    assert found.weight == {"b": 1, "a": 0}


def test_leaf_that_is_no_array_is_named_with_its_place() -> None:
    path, leaf = flatten({"a": [1.0, "text"]})[0][1]
    with pytest.raises(UnsupportedArray, match=r"^x\['a'\]\[1\] is a str"):
        as_input(leaf, "x" + path)


def nodes(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), children, max_size=4)
        | st.builds(Point, children, children)
        | st.dictionaries(st.integers(), children, max_size=4).map(collections.OrderedDict)
    )


@pytest.mark.slow
@given(st.recursive(st.integers() | st.none(), nodes, max_leaves=30))
def test_any_tree_comes_back_as_it_was(tree: Any) -> None:
    assert rebuilt(tree) == tree
    assert repr(rebuilt(tree)) == repr(tree)  # types and orders too
    found = paths(tree)
    assert len(set(found)) == len(found)
    assert leaves(replaced(tree)) == list(range(len(found)))
