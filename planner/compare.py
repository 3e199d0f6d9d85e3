"""`--compare`: ways to schedule and route, on the same requests and the same fleet, each against the first."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from planner.candidate import MAX_NODES, Candidate
from router.dispatch.policy import POLICIES as ROUTING_POLICIES
from shared.errors import ConfigError
from shared.scheduling.policies import POLICIES as SCHEDULE_POLICIES

MAX_COMBINATIONS = 64

_FLEET = re.compile(r"(?:(?P<prefill>[1-9]\d*)P)?(?P<decode>[1-9]\d*)(?P<d>D?)")


@dataclass(frozen=True)
class Way:
    """One combination of settings."""

    candidate: Candidate
    settings: tuple[tuple[str, str], ...]
    """Flag and value, in the order of the command line."""


def parse_fleet(text: str) -> Candidate:
    """`2P3D`, or `5` for nodes that do both. Raises ConfigError."""
    found = _FLEET.fullmatch(text)
    if found is None or (found["prefill"] is None) is bool(found["d"]):
        raise ConfigError(f"--fleet is 2P3D, or 5 for nodes that do both, and not {text!r}")
    fleet = Candidate(num_prefill=int(found["prefill"] or 0), num_decode=int(found["decode"]))
    if fleet.num_nodes > MAX_NODES:
        raise ConfigError(f"--fleet {text} has more than {MAX_NODES} nodes")
    return fleet


def ways(fleet: Candidate, specs: Sequence[str]) -> list[Way]:
    """Every combination of the values of `specs`, such as `schedule-policy=fcfs,lpm`: that of the first values first.

    Raises ConfigError that names the flag, the value and what is possible.
    """
    flags: dict[str, list[str]] = {}
    for spec in specs:
        flag, _, values = spec.partition("=")
        flag = flag.removeprefix("--")
        if flag not in _SETTINGS:
            raise ConfigError(
                f"--compare knows no {flag!r}; it compares {', '.join(_SETTINGS)}, as FLAG=VALUE,VALUE"
            )
        if flag in flags:
            raise ConfigError(f"--compare has {flag} twice")
        flags[flag] = values.split(",")
        if len(set(flags[flag])) < len(flags[flag]):
            raise ConfigError(f"--compare {spec}: a value is given twice")
        for value in flags[flag]:
            _SETTINGS[flag](flag, value)
    combinations = list(product(*flags.values()))
    if not 2 <= len(combinations) <= MAX_COMBINATIONS:
        raise ConfigError(
            f"--compare has {len(combinations)} combinations of values, and it takes 2 to {MAX_COMBINATIONS}"
        )
    return [_way(fleet, tuple(zip(flags, values, strict=True))) for values in combinations]


def _way(fleet: Candidate, settings: tuple[tuple[str, str], ...]) -> Way:
    changes = {flag.replace("-", "_"): _SETTINGS[flag](flag, value) for flag, value in settings}
    return Way(replace(fleet, **changes), settings)


def _one_of(known: Mapping[str, object]) -> Callable[[str, str], Any]:
    def parse(flag: str, value: str) -> str:
        if value not in known:
            raise ConfigError(f"--compare {flag}={value}: it is one of {', '.join(known)}")
        return value

    return parse


def _tokens(least: int, auto: bool) -> Callable[[str, str], Any]:
    def parse(flag: str, value: str) -> int | None:
        if auto and value == "auto":
            return None
        if not value.isdecimal() or int(value) < least or int(value) > 1 << 40:
            also = ", or auto" if auto else ""
            raise ConfigError(
                f"--compare {flag}={value}: it is a whole number of tokens, at least {least}{also}"
            )
        return int(value)

    return parse


_SETTINGS: dict[str, Callable[[str, str], Any]] = {
    "schedule-policy": _one_of(SCHEDULE_POLICIES),
    "prefill-policy": _one_of(ROUTING_POLICIES),
    "decode-policy": _one_of(ROUTING_POLICIES),
    "chunked-prefill-size": _tokens(1, auto=False),
    "local-prefill-tokens": _tokens(0, auto=True),
    "enable-mixed-chunk": lambda flag, value: _one_of({"on": True, "off": False})(flag, value) == "on",
}
