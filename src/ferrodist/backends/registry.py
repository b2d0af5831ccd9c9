# SPDX-License-Identifier: MIT OR Apache-2.0
"""Backends by name: a table of lazy imports, and the entry-point group ``ferrodist.backends``."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points

from ferrodist.backends.base import Backend
from ferrodist.errors import BackendUnavailable, InvalidArgument

_SHARED_MEMORY = "ferrodist.backends.shared_memory:SharedMemoryBackend"
_BUILT_IN = {
    "simulated": "ferrodist.backends.simulated:SimulatedBackend",
    "shared_memory": _SHARED_MEMORY,
    "shm": _SHARED_MEMORY,
    "tcp": "ferrodist.backends.tcp:TcpBackend",
    "hybrid": "ferrodist.backends.hybrid:HybridBackend",
}


def backend_names() -> list[str]:
    """List every known name, built in or installed by somebody else."""
    return sorted(_BUILT_IN.keys() | {entry.name for entry in _installed()})


def backend_class(name: str) -> type[Backend]:
    """Import the backend of this name."""
    target = _BUILT_IN.get(name) or next((e.value for e in _installed() if e.name == name), None)
    if target is None:
        known = ", ".join(backend_names())
        raise InvalidArgument(f"no backend named {name!r}; known: {known}", got=name)
    module, _, attribute = target.partition(":")
    try:
        found: type[Backend] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"backend {name!r} needs {error.name}: pip install 'ferrodist[{name}]'"
        ) from error
    return found


def _installed() -> list[EntryPoint]:
    return list(entry_points(group="ferrodist.backends"))
