# SPDX-License-Identifier: MIT OR Apache-2.0
"""What all public calls share: their options, how they show them, and that backends have them too.

``backend.allreduce(x)`` is ``ferrodist.allreduce(x, backend)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any, TypeVar

from ferrodist.backends.base import Backend
from ferrodist.config import DEFAULT

_ABSENT: Any = object()
F = TypeVar("F", bound=Callable[..., Any])

# What torch, MPI and Horovod call the arguments of these calls.
_MEANT = {
    **dict.fromkeys(("group", "process_group", "comm", "process_set"), "backend"),
    **dict.fromkeys(("src", "dst", "root_rank", "rank"), "root"),
    "dest": "dst",
    "source": "src",
    "tensor": "x",
    "obj": "value",
    "object_list": "value",
}

_DEFAULTS = {
    "pickle": None,
    "out": None,
    "timeout": DEFAULT,
    "async_op": False,
    "algorithm": None,
    "reproducible": None,
}


def public(options: Any = None) -> Callable[[F], F]:
    """Make a function a method of every backend, and show the options of both one by one.

    ``options`` is the TypedDict that its ``**options`` unpack. What else is variable is there to
    answer mistakes, and not shown.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        fixed = [
            p
            for p in signature.parameters.values()
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if options is not None:
            own = {p.name: p for p in fixed if p.name in _DEFAULTS}
            hints = options.__annotations__
            fixed = [p for p in fixed if p.name not in own]
            fixed += [
                own.get(name) or _parameter(name, default, hints[name])
                for name, default in _DEFAULTS.items()
                if name in own or name in hints
            ]
        function.__dict__["__signature__"] = signature.replace(parameters=fixed)
        _attach(function, signature.replace(parameters=fixed))
        return function

    return decorate


def _parameter(name: str, default: Any, hint: Any) -> inspect.Parameter:
    words = getattr(hint, "__forward_arg__", hint)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=words
    )


def are_defaults(options: Mapping[str, Any]) -> bool:
    """Tell whether options say no more than if they were omitted."""
    return all(_DEFAULTS.get(name, _ABSENT) is value for name, value in options.items())


def check_keywords(name: str, keywords: Mapping[str, Any]) -> None:
    """Refuse a keyword that a call does not have, with the one that was meant."""
    known = inspect.signature(getattr(Backend, name)).parameters
    mistaken = next((keyword for keyword in keywords if keyword not in known), None)
    if mistaken is not None:
        meant = _MEANT.get(mistaken)
        advice = f"; here it is {meant}=" if meant in known or meant == "backend" else ""
        raise TypeError(f"{name}() got an unexpected keyword argument {mistaken!r}{advice}")


def _attach(function: Callable[..., Any], signature: inspect.Signature) -> None:
    """Give ``Backend`` a method of this function's name, signature and docstring."""
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
