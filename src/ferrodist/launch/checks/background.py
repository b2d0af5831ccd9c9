# SPDX-License-Identifier: MIT OR Apache-2.0
"""What may hang, in the background: a name server or a broken disk must not hold up the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def start(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> Future[T]:
    """Call a function on a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function(*args, **options))
        except BaseException as error:  # noqa: BLE001 - the top of a thread; whoever waits gets it
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future
