"""The golden comparison is sharp: one damaged page, one wrong page index or a rotary offset of one changes tokens.

Each fault is built into one part of an otherwise real 1P1D, where no check of the transfer can see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.config import NodeConfig
from shared.engine.build import Engine
from shared.engine.forward_stream import make_forward_stream
from shared.engine.input_block import ForwardLimits
from shared.engine.model_runner import ModelRunner
from shared.engine.progress import Progress
from shared.engine.torch_backend import TorchBackend
from shared.engine.torch_ops import torch_kernels
from shared.kvcache.pools import ReqToTokenPool
from shared.kvtransfer.layout import PageStore
from shared.model.checkpoint import Checkpoint
from shared.model.config import load_model_config
from shared.model.decoder import Decoder
from tests.golden.references import Zoo
from tests.golden.serving import Client, node_config, real_engine, split

PROMPT = 7
"""Of 200 tokens: 13 pages, the last of them half full."""


@pytest.fixture
def config(llama: Path) -> NodeConfig:
    return node_config(llama, chunk=512)


class PagesWithWrongIndex:
    """Reads one page twice in the first gather of several, in place of its neighbour.

    Two whole pages of a sequence that trade places would prove nothing: keys carry their rotary position, so
    attention over them is a sum in another order.
    """

    def __init__(self, pages: PageStore) -> None:
        self.pages = pages
        self.device = torch.device("cpu")
        self.num_wrong = 0

    def gather_nbytes(self, num_pages: int, num_layers: int) -> int:
        return self.pages.gather_nbytes(num_pages, num_layers)

    def gather(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, out: torch.Tensor, seed: int
    ) -> int:
        if len(page_ids) > 1 and not self.num_wrong:
            self.num_wrong += 1
            page_ids = [page_ids[0], page_ids[0], *page_ids[2:]]
        return self.pages.gather(page_ids, first_layer, num_layers, out, seed)

    def scatter(
        self, page_ids: Sequence[int], first_layer: int, num_layers: int, src: torch.Tensor, seed: int
    ) -> int:
        return self.pages.scatter(page_ids, first_layer, num_layers, src, seed)


class RowsWithWrongIndex(ReqToTokenPool):
    """Writes one entry of the first long row one page off: the last page but one is named twice."""

    num_wrong = 0

    def write(self, row: int, first_page: int, page_ids: Sequence[int]) -> None:
        if len(page_ids) > 4 and not self.num_wrong:
            self.num_wrong += 1
            page_ids = [*page_ids[:-2], page_ids[-1], page_ids[-1]]
        super().write(row, first_page, page_ids)


class ShiftedDecoder(Decoder):
    """Every rotary angle belongs to the position after the token's own.

    On a node that computes the whole sequence nothing would show, since rotary positions are relative; it is
    between the keys of one node and the queries of another that the shift shows.
    """

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, *to: Any) -> torch.Tensor:
        return super().forward(input_ids_T, positions_T + 1, *to)


class SecondEngine:
    """Makes real engines; the `n`-th of them is passed through `change` (the cluster starts d0, then p0)."""

    def __init__(self, n: int, change: object) -> None:
        self.n, self.change = n, change
        self.made: list[Engine] = []

    def __call__(self, config: NodeConfig) -> Engine:
        engine = real_engine(config)
        if len(self.made) == self.n:
            engine = self.change(engine, config)  # type: ignore[operator]
        self.made.append(engine)
        return engine


ON_DECODE, ON_PREFILL = 0, 1


def test_without_a_fault_the_tokens_are_the_reference(zoo: Zoo, config: NodeConfig) -> None:
    assert split_tokens(zoo, config, SecondEngine(-1, None)) == zoo.greedy("llama", PROMPT)


def test_a_page_corrupted_after_its_check(zoo: Zoo, config: NodeConfig) -> None:
    """One bit of one scatter. Most bits of a float32 are too low to change a token, so several are tried."""
    differing = 0
    for seed in range(24):
        with split(config, seed=seed) as cluster:
            cluster.network.corrupt_after_check(1)
            (tokens,) = Client(cluster).tokens([zoo.prompts("llama")[PROMPT]])
            assert cluster.network.num_scatters_to_corrupt == 0
        differing += tokens != zoo.greedy("llama", PROMPT)
    assert differing >= 2


def test_a_page_index_wrong_in_a_gather(zoo: Zoo, config: NodeConfig) -> None:
    engines = SecondEngine(
        ON_PREFILL, lambda engine, config: replace(engine, pool=PagesWithWrongIndex(engine.pool))
    )
    assert split_tokens(zoo, config, engines) != zoo.greedy("llama", PROMPT)
    assert engines.made[ON_PREFILL].pool.num_wrong == 1  # type: ignore[attr-defined]


def test_a_page_index_wrong_in_the_page_table(zoo: Zoo, config: NodeConfig) -> None:
    """Nothing but the output shows it: the page left out of the row is leaked, so only tokens are compared."""

    def change(engine: Engine, config: NodeConfig) -> Engine:
        rows = engine.ledger.rows
        engine.ledger.rows = RowsWithWrongIndex(rows.num_rows, 512, rows.page_size)
        return engine

    engines = SecondEngine(ON_DECODE, change)
    with split(config, engines) as cluster:
        key = Client(cluster).submit(zoo.prompts("llama")[PROMPT])
        cluster.run_all()
        assert cluster.tokens(key) != zoo.greedy("llama", PROMPT)
    assert engines.made[ON_DECODE].ledger.rows.num_wrong == 1  # type: ignore[attr-defined]


def test_rotary_positions_off_by_one_on_the_decode_node(zoo: Zoo, config: NodeConfig, llama: Path) -> None:
    def change(engine: Engine, config: NodeConfig) -> Engine:
        engine.stream.close()
        decoder = ShiftedDecoder.load(
            Checkpoint(llama), load_model_config(llama), dtype=torch.float32, device=torch.device("cpu")
        )
        num_rows = config.schedule.max_running_requests
        limits = ForwardLimits(num_rows=num_rows, context_length=512, max_tokens=512)
        backend = TorchBackend(torch_kernels(engine.pool.device), decoder, engine.pool, Progress(), limits)
        runner = ModelRunner(backend, num_rows, engine.pool.device)
        return replace(engine, stream=make_forward_stream(runner))

    tokens = split_tokens(zoo, config, SecondEngine(ON_DECODE, change))
    reference = zoo.greedy("llama", PROMPT)
    assert tokens[0] == reference[0], "the prefill node is whole"
    assert tokens != reference


def split_tokens(zoo: Zoo, config: NodeConfig, engines: SecondEngine) -> list[int]:
    with split(config, engines) as cluster:
        (tokens,) = Client(cluster).tokens([zoo.prompts("llama")[PROMPT]])
    return tokens
