# SPDX-License-Identifier: MIT OR Apache-2.0
"""How a rank tells the others that they will not meet, and how one hears of it."""

from __future__ import annotations

import json
from typing import Any

from ferrodist.errors import (
    AuthenticationError,
    DistributedError,
    ProtocolError,
    RendezvousError,
)
from ferrodist.rendezvous.link import Kind, Link, Message, Talk

_TYPES: dict[str, type[DistributedError]] = {
    kind.__name__: kind for kind in (RendezvousError, AuthenticationError, ProtocolError)
}
_FACTS = ("rank", "got", "expected")
_MOST_LETTERS = 4000
_MOST_MISSING = 1000


def tell(link: Link, error: BaseException, this_rank: int) -> None:
    """Send an error, if there is still somebody to hear it."""
    name = type(error).__name__
    text = str(error) if name in _TYPES else f"rank {this_rank} gave up: {name}"
    facts: dict[str, Any] = {name: getattr(error, name, None) for name in _FACTS}
    if missing := getattr(error, "missing", None):
        facts["missing"] = missing[:_MOST_MISSING]
    words = {"error": name, "text": text[:_MOST_LETTERS], "facts": facts}
    try:
        link.send(Kind.FAILURE, json.dumps(words).encode())
    except EOFError:
        return


def hear(link: Link, *kinds: Kind, believe: bool = True) -> Talk[Message]:
    """Receive a message of these kinds from the host, or raise what it tells instead.

    Before it has proved itself (``believe=False``) it can only ask to come again, which is
    BlockingIOError.
    """
    others = (Kind.BUSY, Kind.FAILURE) if believe else (Kind.BUSY,)
    message = yield from link.receive(*kinds, *others)
    if message.kind is Kind.BUSY:
        raise BlockingIOError("rank 0 is busy")
    if message.kind is Kind.FAILURE:
        raise error_of(message.body)
    return message


def error_of(body: bytes) -> DistributedError:
    """Make the error again that a rank has told."""
    try:
        words = json.loads(body)
        return _TYPES.get(words["error"], RendezvousError)(words["text"], **words["facts"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProtocolError("a rank failed, with words that cannot be read") from error
