"""A decode node becomes a prefill node and a decode node again, under streams of two routers: none of them breaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault.slow_model import SlowModel
from tests.modelzoo import random_prompt
from tests.patience import until
from tests.processes import NODE_FLAGS, Call, Fleet, Node, Router

pytestmark = pytest.mark.processes

NUM_NEW = 1400
PROMPT_LENGTHS = (20, 30, 40, 50)
POOL_TOKENS = 1600
"""150 MiB of KV of `slow_model`."""
Roles = dict[str, str]


@pytest.fixture
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Its prefill nodes have fixed roles."""
    folder = tmp_path_factory.mktemp("roles")
    with Fleet(folder, tiny_model, "2P2D", prefill_flags=("--fixed-role",)) as fleet:
        yield fleet


@pytest.fixture
def second_router(fleet: Fleet) -> Iterator[Router]:
    joins = [part for node in fleet.nodes.values() for part in (f"--{node.role}", node.address)]
    with Router(fleet.router.log_path.parent, *joins, name="second-router") as router:
        router.wait_ready()
        yield router
        assert router.stop() == 0
        router.assert_clean_log()


def start(routers: tuple[Router, Router], prompts: list[list[int]]) -> list[Call]:
    """A greedy stream of each prompt, one half at each router, in the middle of their outputs.

    None is sampled: with torch, logits of a decode step and of a prefill differ in their last bits (ADR 27).
    """
    calls = [routers[i % 2].generate(prompt, NUM_NEW, stream=True) for i, prompt in enumerate(prompts)]
    for call in calls:
        call.wait_tokens(5)
    return calls


def roles(router: Router) -> Roles:
    """Of the nodes that are alive."""
    nodes = router.get("/fleet")[1]["nodes"]
    return {node["node_id"]: node["role"] for node in nodes if node["state"] == "alive"}


def set_role(router: Router, node: str, role: str) -> dict[str, Any]:
    call = router.post(f"/fleet/nodes/{node}/role", {"role": role}).finish()
    assert call.status == 200, call.describe()
    changed: dict[str, Any] = call.answer["node"]
    return changed


def test_a_node_changes_its_role_and_back_under_streams(fleet: Fleet, second_router: Router) -> None:
    one, other = routers = fleet.router, second_router
    prompts = [random_prompt(length, seed=length) for length in PROMPT_LENGTHS]
    expected = [call.tokens() for call in start(routers, prompts)]
    assert all(len(ids) == NUM_NEW for ids in expected)
    d0 = fleet.nodes["d0"]

    calls = start(routers, prompts)
    changed = set_role(one, "d0", "prefill")
    assert (changed["role"], changed["state"]) == ("prefill", "alive")
    wanted = {"p0": "prefill", "p1": "prefill", "d0": "prefill", "d1": "decode"}
    for router in routers:
        until(lambda router=router: roles(router) == wanted, "both have it in its new role")
    calls += start(routers, prompts)
    assert any(not call.ended for call in calls[: len(expected)]), "streams went on meanwhile"

    back = set_role(other, "d0", "decode")
    assert back["role"] == "decode" and back["incarnation"] != changed["incarnation"]
    for router in routers:
        until(lambda router=router: roles(router) == wanted | {"d0": "decode"}, "both have it back")
    assert [call.tokens() for call in calls] == 2 * expected
    assert "move_ended" in d0.log, "streams were on it, and left it"
    assert d0.log.count("engine_ready") == 1, "its weights stayed loaded"
    assert d0.log.count("listening role=prefill") == 1 and d0.log.count("listening role=decode") == 2
    assert d0.log.count("stopped") == 0

    refused = one.post("/fleet/nodes/p0/role", {"role": "decode"}).finish()
    assert refused.status == 409 and "--fixed-role" in (refused.error or "")
    one.wait_home()
    assert one.get("/health")[1]["status"] == "ok"
    fleet_is_clean(fleet)


def fleet_is_clean(fleet: Fleet) -> None:
    for node in fleet.nodes.values():
        assert node.stop() == 0
        node.assert_clean_log()


@pytest.mark.parametrize(
    ("flags", "host_kv_mib"), [((), 150), (("--fixed-role", "--host-kv-tokens", "64"), 0)]
)
def test_a_prefill_node_has_the_memory_of_a_decode_node_unless_its_role_is_fixed(
    flags: tuple[str, ...], host_kv_mib: int, slow_model: SlowModel, tmp_path: Path
) -> None:
    memory = ("--max-total-tokens", str(POOL_TOKENS), "--retract-policy", "host")
    node = Node(tmp_path, "prefill", "p0", "--model", str(slow_model.folder), *NODE_FLAGS, *memory, *flags)
    node.start()
    try:
        until(lambda: "listening" in node.log, lambda: node.log)
        assert f" host_kv_mib={host_kv_mib} " in node.log
        assert node.stop() == 0
    finally:
        node.close()
