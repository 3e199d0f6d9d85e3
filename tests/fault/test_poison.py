"""A request that crashes each node that computes it costs three nodes, and other requests only time."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from shared.engine.loop_parts import NodeParts
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.engine.node_process import BuildRole, Scheduler, builder_of
from shared.timeline import Role
from tests.fault.matrix.holding import hold
from tests.forked import Forked, run_altered_node
from tests.modelzoo import IM_END_ID, random_prompt, reference_greedy, reference_greedy_batch
from tests.patience import until
from tests.processes import Child, Fleet, Node

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

NUM_CONVICTING = 3
POISON_ID = IM_END_ID + 30


def run_crashing(role: Role, flags: Sequence[str]) -> int:
    """Run a node of the role that dies, without a word, as it begins a forward with POISON_ID."""

    def crashing_builder_of(role: Role) -> BuildRole:
        def build(parts: NodeParts) -> Scheduler:
            submit = parts.engine.stream.submit

            def crash(batch: ModelWorkerBatch) -> object:
                if POISON_ID in batch.input_ids:
                    os.kill(os.getpid(), signal.SIGKILL)
                return submit(batch)

            hold(parts.engine.stream, "submit", crash)
            return builder_of(role)(parts)

        return build

    return run_altered_node(role, flags, crashing_builder_of)


class CrashingNode(Node):
    """A node of `run_crashing`."""

    def _spawn(self) -> Child:
        return Forked(self.log_path, run_crashing, Role(self.role), self.argv[self.argv.index("--port") :])


def fresh_prompt(number: int) -> list[int]:
    return [IM_END_ID + 1 + number, *random_prompt(30, seed=number)]


def test_it_costs_three_nodes(tiny_model: Path, tmp_path: Path) -> None:
    num_others, num_new, num_compared = 6, 400, 60
    with Fleet(
        tmp_path / "logs",
        tiny_model,
        "2P4D",
        router_flags=("--local-prefill-tokens", "16"),
        new_node=CrashingNode,
    ) as fleet:
        router = fleet.router
        others = [router.generate(fresh_prompt(n), num_new, stream=True) for n in range(num_others)]
        until(lambda: all(call.token_ids for call in others), "the others run")
        poison = router.generate([POISON_ID, *random_prompt(30, seed=99)], 20).finish()
        assert poison.error is not None and f"{NUM_CONVICTING} nodes crashed" in poison.error, (
            poison.describe()
        )
        dead = [name for name, node in fleet.nodes.items() if not node.alive]
        assert len(dead) == NUM_CONVICTING, dead
        outputs = [call.tokens() for call in others]
        assert [len(tokens) for tokens in outputs] == [num_new] * num_others
        prompts = [fresh_prompt(n) for n in range(num_others)]
        expected = reference_greedy_batch(tiny_model, prompts, num_compared)
        assert [tokens[:num_compared] for tokens in outputs] == expected
        _, metrics = router.get("/metrics")
        assert re.search(r"num_poison_requests_total{.*} 1\.0", metrics)
        after = router.generate(fresh_prompt(7), 8)
        assert after.tokens() == reference_greedy(tiny_model, fresh_prompt(7), 8)
