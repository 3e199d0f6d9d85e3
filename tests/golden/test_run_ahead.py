"""A prompt that is computed ahead of its reservation gives the tokens of one that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefill_node.run_ahead import RunAhead
from shared.scheduling.commit import Outcome
from shared.scheduling.req import Req
from tests.cluster import Cluster
from tests.golden.references import Zoo
from tests.golden.serving import Client, node_config, real_engine


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_tokens_are_those_of_the_reference(
    zoo: Zoo, llama: Path, share: float, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran_ahead: list[Req] = []
    settle = RunAhead.settle

    def watched(self: RunAhead, outcome: Outcome) -> Req | None:
        if (req := settle(self, outcome)) is not None:
            ran_ahead.append(req)
        return req

    monkeypatch.setattr(RunAhead, "settle", watched)
    prompts = zoo.prompts("llama")[:4]
    config = node_config(llama, overlap=overlap, prefill_ahead_share=share)
    one_row = node_config(llama, overlap=overlap, max_running_requests=1)
    with Cluster(1, 1, real_engine, config, decode_config=one_row) as cluster:
        tokens = Client(cluster).tokens(prompts)
        assert tokens == [zoo.greedy("llama", i) for i in range(4)]
        assert bool(ran_ahead) is (share > 0)
