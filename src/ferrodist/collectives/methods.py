# SPDX-License-Identifier: MIT OR Apache-2.0
"""Makes a public function a method of every backend too: the same call, without ``backend``.

And hides from signatures what takes arguments that are mistakes, to answer them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, TypeVar

from ferrodist.backends.base import Backend
from ferrodist.config import DEFAULT

_ABSENT: Any = object()
F = TypeVar("F", bound=Callable[..., Any])


def hide_mistaken(function: F) -> F:
    """Leave what takes arguments that are mistakes out of what help and editors show."""
    signature = inspect.signature(function)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    shown = [p for p in signature.parameters.values() if p.kind not in variable]
    function.__dict__["__signature__"] = signature.replace(parameters=shown)
    return function


# What torch, MPI and Horovod call the arguments of these calls.
_BACKEND = dict.fromkeys(("group", "process_group", "comm", "process_set"), "backend")
_ROOT = dict.fromkeys(("src", "dst", "root_rank", "rank"), "root")
_PEERS = {"dest": "dst", "source": "src"}
_ARRAYS = {"tensor": "x", "obj": "value", "object_list": "value"}


ALL_OPTIONS: dict[str, Any] = {
    "out": None,
    "timeout": DEFAULT,
    "async_op": False,
    "algorithm": None,
    "reproducible": None,
}


def show_options(function: F) -> F:
    """Show the common keyword arguments, which the function takes as one, one by one."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    shown = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in ALL_OPTIONS.items()
    ]
    function.__dict__["__signature__"] = signature.replace(parameters=[*own, *shown])
    return function


def refuse_keyword(name: str, mistaken: dict[str, Any]) -> TypeError:
    """Make the error for a keyword that a call does not have, with the one that was meant."""
    keyword = next(iter(mistaken))
    text = f"{name}() got an unexpected keyword argument {keyword!r}"
    meant = (_BACKEND | _ROOT | _PEERS | _ARRAYS).get(keyword)
    if meant in inspect.signature(getattr(Backend, name)).parameters or meant == "backend":
        text += f"; here it is {meant}="
    return TypeError(text)


def attach(function: Callable[..., Any]) -> None:
    """Give ``Backend`` a method of this function's name, signature and docstring."""
    signature = inspect.signature(function)
    place = list(signature.parameters).index("backend")
    method = _after_one(function) if place == 1 else _after(function, place)
    update_wrapper(method, function)
    method.__qualname__ = f"Backend.{function.__name__}"
    del method.__dict__["__wrapped__"]  # it has another signature
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = [p for p in signature.parameters.values() if p.name != "backend"]
    method.__dict__["__signature__"] = signature.replace(parameters=[own, *rest])
    setattr(Backend, function.__name__, method)


def _after_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Put the backend second; no argument is packed or cut out on the way, as calls are short."""

    def method(self: Backend, x: Any = _ABSENT, /, *args: Any, **options: Any) -> Any:
        if x is _ABSENT:  # it is named, or missing
            return function(*args, backend=self, **options)
        return function(x, self, *args, **options)

    return method


def _after(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    def method(self: Backend, *args: Any, **options: Any) -> Any:
        if len(args) < place:  # what stands before ``backend`` is named, or missing
            return function(*args, backend=self, **options)
        return function(*args[:place], self, *args[place:], **options)

    return method
