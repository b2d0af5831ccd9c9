# SPDX-License-Identifier: MIT OR Apache-2.0
"""How the ranks of a job find each other, prove that they belong to it, and exchange memory.

``sources/`` finds out which job a process belongs to, and which rank it is. Rank 0 is the *host*,
every other rank a *guest*; whoever has connected and not yet proved anything is a *visitor*.
``link.py`` carries messages, in ``handshake.py`` both sides prove themselves; they take any stream
socket, and only ``unix_socket.py`` knows which kind it is. What the ranks say of those that do not
come is in ``start_errors.py``.

The rule of this room: nothing that arrives is believed before the handshake, and nothing that
arrives is ever run. Every length is checked before memory is set aside for it.
"""

from ferrodist.rendezvous.job import Job, Member
from ferrodist.rendezvous.meeting import meet

__all__ = ["Job", "Member", "meet"]
