"""The errors that Baton raises on purpose.

BatonError
├── ConfigError             a flag, file or model is wrong; the process shows it and exits with code 2
│   └── ModelError          the model folder cannot be served; the message names the file, tensor or field
├── RequestError            a request is wrong or cannot be served now; carries the HTTP status
├── TransferError           one KV transfer failed; its pages are freed and its client gets an error
│   └── PeerMismatch        two nodes cannot exchange KV pages; the message names the field
└── LinkError               a link could not be built, or died
"""

from __future__ import annotations


class BatonError(Exception):
    """Base class of all errors that are raised on purpose."""


class ConfigError(BatonError):
    """A flag or file is wrong. `str(error)` is written for the operator."""


class ModelError(ConfigError):
    """A model folder cannot be served."""


class RequestError(BatonError):
    """A request is refused or has failed.

    `status` is the HTTP status. `param` is the request field that is wrong, None when it is not a single field.
    `code` is the error's name in the API. `retry_after_s` is the time after which to try again, where it is known.
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
    """Two nodes cannot exchange KV pages. `str(error)` names the field."""


class LinkError(BatonError):
    """A link to a peer could not be built, or died."""


def maximum_context(num_tokens: int) -> str:
    """The words by which clients such as litellm recognize a prompt that is too long."""
    return f"This model's maximum context length is {num_tokens} tokens"
