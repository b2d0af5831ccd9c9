# SPDX-License-Identifier: MIT OR Apache-2.0
"""The refusals that concern ``out``: what it must be, and how it may lie to the input."""

from __future__ import annotations

from typing import Any

import numpy as np

import ferrodist
from ferrodist import Backend, InvalidArgument
from ferrodist.testing.contract.refusal import Attempt, Refusal, Refusals, zeros


def refused_outs() -> Refusals:
    """List them all."""
    yield from _wrong_kinds()
    yield from _wrong_sizes()
    yield from _overlaps()


def _call(function: str, x: Any, out: Any) -> Attempt:
    def attempt(backend: Backend) -> object:
        # Only a root has a result, and so an out that is looked at.
        options = {"root": backend.rank} if function in ("reduce", "gather") else {}
        return getattr(ferrodist, function)(x, backend, out=out, **options)

    return attempt


def _read_only(*shape: int) -> Any:
    array = zeros(*shape)
    array.flags.writeable = False
    return array


def _wrong_kinds() -> Refusals:
    """For calls whose result is as x, which is float32[4, 2]."""
    wrong = {
        "dtype": (np.zeros((4, 2)), "dtype"),
        "shape": (zeros(2, 4), "shape"),
        "too many axes": (zeros(4, 2, 1), "shape"),
        "read-only": (_read_only(4, 2), "read-only"),
        "transposed": (zeros(2, 4).T, "contiguous"),
        "with gaps": (zeros(4, 4)[:, ::2], "contiguous"),
        "a number": (1.0, "out"),
        "a list": ([zeros(4, 2)], "out"),
        "text": ("text", "out"),
    }
    for name, (out, says) in wrong.items():
        for function in ("allreduce", "broadcast", "reduce"):
            attempt = _call(function, zeros(4, 2), out)
            yield f"{function}: out {name}", Refusal(InvalidArgument, attempt, says)


def _wrong_sizes() -> Refusals:
    for function in ("all_gather", "gather"):
        attempt = _call(function, zeros(4), zeros(4))
        yield (
            f"{function}: out of one block",
            Refusal(InvalidArgument, attempt, "shape", min_world=2),
        )
    for out, says in ((zeros(3), "shape"), (np.zeros(2), "dtype")):
        yield f"recv: out {says}", Refusal(InvalidArgument, _recv(out), says, min_world=2)
    names = _call("allreduce", {"a": zeros(2)}, {"b": zeros(2)})
    yield "allreduce: out of other keys", Refusal(InvalidArgument, names, "['b']")


def _recv(out: Any) -> Attempt:
    def attempt(backend: Backend) -> object:
        peer = (backend.rank + 1) % backend.world_size
        return ferrodist.recv(zeros(2), peer, backend, out=out)

    return attempt


# -- overlaps --------------------------------------------------------------------------------------


def _overlaps() -> Refusals:
    for function in ("allreduce", "broadcast", "reduce", "all_to_all"):
        yield f"{function}: out overlaps x", Refusal(InvalidArgument, _shifted(function), "overlap")
    memory = zeros(8)
    backwards = _call("allreduce", memory[::-1], memory)
    yield "allreduce: out is x backwards", Refusal(InvalidArgument, backwards, "overlap")
    between = _call("allreduce", memory[::2], memory[:4])
    yield "allreduce: out between x", Refusal(InvalidArgument, between, "overlap")
    one, two = zeros(3), zeros(3)
    swapped = _call("allreduce", [one, two], [two, one])
    yield "allreduce: leaves of out are other leaves", Refusal(InvalidArgument, swapped, "overlap")
    twice = _call("broadcast", [one, two], [memory[:3], memory[:3]])
    yield "broadcast: one out for two leaves", Refusal(InvalidArgument, twice, "overlap")
    for function in ("all_gather", "reduce_scatter"):
        other = Refusal(InvalidArgument, _other_part(function), "overlap", min_world=2)
        yield f"{function}: the part of another rank", other


def _shifted(function: str) -> Attempt:
    """Pass an out that begins one row behind x, in the same memory."""

    def attempt(backend: Backend) -> object:
        memory = zeros(2 * backend.world_size + 1, 3)
        return _call(function, memory[:-1], memory[1:])(backend)

    return attempt


def _other_part(function: str) -> Attempt:
    """Let x, or out, be the part of the next rank in the other one."""

    def attempt(backend: Backend) -> object:
        large = zeros(backend.world_size, 2)
        small = large[(backend.rank + 1) % backend.world_size].reshape(1, 2)
        x, out = (small, large) if function == "all_gather" else (large, small)
        return getattr(ferrodist, function)(x, backend, out=out)

    return attempt
