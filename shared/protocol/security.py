"""Which processes may use the control sockets: those with the fleet key, a CURVE key pair for both ends.

Every process of a fleet holds the same secret. A server accepts only clients that prove to hold it too, and a
client talks only to such a server (RFC 26/CurveZMQ). KV links are keyed over these connections.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.auth.thread
from zmq.utils import z85

from shared.errors import ConfigError

MIN_KEY_BYTES = 16


class FleetKey:
    """The shared secret of a fleet; `load` reads it from a file of at least 16 bytes.

    While the secret is being replaced there are several: servers hold the first, and admit clients that hold any of
    them. A client that a server has refused tries the next one when it dials that address again.
    """

    def __init__(self, *secrets: bytes) -> None:
        self._pairs = [_key_pair(secret) for secret in secrets]
        self._num_refused: Counter[str] = Counter()
        """Handshakes that have failed, by address."""

    @classmethod
    def load(cls, paths: Sequence[str]) -> FleetKey | None:
        """Read the key files, white space at their ends ignored; None if there is none. Raises ConfigError."""
        return cls(*map(_read, paths)) if paths else None

    def secure_client(self, socket: zmq.Socket[Any], address: str) -> None:
        """Make `socket` talk only to a server at `address` that holds a key of these. Call before connect."""
        public, secret = self._pairs[self._num_refused[address] % len(self._pairs)]
        socket.curve_serverkey = public
        socket.curve_publickey = public
        socket.curve_secretkey = secret

    def refused(self, address: str) -> None:
        """Note that the handshake with the server at `address` has failed."""
        if len(self._pairs) > 1:
            self._num_refused[address] += 1

    def secure_server(self, socket: zmq.Socket[Any]) -> None:
        """Make `socket` accept only clients with a key of these. Call before bind. It needs an `authenticator`."""
        socket.curve_server = True
        socket.curve_secretkey = self._pairs[0][1]

    def derive(self, purpose: bytes) -> bytes:
        """32 bytes for `purpose` (at most 16 bytes), which tell nothing of the first secret and change with it."""
        return hashlib.blake2b(self._pairs[0][1], digest_size=32, person=purpose).digest()

    def authenticator(self, context: zmq.Context[Any]) -> zmq.auth.thread.ThreadAuthenticator:
        """Start the thread that admits clients to the servers of `context`. The caller stops it."""
        authenticator = zmq.auth.thread.ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(credentials_provider=self)
        return authenticator

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator: whether a client with the public key `key` (in Z85) is admitted."""
        return any(key == public for public, _ in self._pairs)


def _key_pair(secret: bytes) -> tuple[bytes, bytes]:
    """Public and secret key of CURVE, in Z85."""
    digest = hashlib.blake2b(secret, digest_size=32, person=b"baton-fleet").digest()
    return zmq.curve_public(z85.encode(digest)), z85.encode(digest)


def _read(path: str) -> bytes:
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--fleet-key {path}: {error.strerror}") from error
    if len(secret) < MIN_KEY_BYTES:
        raise ConfigError(f"--fleet-key {path}: {len(secret)} bytes, at least {MIN_KEY_BYTES} are needed")
    return secret
