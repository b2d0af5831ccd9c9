# SPDX-License-Identifier: MIT OR Apache-2.0
"""join_links: ranks that somebody else has connected become peers of a mesh.

Nothing is believed of the byte streams but that they carry bytes: both ends of each prove that they
are the rank they say, of this job, and derive a key that nobody else has. Then they tell each other
which process they are, and where.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress

from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import AuthenticationError, ProtocolError, RendezvousError
from ferrodist.rendezvous.handshake import MESH, Greeting, greet_client, greet_server
from ferrodist.rendezvous.job import Endpoint, Job
from ferrodist.rendezvous.mesh import MeshPeer, PeerAddress, peer_at
from ferrodist.rendezvous.mesh_builder import MeshLink
from ferrodist.rendezvous.wire import Channel, MessageKind, run_steps


def join_links(job: Job, config: Config, sockets: Sequence[socket.socket | None]) -> list[MeshPeer]:
    """Shake hands over a socket for each other rank; return all ranks, in order.

    Every rank calls it. Raises RendezvousError naming a rank whose link ends or stays silent, and
    ProtocolError naming one whose link leads elsewhere, or carries what it was not given.
    """
    deadline = Deadline(job.join_seconds(config))
    own = PeerAddress.of_this_process(job.rank, Endpoint("", 0), config.host_id)
    peers = {rank: one for rank, one in enumerate(sockets) if one is not None}
    links: dict[int, tuple[PeerAddress, MeshLink | None]] = {job.rank: (own, None)}
    if peers:  # all at once: one that is silent must not hold up the others
        with ThreadPoolExecutor(len(peers)) as threads:
            tries = {
                threads.submit(_join, job, own, rank, one, deadline): rank
                for rank, one in peers.items()
            }
            try:
                for done in as_completed(tries):
                    links[tries[done]] = done.result()
            except BaseException:  # Ctrl-C too
                for one in peers.values():
                    with suppress(OSError):  # it may have ended
                        one.shutdown(socket.SHUT_RDWR)
                raise
    met = [links[rank] for rank in range(job.world_size)]
    return [peer_at(address, own, link) for address, link in met]  # which takes the sockets over


def _join(
    job: Job, own: PeerAddress, rank: int, connection: socket.socket, deadline: Deadline
) -> tuple[PeerAddress, MeshLink]:
    channel = Channel(connection)
    try:
        if rank < job.rank:
            greet = greet_server(channel, job, MESH, rank=rank)
            key = run_steps(greet, channel, deadline)[1]
        else:
            meet = greet_client(channel, job, MESH, lambda greeting: _check(job, rank, greeting))
            key = run_steps(meet, channel, deadline)[1]
        channel.send(MessageKind.RECORD, own.pack())
        told = run_steps(channel.receive(MessageKind.RECORD), channel, deadline)
        return PeerAddress.unpack(told.body), MeshLink(channel, key)
    except (AuthenticationError, ProtocolError) as error:
        raise _wrong(job, rank, f"does not lead there: {error}") from error
    except EOFError as error:
        raise _unconnected(job, rank, "ended while the two shook hands") from error
    except TimeoutError as error:
        raise _unconnected(job, rank, f"stayed silent for {deadline}") from error
    except OSError as error:
        raise _unconnected(job, rank, f"failed ({error.strerror})") from error


def _check(job: Job, rank: int, greeting: Greeting) -> None:
    if (greeting.rank, greeting.world_size) != (rank, job.world_size):
        raise ProtocolError(
            f"rank {greeting.rank} of {greeting.world_size} is at its other end, expected rank "
            f"{rank} of {job.world_size}"
        )


def _wrong(job: Job, rank: int, how: str) -> ProtocolError:
    text = f"the link of rank {job.rank} to rank {rank} {how}"
    return ProtocolError(text, rank=rank, this_rank=job.rank)


def _unconnected(job: Job, rank: int, how: str) -> RendezvousError:
    text = f"the link of rank {job.rank} to rank {rank} {how}; look at the output of rank {rank}"
    return RendezvousError(text, rank=rank, this_rank=job.rank)
