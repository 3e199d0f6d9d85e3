"""Conversations over real nodes and links: turns are fetched from where those before them are, until that dies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fault.matrix.fleet_nodes import link_flags, make_fleet_key
from tests.fault.slow_model import SlowModel
from tests.processes import Call, Fleet, Node, free_port

pytestmark = pytest.mark.processes

FIRST, SAID, ANSWER, PAGE = 200, 20, 8, 8
FLAGS = ("--max-total-tokens", "4096", "--page-size", str(PAGE))
ROUTER_FLAGS = ("--prefill-policy", "round-robin", "--local-prefill-tokens", "0")
"""The prefill node of a turn is not that of the turn before, and the decode node, which holds both, lends them."""


def num_fetched_tokens(fleet: Fleet) -> int:
    """As /metrics has it, of all nodes together. Loads are up to a second old, unless the fleet is home."""
    fleet.router.wait_home()
    _, text = fleet.router.get("/metrics")
    return sum(
        int(float(n)) for n in re.findall(r"^baton:node_fetched_tokens_total\{.*\} (\S+)$", text, re.M)
    )


class Talk:
    """A conversation."""

    def __init__(self, fleet: Fleet, model: SlowModel) -> None:
        self._fleet, self._model = fleet, model
        self._ids = model.fresh_prompt(FIRST)

    def say(self, num_new: int = ANSWER) -> Call:
        """Say something more."""
        self._ids += self._model.fresh_prompt(SAID)
        return self._fleet.router.generate(self._ids, num_new, stream=True)

    def hear(self, call: Call) -> None:
        """Its answer, which has to be that of transformers."""
        answer = call.tokens()
        assert answer == self._model.greedy(self._ids, len(answer))
        self._ids += answer


def fetched_talk(fleet: Fleet, model: SlowModel) -> Talk:
    """A conversation of two turns, of which the second was fetched. Before, the prefill nodes get their links."""
    for _ in range(8):
        before, talk = num_fetched_tokens(fleet), Talk(fleet, model)
        for _ in range(2):
            talk.hear(talk.say())
        if (now := num_fetched_tokens(fleet)) > before:
            assert now - before > FIRST, "all but the last words"
            return talk
    raise AssertionError("no turn was fetched")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_turns_are_fetched_until_the_lender_dies(
    transport: str, slow_model: SlowModel, tmp_path: Path
) -> None:
    key = make_fleet_key(tmp_path) if transport == "tcp" else ()

    def new_node(folder: Path, role: str, name: str, *flags: str) -> Node:
        return Node(folder, role, name, *flags, *link_flags(transport, free_port()))

    flags = (*FLAGS, *key)
    router_flags = (*ROUTER_FLAGS, *key)
    with Fleet(
        tmp_path, slow_model.folder, "2P2D", flags=flags, router_flags=router_flags, new_node=new_node
    ) as fleet:
        talk = fetched_talk(fleet, slow_model)
        borrowed = "".join(fleet.nodes[name].log for name in ("p0", "p1"))
        lender = fleet.nodes[re.findall(r"link_up link=(d\d)#", borrowed)[-1]]
        call = talk.say()
        lender.kill()
        talk.hear(call)
        talk.hear(talk.say())
        alive = [node for node in fleet.nodes.values() if node is not lender]
        fleet.router.wait_home(*(node.name for node in alive))
        for node in alive:
            assert node.stop() == 0
            node.assert_clean_log()
