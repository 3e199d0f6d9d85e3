"""The file that a plan is made from: what is written comes back, and what cannot be is refused with its limits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from planner.cost_model import CostModel
from planner.profile import Measured, NodeKind, Profile, Residual, RouterCost, TransferCost, load_profile
from shared.errors import ConfigError

PROFILE = Profile(
    measured=Measured(
        at="2026-01-01T00:00:00Z",
        machine="a machine",
        model="a model",
        versions={"torch": "2.11"},
        residuals=(Residual(what="prefill 512", measured_s=0.02, fitted_s=0.021, spread=0.03),),
        remarks=("The machine was busy.",),
    ),
    node=NodeKind(
        pool_tokens=8192,
        page_size=16,
        context_length=2048,
        max_running_requests=32,
        chunked_prefill_size=512,
        kv_bytes_per_token=1024,
        disable_radix_cache=True,
        schedule={"schedule_policy": "lpm", "schedule_conservativeness": 0.5, "enable_mixed_chunk": True},
    ),
    forward=CostModel(a=0.002, b=1e-4, c=0.0, d=0.005, e=1e-4, f=0.0, floor_s=0.003, step_s=1e-4),
    transfer=TransferCost(latency_s=0.001, bytes_s=1e9),
    router=RouterCost(request_s=0.001, token_s=1e-5),
)


def test_a_profile_comes_back(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == PROFILE


def changed(where: str, value: object) -> str:
    """The JSON of PROFILE with another value at `where`."""
    content: Any = json.loads(msgspec.json.encode(PROFILE))
    part = content
    *path, name = where.split(".")
    for step in path:
        part = part[step]
    part[name] = value
    return json.dumps(content)


def without(name: str) -> str:
    content = json.loads(changed("schema_version", 3))
    del content[name]
    return json.dumps(content)


DAMAGED: dict[str, tuple[Callable[[], str], str]] = {
    "no JSON": (lambda: "{", "Input data was truncated"),
    "empty": (lambda: "", "Input data was truncated"),
    "another file": (lambda: '{"a": 1}', "unknown field `a`"),
    "a version": (
        lambda: changed("schema_version", 2),
        r">= 3 - at `\$.schema_version`; .*--measure makes one",
    ),
    "a part is gone": (lambda: without("transfer"), "missing required field `transfer`"),
    "negative": (lambda: changed("router.token_s", -1e-6), r">= 0.0 - at `\$.router.token_s`"),
    "no bandwidth": (lambda: changed("transfer.bytes_s", 0), r">= 1.0 - at `\$.transfer.bytes_s`"),
    "no measured bandwidth": (
        lambda: changed("transfer.bytes_s", 3e23),
        r"<= 10{15}.0 - at `\$.transfer.bytes_s`",
    ),
    "a word": (lambda: changed("forward.a", "fast"), r"Expected `float`, got `str` - at `\$.forward.a`"),
    "a negative forward": (
        lambda: changed("forward.c", -1e-9),
        r">= 0.0 - at `\$.forward.c`",
    ),
    "an endless forward": (lambda: changed("forward.b", 1e6), r"<= 86400.0 - at `\$.forward.b`"),
    "no page": (lambda: changed("node.page_size", 0), r">= 1 - at `\$.node.page_size`"),
    "a pool without a page": (
        lambda: changed("node.pool_tokens", 8),
        "pool_tokens is 8, less than a page of 16",
    ),
    "an option of another release": (
        lambda: changed("node.schedule", {"colour": 1}),
        "node.schedule has no colour; measure anew",
    ),
    "a policy of another release": (
        lambda: changed("node.schedule", {"schedule_policy": "sjf"}),
        "node.schedule.schedule_policy must be one of fcfs, ",
    ),
    "an option of another type": (
        lambda: changed("node.schedule", {"schedule_policy": 1}),
        r"Expected `str`, got `int` - at `\$.schedule_policy`",
    ),
    "an unknown field": (lambda: changed("node.colour", 1), "unknown field `colour`"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_wrong_is_named(name: str, tmp_path: Path) -> None:
    text, says = DAMAGED[name]
    path = tmp_path / "damaged.json"
    path.write_text(text())
    with pytest.raises(ConfigError, match=re.escape(f"--profile {path}: ")) as raised:
        load_profile(path)
    assert re.search(says, str(raised.value)), str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_profile(tmp_path / "none.json")


def test_a_forward_takes_time(tmp_path: Path) -> None:
    content = json.loads(changed("schema_version", 3))
    content["forward"] |= dict.fromkeys("def", 0.0)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"forward\.d"):
        load_profile(path)


def test_costs_of_a_forward() -> None:
    costs = CostModel(
        a=1.0, b=0.1, c=0.01, d=2.0, e=0.5, f=0.25, floor_s=4.0, step_s=0.1, step_request_s=0.01
    )
    whole = costs.extend_s([(0, 30)])
    assert whole == pytest.approx(1 + 3 + 9)
    assert costs.extend_s([(0, 10), (20, 10)]) == pytest.approx(1 + 1 + 1 + 1 + 5)
    assert costs.extend_s([(0, 20)]) + costs.extend_s([(20, 10)]) == pytest.approx(whole + 1)
    assert costs.extend_s([(0, 1)]) == 4.0
    assert costs.decode_s(2, 8) == pytest.approx(2 + 1 + 2)
    assert costs.decode_s(2, 8, beside_prefill=True) == pytest.approx(1 + 2)
    assert costs.host_s(5) == pytest.approx(0.15)
