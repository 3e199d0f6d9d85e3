"""Every error that Baton raises on purpose.

BatonError
├── ConfigError             a flag, file or model is wrong; shown to the operator, the process exits with 2
│   └── ModelError          the model folder cannot be served; the message names the file, tensor or field
├── RequestError            the client's fault, or the fleet cannot serve it now; carries the HTTP status
├── TransferError           one KV transfer failed; its pages come back and its client is told
│   └── PeerMismatch        two nodes cannot exchange KV pages; names the field
│       ├── LayoutMismatch      their KV layouts differ
│       └── TransportMismatch   what they offer for `--kv-transfer` has nothing in common
└── LinkError               a link could not be built, or died
"""

from __future__ import annotations


class BatonError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(BatonError):
    """A flag or file is wrong; `str(error)` is written for the operator."""


class ModelError(ConfigError):
    """A model folder cannot be served."""


class RequestError(BatonError):
    """A request that is refused or has failed.

    `status` is the HTTP status, `param` the request field at fault (None when it is no single field),
    `retry_after_s` when to try again, where that is known.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class TransferError(BatonError):
    """One KV transfer failed."""


class PeerMismatch(TransferError):
    """Two nodes cannot exchange KV pages; `str(error)` names the field."""


class LayoutMismatch(PeerMismatch):
    """Their layouts differ in `field`."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"KV layouts differ in {field}: this node has {ours!r}, the peer has {theirs!r}")
        self.field = field


class TransportMismatch(PeerMismatch):
    """Their `kv_transfer` has nothing in common, for this reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"kv_transfer: {reason}")


class LinkError(BatonError):
    """A link to a peer could not be built, or died."""
