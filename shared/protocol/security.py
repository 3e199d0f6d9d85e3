"""Which processes may use the control sockets: those with the fleet key, a CURVE key pair for both ends.

Every process of a fleet holds the same secret. A server accepts only clients that prove to hold it too, and a
client talks only to such a server (RFC 26/CurveZMQ). KV links are keyed over these connections.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import zmq
import zmq.auth.thread
from zmq.utils import z85

from shared.errors import ConfigError

MIN_KEY_BYTES = 16


class FleetKey:
    """The shared secret of a fleet; `load` reads it from a file of at least 16 bytes."""

    def __init__(self, secret: bytes) -> None:
        self._secret = z85.encode(hashlib.blake2b(secret, digest_size=32, person=b"baton-fleet").digest())
        self._public = zmq.curve_public(self._secret)

    @classmethod
    def load(cls, path: str) -> FleetKey:
        """Read the key file, white space at its ends ignored. Raises ConfigError."""
        try:
            secret = Path(path).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"--fleet-key {path}: {error.strerror}") from error
        if len(secret) < MIN_KEY_BYTES:
            raise ConfigError(f"--fleet-key {path}: {len(secret)} bytes, at least {MIN_KEY_BYTES} are needed")
        return cls(secret)

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        """Make `socket` talk only to servers that hold this key. Call before connect."""
        socket.curve_serverkey = self._public
        socket.curve_publickey = self._public
        socket.curve_secretkey = self._secret

    def secure_server(self, socket: zmq.Socket[Any]) -> None:
        """Make `socket` accept only clients that hold this key. Call before bind. It needs an `authenticator`."""
        socket.curve_server = True
        socket.curve_secretkey = self._secret

    def authenticator(self, context: zmq.Context[Any]) -> zmq.auth.thread.ThreadAuthenticator:
        """Start the thread that admits clients to the servers of `context`. The caller stops it."""
        authenticator = zmq.auth.thread.ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(credentials_provider=self)
        return authenticator

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator: whether a client with the public key `key` (in Z85) is admitted."""
        return key == self._public
