# SPDX-License-Identifier: MIT OR Apache-2.0
"""Makes a public function a method of every backend too: the same call, without ``backend``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from ferrodist.backends.base import Backend


def attach(function: Callable[..., Any]) -> None:
    """Give ``Backend`` a method of this function's name, signature and docstring."""
    signature = inspect.signature(function)
    place = list(signature.parameters).index("backend")

    def method(self: Backend, *args: Any, **options: Any) -> Any:
        if len(args) < place:  # what stands before ``backend`` is named, or missing
            return function(*args, backend=self, **options)
        return function(*args[:place], self, *args[place:], **options)

    update_wrapper(method, function)
    method.__qualname__ = f"Backend.{function.__name__}"
    del method.__dict__["__wrapped__"]  # it has another signature
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = [p for p in signature.parameters.values() if p.name != "backend"]
    method.__dict__["__signature__"] = signature.replace(parameters=[own, *rest])
    setattr(Backend, function.__name__, method)
