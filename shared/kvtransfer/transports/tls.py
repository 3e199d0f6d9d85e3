"""Mutual TLS 1.3 for links of `--kv-tls`.

Each end tells the other over the control connection which certificate it will use, and accepts no other from it. By
default a process makes its certificate when it starts, and no file with its key outlives a handshake.
`--kv-tls-cert`, `--kv-tls-key` and `--kv-tls-ca` give it one. Then the peer's must also be signed by that CA. The
files are read anew for each link, so a certificate can be replaced while the node runs.
"""

from __future__ import annotations

import datetime
import socket
import ssl
import tempfile
from pathlib import Path

from shared.config import TransferOptions
from shared.errors import ConfigError

_NAME = "baton-kv"
_VALID_FOR = datetime.timedelta(days=36500)
"""A certificate ends with its process. Clocks of two hosts may differ by years."""


def identity_of(options: TransferOptions) -> Identity:
    """The given certificate, else one that is made now. ConfigError: it cannot be read or made."""
    given = {
        "--kv-tls-cert": options.kv_tls_cert,
        "--kv-tls-key": options.kv_tls_key,
        "--kv-tls-ca": options.kv_tls_ca,
    }
    files = [Path(path) for path in given.values() if path is not None]
    if not files:
        return MadeIdentity()
    if len(files) < len(given):
        missing = " and ".join(name for name, path in given.items() if path is None)
        raise ConfigError(f"--kv-tls-cert, --kv-tls-key and --kv-tls-ca go together: {missing} is missing")
    for flag, file in zip(given, files, strict=True):
        try:
            file.read_bytes()
        except OSError as error:
            raise ConfigError(f"{flag} {file}: {error.strerror}") from None
    identity = GivenIdentity(*files)
    try:
        identity.prepare(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), identity.certificate)
    except (OSError, ValueError) as error:
        words = " ".join(f"{flag} {path}" for flag, path in given.items())
        raise ConfigError(f"{words}: {error}") from None
    return identity


class GivenIdentity:
    """Files in PEM: a certificate and its chain, its key without a password, and the CA of both ends."""

    def __init__(self, cert: Path, key: Path, ca: Path) -> None:
        self._cert = cert
        self._key = key
        self._ca = ca

    @property
    def certificate(self) -> bytes:
        """In DER, without its chain."""
        text, end = self._cert.read_text(), "-----END CERTIFICATE-----"
        first, found, _ = text[text.find("-----BEGIN CERTIFICATE-----") :].partition(end)
        return ssl.PEM_cert_to_DER_cert(first + found)

    def prepare(self, context: ssl.SSLContext, theirs: bytes) -> None:
        """Load the certificate, and trust a peer that has told the certificate `theirs` (DER).

        OSError or ValueError: it cannot be read.
        """
        context.load_cert_chain(self._cert, self._key, password=lambda: b"")  # a prompt would wait for ever
        context.load_verify_locations(self._ca)


class MadeIdentity:
    """A certificate that this process has made for itself. ConfigError: the package that makes it is missing."""

    def __init__(self) -> None:
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ModuleNotFoundError:
            raise ConfigError(
                "--kv-tls: the package cryptography, which makes certificates, is missing: "
                "pip install 'baton-serve[tls]', or give --kv-tls-cert, --kv-tls-key and --kv-tls-ca"
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
        with tempfile.NamedTemporaryFile() as file:  # ssl reads from files alone; this one is the user's own
            file.write(self._pem)
            file.flush()
            context.load_cert_chain(file.name)
        context.load_verify_locations(cadata=theirs)


Identity = GivenIdentity | MadeIdentity
"""The certificate of this process, and the peers that it trusts."""


def secured(sock: socket.socket, identity: Identity, theirs: bytes, *, accepted: bool) -> ssl.SSLSocket:
    """Shake hands over `sock`, which it takes over, as the end that has `accepted` it or has connected.

    OSError or ValueError: the peer has another certificate than `theirs` (DER) or none, speaks no TLS 1.3, or its
    answers take longer than the timeout of `sock`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepted else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # a certificate is known as a whole
    context.verify_mode = ssl.CERT_REQUIRED
    if accepted:
        context.num_tickets = 0  # no handshake is ever resumed
    identity.prepare(context, theirs)
    tls = context.wrap_socket(sock, server_side=accepted)
    if tls.getpeercert(binary_form=True) != theirs:
        tls.close()
        raise ssl.SSLError("the peer has another certificate than it has told over the control connection")
    return tls
