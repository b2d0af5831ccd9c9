# SPDX-License-Identifier: MIT OR Apache-2.0
"""How the ranks of a job find each other, prove that they belong to it, and connect.

``find_job.py`` finds out which job a process belongs to, which rank it is, and whether there are
other hosts, from the variables of the launchers in ``launchers.py``; the result is a ``Job``
(``job.py``). While the ranks meet, rank 0 is the *server* and every other rank a
*client*. ``wire.py`` carries messages, in ``handshake.py`` both sides prove themselves, and
``sockets.py`` knows where they meet: a Unix socket on one host, TCP between hosts. ``munge.py`` is
how ranks of several hosts get the job's secret where neither launcher nor user gives one.

There are two things to come for. ``meet``, in ``meeting.py``, exchanges memory files, on one host.
``join_mesh``, in ``mesh.py``, gives every rank a connection to every other: the ranks tell each
other where they listen, at rank 0 too or by what torchrun and MPI have (``exchange.py``), and
``mesh_builder.py`` makes the links, encrypted by ``tls.py`` if asked for.

``errors.py`` has what the ranks say about those that do not come, ``watch.py`` how processes end.

The rule of this package: nothing that arrives is trusted before the handshake, and nothing that
arrives is ever run. Every length is checked before memory is allocated for it. Nobody listens at
more than one address, nor longer than until all have met.
"""

from ferrodist.rendezvous.job import Job, Member
from ferrodist.rendezvous.meeting import meet

__all__ = ["Job", "Member", "meet"]
