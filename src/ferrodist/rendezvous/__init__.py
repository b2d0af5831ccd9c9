# SPDX-License-Identifier: MIT OR Apache-2.0
"""How the ranks of a job find each other, prove that they belong to it, and connect.

``sources/`` finds out which job a process belongs to, which rank it is, and whether there are other
hosts. Rank 0 is the *host*, every other rank a *guest*; whoever has connected and not yet proved
anything is a *visitor*, and ``reception.py`` looks after those. ``link.py`` carries messages, in
``handshake.py`` both sides prove themselves; they take any stream socket. Where ranks meet is a
``meeting_point.py``: ``unix_socket.py`` on one host, ``tcp_point.py`` between hosts.

There are two things to come for. ``meet`` exchanges memory files, on one host. ``join_mesh``, in
``mesh.py``, gives every rank a connection to every other: the ranks tell each other by *cards*
where they listen, through an ``exchange.py``, and ``mesh_builder.py`` makes the links. With TLS a
link leads through a ``tunnel.py``, which a thread of ``relay.py`` keeps going.

What the ranks say of those that do not come is in ``start_errors.py`` and ``mesh_errors.py``.

The rule of this room: nothing that arrives is believed before the handshake, and nothing that
arrives is ever run. Every length is checked before memory is set aside for it. Nobody listens at
more than one address, nor longer than until all have met.
"""

from ferrodist.rendezvous.job import Job, Member
from ferrodist.rendezvous.meeting import meet

__all__ = ["Job", "Member", "meet"]
