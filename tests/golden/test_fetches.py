"""A prompt of which another node lends the beginning gives what it gives without a fetch, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec
import pytest

from shared.config import NodeConfig
from shared.protocol.messages import Lend, ReqKey
from tests.cluster import Answer, Cluster, receiver_of, ref, sender_of
from tests.golden.references import Zoo
from tests.golden.serving import GREEDY, real_engine
from tests.golden.test_moves import WANTED
from tests.golden.test_native import config_of

PAGE = 8
LENDERS = {"p1": ("p1", "d1"), "d0": (None, "d0")}
"""The nodes that answer the first turns, so that the lender holds them."""
PARTIES = {"p1": "p1", "d0": sender_of("d0")}
FIRST_TURN = msgspec.structs.replace(GREEDY, max_new_tokens=20)


class Second(StrEnum):
    """Where the second turns get the pages of the first."""

    FETCHED = "fetched"
    CACHED = "cached"
    COMPUTED = "computed"


def run(config: NodeConfig, prompts: Sequence[list[int]], lender: str, second: Second) -> list[Answer]:
    """Conversations of two turns, one after the other. The second has WANTED, all at once."""
    with Cluster(2, 2, real_engine, config) as cluster:
        router, borrower = cluster.router, cluster.nodes["p0"]
        router.outbox.send(lender, Lend(ReqKey("router", "link"), ref(receiver_of("p0")), None))
        cluster.run(lambda: len(borrower.receiver.link_reports) == 1)
        turns = []
        for i in range(len(WANTED)):
            key = router.submit(f"first{i}", prompts[i], FIRST_TURN, *LENDERS[lender])
            cluster.run_all()
            turns.append([*prompts[i], *cluster.tokens(key), *prompts[i + 1]])
        nodes = LENDERS[lender] if second is Second.CACHED else ("p0", "d1")
        source = PARTIES[lender] if second is Second.FETCHED else None
        keys = [
            router.submit(f"second{i}", ids, wanted, *nodes, lender=source)
            for i, (ids, wanted) in enumerate(zip(turns, WANTED, strict=True))
        ]
        cluster.run_all()
        for _ in range(20):
            cluster.step()
        cluster.assert_idle()
        num_answered = FIRST_TURN.max_new_tokens - 1 if lender == "d0" else 0
        held = [len(ids) + num_answered for ids in prompts[: len(WANTED)]]
        num_held = sum(length // PAGE * PAGE for length in held)
        assert borrower.vitals.num_fetched_tokens == (num_held if second is Second.FETCHED else 0)
        return [router.answers[key] for key in keys]


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize(
    ("model", "lender", "overlap"), [("builtin", "p1", True), ("qwen3-w8a8", "d0", False)]
)
def test_together_on_the_native_kernels(zoo: Zoo, model: str, lender: str, overlap: bool) -> None:
    """In bfloat16, and with int8 weights and KV: as where the node holds the pages, and as where all is computed."""
    config = config_of(zoo.folder(model), overlap=overlap, page_size=PAGE)
    fetched, *others = (run(config, zoo.prompts(model), lender, second) for second in Second)
    for without in others:
        for one, other in zip(without, fetched, strict=True):
            assert other.token_ids == one.token_ids
            assert other.logprobs == one.logprobs
            assert sorted(other.logprobs) == list(range(len(other.token_ids)))
