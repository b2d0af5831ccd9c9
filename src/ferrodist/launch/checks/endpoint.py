# SPDX-License-Identifier: MIT OR Apache-2.0
"""Endpoints as people write them on a command line, and as launchers write them in variables."""

from __future__ import annotations

from collections.abc import Mapping

from ferrodist.config import variable
from ferrodist.errors import InvalidArgument
from ferrodist.rendezvous.launch import Endpoint, try_endpoint

DEFAULT_PORT = 29500  # what most launchers make MASTER_PORT


def parse_endpoint(text: str) -> Endpoint:
    """Read a host and a port."""
    found = try_endpoint(text)
    if found is None:
        raise InvalidArgument(
            f"{text!r} is no endpoint: expected HOST:PORT, or [ADDRESS]:PORT for IPv6", got=text
        )
    return found


def parse_peer(text: str) -> Endpoint:
    """Read a host, with a port or without."""
    is_bare_address = text.count(":") > 1 and not text.startswith("[")
    host = f"[{text}]" if is_bare_address else text
    has_port = ":" in host.rpartition("]")[2]
    return parse_endpoint(host if has_port else f"{host}:{DEFAULT_PORT}")


def endpoint_of(environ: Mapping[str, str]) -> Endpoint | None:
    """Return where variables say that rank 0 listens; None if they do not, or not rightly.

    What is wrong with them is said by the check of the environment.
    """
    given = environ.get(variable("endpoint"), "")
    if given:
        return try_endpoint(given)
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    is_bare_address = ":" in host and not host.startswith("[")
    return try_endpoint(f"[{host}]:{port}" if is_bare_address else f"{host}:{port}")
