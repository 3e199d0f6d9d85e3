"""What a node and the ways to it cost: the file that `router plan --measure` writes and every plan is made from.

profile.json  ──load_profile──▶  Profile  ──▶  one simulated node of that kind, its links, its router
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import msgspec

from planner.cost_model import CostModel, Seconds
from shared.config import ScheduleOptions
from shared.errors import ConfigError
from shared.scheduling.schedule_policy import POLICIES

SCHEMA_VERSION = 3
MAX_BYTES_S = 1e15
"""Of a link: bytes that take no time that could be measured."""

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 28)]
BytesPerSecond = Annotated[float, msgspec.Meta(ge=1, le=MAX_BYTES_S)]


class NodeKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node of this model on this machine holds, and how its flags have it schedule."""

    pool_tokens: Count
    page_size: Count
    context_length: Count
    max_running_requests: Count
    chunked_prefill_size: Count
    kv_bytes_per_token: Count
    disable_radix_cache: bool = False
    host_kv_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 28)] = 0
    """Host memory for the KV of requests that a decode node retracts."""
    schedule: dict[str, bool | int | float | str] = {}
    """The other fields of `shared.config.ScheduleOptions` that differ from their defaults."""

    @property
    def schedule_options(self) -> ScheduleOptions:
        """Of a node with these flags. Raises msgspec.ValidationError for a value of another type."""
        names = ("chunked_prefill_size", "max_running_requests")
        return msgspec.convert(self.schedule | {name: getattr(self, name) for name in names}, ScheduleOptions)


class TransferCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pages from one node to another: latency_s + bytes / bytes_s."""

    latency_s: Seconds
    bytes_s: BytesPerSecond
    message_s: Seconds = 0.0002
    """Of a message between two processes, from its sending until its receiver's thread acts on it. The default is
    that of two idle cores; where nodes and a router share cores, it is several times as long."""


class RouterCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPU seconds of the router, which serves all streams with one thread."""

    request_s: Seconds
    token_s: Seconds
    """Of each token of output."""
    prompt_token_s: Seconds = 0.0


USUAL_ROUTER = RouterCost(request_s=6.8e-4, token_s=3.1e-5, prompt_token_s=2.2e-6)
"""On an AMD EPYC, with the built-in model's tokenizer."""


class Residual(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One point of a fit: the median of its rounds, what the fit says, and how far the rounds differed."""

    what: str
    """prefill 512, decode 8x1536, scheduler 16, transfer 1048576."""
    measured_s: Seconds
    fitted_s: Seconds
    spread: Annotated[float, msgspec.Meta(ge=0)]
    """(upper - lower quartile) / median of the rounds."""

    @property
    def error(self) -> float:
        """Of the fit, as a share of what was measured."""
        return self.fitted_s / self.measured_s - 1 if self.measured_s else 0.0


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

    schema_version: Annotated[int, msgspec.Meta(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    measured: Measured
    node: NodeKind
    forward: CostModel
    transfer: TransferCost
    router: RouterCost = USUAL_ROUTER

    def save(self, path: Path) -> None:
        """Write it as JSON that a person can read."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def load_profile(path: Path) -> Profile:
    """Read a profile. Raises ConfigError that names the file, the field and its limits."""
    try:
        text = path.read_bytes()
        profile = msgspec.json.decode(text, type=Profile)
        _check(profile)
    except OSError as error:
        raise ConfigError(f"--profile {path}: {error.strerror}") from None
    except (ConfigError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--profile {path}: {error}; router plan --measure makes one") from None
    return profile


def _check(profile: Profile) -> None:
    forward, node = profile.forward, profile.node
    if not forward.extend_s([(0, 1)]) or not forward.decode_s(1, 1):
        raise ConfigError(
            "a forward of one token takes no time; one of forward.a, forward.b, forward.c and forward.floor_s, and "
            "one of forward.d, forward.e and forward.f, must be above 0"
        )
    if unknown := node.schedule.keys() - {one.name for one in fields(ScheduleOptions)}:
        raise ConfigError(f"node.schedule has no {min(unknown)}; measure anew")
    if node.schedule_options.schedule_policy not in POLICIES:
        raise ConfigError(f"node.schedule.schedule_policy must be one of {', '.join(POLICIES)}")
    if node.pool_tokens < node.page_size:
        raise ConfigError(f"node.pool_tokens is {node.pool_tokens}, less than a page of {node.page_size}")
