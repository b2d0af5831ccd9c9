# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tls: links that nobody on the way can read, by TLS 1.3 with a certificate made for the job.

The certificate follows from the job's secret, byte for byte, so every rank makes the same one and
takes no other. Each end shows it, and proves that it has the key. The keys of the encryption itself
are new for every connection: who learns the secret later cannot read what was recorded before.

Needs the package cryptography (extra ``tls``), which is imported when the first link is made.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import ssl
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from ferrodist.config import variable
from ferrodist.errors import BackendUnavailable
from ferrodist.rendezvous.relay import open_tunnel

# Clocks of hosts differ, and the secret decides how long a job may be joined.
_FIRST_DAY, _LAST_DAY = datetime(2000, 1, 1), datetime(2999, 12, 31)


class Tls:
    """Both sides of the encrypted links of one job."""

    def __init__(self, secret: bytes) -> None:
        key, certificate, self._pinned = _make_certificate(secret)
        self._accepting = _context(ssl.PROTOCOL_TLS_SERVER, key, certificate)
        self._accepting.num_tickets = 0  # no session is resumed
        self._calling = _context(ssl.PROTOCOL_TLS_CLIENT, key, certificate)

    def accept(self, connection: socket.socket) -> socket.socket:
        """Return what to talk to instead of a connection that was accepted."""
        return open_tunnel(connection, self._accepting, self._pinned, is_server=True)

    def call(self, connection: socket.socket) -> socket.socket:
        """Return what to talk to instead of a connection that was made."""
        return open_tunnel(connection, self._calling, self._pinned, is_server=False)


def _context(protocol: int, key: bytes, certificate: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # it is no host's, but the job's
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    with _file_of(certificate + key) as path:
        context.load_cert_chain(path)
    return context


def _make_certificate(secret: bytes) -> tuple[bytes, bytes, bytes]:
    """Return key and certificate of a job as text, and the certificate as it travels."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise BackendUnavailable(
            f"{variable('tls')}=1 needs the package cryptography: pip install 'ferrodist[tls]'"
        ) from error
    key = Ed25519PrivateKey.from_private_bytes(hmac.digest(secret, b"tls key", "sha256"))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a job of ferrodist")])
    number = int.from_bytes(hmac.digest(secret, b"tls number", "sha256")[:16]) | 1
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(number)
        .not_valid_before(_FIRST_DAY)
        .not_valid_after(_LAST_DAY)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, None)  # Ed25519 signs the same in the same way, without chance
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    text, binary = (
        certificate.public_bytes(encoding)
        for encoding in (serialization.Encoding.PEM, serialization.Encoding.DER)
    )
    return private, text, binary


@contextlib.contextmanager
def _file_of(content: bytes) -> Iterator[Path]:
    """Give a file with this content, as Python's ssl insists on; in memory if that can be."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("ferrodist-tls", os.MFD_CLOEXEC)
        try:
            os.write(file, content)
            yield Path(f"/proc/self/fd/{file}")
        finally:
            os.close(file)
    else:
        with tempfile.NamedTemporaryFile() as named:  # for this user alone
            named.write(content)
            named.flush()
            yield Path(named.name)
