# SPDX-License-Identifier: MIT OR Apache-2.0
"""ferrodist through its public functions, on the backend that is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import ferrodist
from ferrodist.launch.bench import make_calls

with contextlib.suppress(ImportError):  # gives NumPy bfloat16; without it only that row is missing
    import ml_dtypes  # noqa: F401 -- imported for what it registers

if TYPE_CHECKING or __package__:
    from benchmarks.compare.worker import halo
else:
    import halo  # which stands beside the script that is run

Array = np.ndarray[Any, Any]
Call = Callable[[], object]


class Engine:
    """The world that ``ferrodist run`` made."""

    _halo_loop: Call | None = None

    def __init__(self, backend: str) -> None:
        self.backend: Any = ferrodist.init(backend)  # only some backends have empty()
        self.rank: int = self.backend.rank
        self.world: int = self.backend.world_size
        self.versions = {"ferrodist": ferrodist.__version__}

    def calls(self, x: Array, out: Array) -> dict[str, Call]:
        """Return the calls on these arrays."""
        backend = self.backend
        peer = 1 - self.rank
        return make_calls(backend, x, out) | {
            "allreduce new": lambda: ferrodist.allreduce(x, backend),
            "allreduce async": lambda: self.start_allreduce(x, out)(),
            "sendrecv": lambda: ferrodist.sendrecv(x, peer, peer, backend, out=out),
            "window": self._window(x, out),
            "posted": self._posted(x, out),
            "halo": self._halo,
        }

    def _halo(self) -> object:
        """Do one turn of the loop of examples/heat.py; the first makes its grid, with all ranks."""
        if self._halo_loop is None:
            grid, exchange = (
                self.backend.grid(halo.grid_shape(self.world)),
                halo.load_example().exchange,
            )
            self._halo_loop = halo.make_loop(
                self.rank, self.world, lambda block: exchange(grid, block)
            )
        return self._halo_loop()

    def _window(self, x: Array, out: Array) -> Call:
        """Return as many sends in flight as ``x`` fits into ``out``, and one message back."""
        backend = self.backend

        def give() -> None:
            number = len(out) // len(x)
            sends = [ferrodist.send(x, 1, backend, async_op=True) for _ in range(number)]
            for send in sends:
                send.wait()
            ferrodist.recv(1, backend, out=out[: len(x)])

        def get() -> None:
            for receive in self._post(x, out):
                receive.wait()
            ferrodist.send(x, 0, backend)

        return give if self.rank == 0 else get

    def _posted(self, x: Array, out: Array) -> Call:
        """Return as many sends as ``x`` fits into ``out``, once all receives are posted."""
        backend = self.backend

        def give() -> None:
            ferrodist.recv(1, backend, out=out[: len(x)])
            for _ in range(len(out) // len(x)):
                ferrodist.send(x, 1, backend)

        def get() -> None:
            receives = self._post(x, out)
            ferrodist.send(x, 0, backend)
            for receive in receives:
                receive.wait()

        return give if self.rank == 0 else get

    def _post(self, x: Array, out: Array) -> list[Any]:
        rows, backend = out.reshape(-1, len(x)), self.backend
        return [ferrodist.recv(0, backend, out=row, async_op=True) for row in rows]

    def start_allreduce(self, x: Array, out: Array) -> Call:
        """Begin an allreduce and return what waits for its end."""
        return ferrodist.allreduce(x, self.backend, out=out, async_op=True).wait

    def empty(self, count: int, dtype: Any) -> Array:
        """Return an array in memory that ranks share."""
        array: Array = self.backend.empty((count,), dtype)
        return array

    def convert(self, kind: str, x: Array) -> Any:
        """Return the array as a torch tensor, a JAX array in CPU memory, a float or a dict."""
        if kind.startswith("torch"):
            import torch

            return torch.from_numpy(x)
        if kind == "jax":
            import jax

            jax.config.update("jax_platforms", "cpu")
            return jax.numpy.asarray(x)
        return float(x[0]) if kind == "number" else {"first": x, "second": x.copy()}

    def close(self) -> None:
        """Leave the group."""
        self.backend.close()
