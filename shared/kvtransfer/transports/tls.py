"""Mutual TLS 1.3 for links of `--kv-tls`.

Each process makes its certificate when it starts, and no file with its key outlives a handshake. Each end tells the
other over the control connection which certificate it will use, and accepts no other from it.
"""

from __future__ import annotations

import datetime
import socket
import ssl
import tempfile

from shared.errors import ConfigError

_NAME = "baton-kv"
_VALID_FOR = datetime.timedelta(days=36500)
"""A certificate ends with its process. Clocks of two hosts may differ by years."""


class Identity:
    """A certificate that this process has made for itself. ConfigError: the package that makes it is missing."""

    def __init__(self) -> None:
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ModuleNotFoundError:
            raise ConfigError(
                "--kv-tls: the package cryptography, which makes certificates, is missing: "
                "pip install 'baton-serve[tls]'"
            ) from None
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - _VALID_FOR / 10)
            .not_valid_after(now + _VALID_FOR)
            .sign(key, hashes.SHA256())
        )
        self.certificate = made.public_bytes(serialization.Encoding.DER)
        self._pem = made.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def prepare(self, context: ssl.SSLContext, theirs: bytes) -> None:
        """Load the certificate, and trust a peer that has told the certificate `theirs` (DER), and no other.

        OSError or ValueError: it cannot be read.
        """
        with tempfile.NamedTemporaryFile() as file:  # ssl reads from files alone; this one is the user's own
            file.write(self._pem)
            file.flush()
            context.load_cert_chain(file.name)
        context.load_verify_locations(cadata=theirs)


def secured(sock: socket.socket, identity: Identity, theirs: bytes, *, accepted: bool) -> ssl.SSLSocket:
    """Shake hands over `sock`, which it takes over, as the end that has `accepted` it or has connected.

    OSError or ValueError: the peer has another certificate than `theirs` (DER) or none, speaks no TLS 1.3, or its
    answers take longer than the timeout of `sock`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepted else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the peer's certificate is known
    context.verify_mode = ssl.CERT_REQUIRED
    if accepted:
        context.num_tickets = 0  # no handshake is ever resumed
    identity.prepare(context, theirs)
    return context.wrap_socket(sock, server_side=accepted)
