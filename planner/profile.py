"""What a node and the ways to it cost: the file that `router plan --measure` writes and every plan is made from.

profile.json  ──load_profile──▶  Profile  ──▶  one simulated node of that kind, its links, its router
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from planner.cost_model import CostModel
from shared.errors import ConfigError

SCHEMA_VERSION = 1


class NodeKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node of this model on this machine holds."""

    pool_tokens: int
    page_size: int
    context_length: int
    max_running_requests: int
    chunked_prefill_size: int
    kv_bytes_per_token: int
    start_s: float
    """From the start of the process until it is ready."""


class TransferCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pages from one node to another: latency_s + bytes / bytes_s."""

    latency_s: float
    bytes_s: float


class RouterCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPU seconds of the router. It serves all streams with one thread."""

    request_s: float
    token_s: float


class Residual(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One point of a fit: the median of its rounds, what the fit says, and how far the rounds differed."""

    what: str
    """prefill 512, decode 8x1536, transfer 1048576."""
    measured_s: float
    fitted_s: float
    spread: float
    """(most - least) / median of the rounds."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the figures come from."""

    at: str
    """ISO 8601, UTC."""
    machine: str
    model: str
    versions: dict[str, str]
    residuals: tuple[Residual, ...] = ()
    remarks: tuple[str, ...] = ()
    """What makes the figures doubtful: a busy machine, noise, a poor fit. Each a sentence for the user."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a plan knows of one kind of node. Seconds, bytes and tokens."""

    schema_version: int = SCHEMA_VERSION
    measured: Measured
    node: NodeKind
    forward: CostModel
    transfer: TransferCost
    router: RouterCost

    def save(self, path: Path) -> None:
        """Write it as JSON that a person can read."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


class _Versioned(msgspec.Struct):
    schema_version: int


def load_profile(path: Path) -> Profile:
    """Read a profile. Raises ConfigError that names the file and what is wrong with it."""
    try:
        text = path.read_bytes()
        version = msgspec.json.decode(text, type=_Versioned).schema_version
        if version == SCHEMA_VERSION:
            return msgspec.json.decode(text, type=Profile)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--profile {path}: {error}") from None
    raise ConfigError(
        f"--profile {path}: its schema_version is {version}, and this planner reads {SCHEMA_VERSION}; "
        "measure anew with router plan --measure"
    )
