"""Full decode nodes that all want to move their requests to each other: no move waits, and no request is lost."""

from __future__ import annotations

from functools import partial

import hypothesis.strategies as st
from hypothesis import Phase, given, settings

from shared.protocol.messages import ReqKey
from tests.cluster import AnsweredMove, Cluster, ScriptedRouter
from tests.sim.test_moves import config, params, prompt, wanted
from tests.token_engine import token_engine

MAX_STEPS_OF_A_MOVE = 400
NUM_NEW = 30


def all_are_over(router: ScriptedRouter, moves: list[tuple[ReqKey, int, AnsweredMove]]) -> bool:
    """Whether each move has arrived or failed, or its request has ended."""
    return all(move.arrived or move.failures or router.answers[key].ended for key, _, move in moves)


@given(
    num_nodes=st.integers(2, 3),
    tokens=st.integers(30, 70).map(lambda pages: 4 * pages),
    lengths=st.lists(st.integers(8, 60), min_size=4, max_size=12),
    rounds=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    overlap=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])
def test_cycles_of_full_nodes_end(
    num_nodes: int, tokens: int, lengths: list[int], rounds: list[int], overlap: bool, seed: int
) -> None:
    """Every request is asked to move to the next node, all at once and again and again.

    Each move arrives or fails within a bounded number of steps, all requests end with their tokens, no page is lost.
    """
    with Cluster(1, num_nodes, token_engine, config(tokens=tokens, overlap=overlap), seed=seed) as cluster:
        router, ids, at = cluster.router, {}, {}
        for i, length in enumerate(lengths):
            node = i % num_nodes
            key = router.submit(f"r{i}", prompt(seed + i, length), params(NUM_NEW), "p0", f"d{node}")
            ids[key], at[key] = prompt(seed + i, length), (key, node)
        for num_steps in rounds:
            for _ in range(num_steps):
                cluster.step()
            moves: list[tuple[ReqKey, int, AnsweredMove]] = []
            for key, (current, node) in at.items():
                if not router.answers[key].ended:
                    target = (node + 1) % num_nodes
                    moves.append((key, target, router.move(current, f"d{node}", f"d{target}")))
            cluster.run(partial(all_are_over, router, moves), max_steps=MAX_STEPS_OF_A_MOVE, check=True)
            for key, target, move in moves:
                if move.arrived:
                    at[key] = move.to_key, target
        cluster.run_all(check=True, max_steps=6000)
        for _ in range(20):  # what is still on its way to a node has been called off
            cluster.step()
        for key, its_ids in ids.items():
            assert cluster.tokens(key) == wanted(its_ids, NUM_NEW)
        cluster.assert_idle()
