"""From a scheduling decision to device tensors: the snapshot, deferred inputs, the FutureMap, and where KV goes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from shared.config import CacheOptions
from shared.engine.build import make_ledger
from shared.engine.forward_batch import ForwardBatch
from shared.engine.future_map import FutureMap
from shared.engine.input_block import BlockShape, InputBlock
from shared.engine.model_worker_batch import ModelWorkerBatch, snapshot
from shared.engine.sampling_inputs import SamplingInputs
from shared.kvcache.ledger import KVLedger
from shared.protocol.messages import ReqKey, Role, Work
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.plan import ScheduleBatch, schedule
from shared.scheduling.req import Req
from shared.timeline import Timeline

CPU = torch.device("cpu")


class BatchRig:
    """A ledger of page size 4 with requests of 10, 7 and 5 tokens."""

    def __init__(self) -> None:
        self.ledger: KVLedger = make_ledger(33, CacheOptions(page_size=4), 8, 64)
        self.ledger.rows.alloc()  # row 0 is somebody else's, so that rows and batch indices differ
        self.future_map = FutureMap(8, CPU)
        self.block = InputBlock(1 << 12, self.future_map.padding_row, 4, CPU, None)
        self.reqs = [self.add(f"r{i}", n) for i, n in enumerate((10, 7, 5))]

    def add(self, rid: str, num_ids: int) -> Req:
        ids = [100 * (1 + int(rid[1:])) + i for i in range(num_ids)]
        req = Req(ReqKey("router", rid), Work(tuple(ids), SamplingParams()), Timeline(Role.DECODE), 100)
        req.kv = self.ledger.admit(self.ledger.match_prefix(ids, ""), "")
        assert req.kv is not None
        assert self.ledger.grow(req.kv, num_ids + 4)
        return req

    def snapshot(
        self,
        *extends: tuple[int, int, bool],
        decodes: Sequence[int] = (),
        writes: tuple[tuple[int, int], ...] = (),
    ) -> ModelWorkerBatch:
        """Extends are (request, length, samples)."""
        batch = ScheduleBatch(
            tuple(schedule(self.reqs[i], n, samples=s) for i, n, s in extends),
            tuple(schedule(self.reqs[i], 1, samples=True) for i in decodes),
        )
        return snapshot(batch, self.ledger.rows, writes, frozenset())

    def forward_batch(self, batch: ModelWorkerBatch) -> ForwardBatch:
        return ForwardBatch.from_model_worker_batch(
            batch, self.block.fill(batch, BlockShape.of(batch), np.empty(0, dtype=np.int32))
        )

    def input_ids(self, batch: ModelWorkerBatch) -> list[int]:
        fb = self.forward_batch(batch)
        return self.future_map.resolve(fb.input_ids_T, fb.future_rows_B, fb.future_tokens_B).tolist()

    def row(self, i: int) -> int:
        kv = self.reqs[i].kv
        assert kv is not None
        return kv.row

    def page(self, i: int, token: int) -> int:
        return self.ledger.rows.read(self.row(i), token // 4, token // 4 + 1)[0]


def test_an_extend_concatenates_its_requests() -> None:
    world = BatchRig()
    world.snapshot((0, 6, False))
    fb = world.forward_batch(world.snapshot((0, 4, True), (1, 7, True), (2, 3, False)))
    assert fb.host.num_decodes == 0
    assert fb.input_ids_T.tolist() == [106, 107, 108, 109, *range(200, 207), 300, 301, 302]
    assert fb.positions_T.tolist() == [6, 7, 8, 9, *range(7), 0, 1, 2]
    assert fb.seq_lens_B.tolist() == [10, 7, 3]
    assert fb.last_token_S.tolist() == [3, 10]
    assert fb.rows_S.tolist() == [world.row(0), world.row(1)]


def test_every_token_goes_to_its_page_and_offset() -> None:
    world = BatchRig()
    world.snapshot((0, 6, False))
    fb = world.forward_batch(world.snapshot((0, 4, True), (1, 7, True)))
    tokens = [(0, t) for t in (6, 7, 8, 9)] + [(1, t) for t in range(7)]
    assert fb.out_pages_T.tolist() == [world.page(i, t) for i, t in tokens]
    assert fb.out_offsets_T.tolist() == [t % 4 for _, t in tokens]
    assert len(set(zip(fb.out_pages_T.tolist(), fb.out_offsets_T.tolist(), strict=True))) == len(tokens)


def test_the_page_table_is_as_wide_as_the_longest_sequence() -> None:
    world = BatchRig()
    fb = world.forward_batch(world.snapshot((0, 10, True), (2, 5, True)))
    assert fb.page_table_BP.shape == (2, 3)
    assert fb.page_table_BP[0].tolist() == [world.page(0, t) for t in (0, 4, 8)]
    assert fb.page_table_BP[1, :2].tolist() == [world.page(2, t) for t in (0, 4)]


def test_a_decode_step_reads_the_last_sampled_tokens_of_its_rows() -> None:
    world = BatchRig()
    world.snapshot((0, 10, True), (1, 7, True), (2, 5, True))
    world.future_map.store(torch.tensor([world.row(i) for i in range(3)]), torch.tensor([11, 12, 13]))
    batch = world.snapshot(decodes=(2, 0))
    assert len(batch.input_ids) == 0
    assert world.input_ids(batch) == [13, 11]
    fb = world.forward_batch(batch)
    assert fb.positions_T.tolist() == [5, 10]
    assert fb.host.num_decodes == 2


def test_a_decode_step_beside_an_extend_comes_behind_it() -> None:
    world = BatchRig()
    world.snapshot((0, 10, True), (2, 5, True))
    world.future_map.store(torch.tensor([world.row(0), world.row(2)]), torch.tensor([11, 13]))
    batch = world.snapshot((1, 4, False), decodes=(2, 0))
    assert batch.input_ids.tolist() == [200, 201, 202, 203]
    assert world.input_ids(batch) == [200, 201, 202, 203, 13, 11]
    fb = world.forward_batch(batch)
    assert fb.host.num_decodes == 2
    assert fb.positions_T.tolist() == [0, 1, 2, 3, 5, 10]
    assert fb.last_token_S.tolist() == [4, 5]


def test_tokens_of_prefill_nodes_enter_before_the_step_reads() -> None:
    world = BatchRig()
    world.snapshot((0, 10, True), (1, 7, True))
    world.future_map.store(torch.tensor([world.row(0), world.row(1)]), torch.tensor([11, 12]))
    batch = world.snapshot(decodes=(0, 1), writes=((world.row(1), 77),))
    assert world.input_ids(batch) == [11, 77]


def test_tokens_of_prefill_nodes_enter_with_an_extend_too() -> None:
    """The next forward may well be a prefill; the token must be there for the decode step after it."""
    world = BatchRig()
    world.snapshot((0, 10, True))
    batch = world.snapshot((1, 7, True), writes=((world.row(0), 55),))
    assert world.input_ids(batch) == list(range(200, 207))
    step = world.snapshot(decodes=(0,))
    assert world.input_ids(step) == [55]


def test_nobody_samples_in_the_middle_of_a_prompt() -> None:
    world = BatchRig()
    batch = world.snapshot((0, 6, False))
    assert len(batch.sampled_B) == 0
    assert batch.sampling == SamplingInputs()
    fb = world.forward_batch(batch)
    assert fb.last_token_S.shape == (0,)


def test_the_snapshot_does_not_see_later_changes() -> None:
    """The scheduler goes on while the forward waits: rows move, pages are appended, ids grow."""
    world = BatchRig()
    batch = world.snapshot((0, 6, False), (1, 7, True))
    before = (batch.page_table_BP.copy(), batch.input_ids.copy(), batch.starts_B.copy())
    world.ledger.rows.write(world.row(0), 0, [31, 30, 29])
    world.reqs[0].ids[0] = 999
    world.snapshot((0, 4, True))
    for old, new in zip(before, (batch.page_table_BP, batch.input_ids, batch.starts_B), strict=True):
        np.testing.assert_array_equal(old, new)


def test_the_forward_batch_is_frozen() -> None:
    world = BatchRig()
    fb = world.forward_batch(world.snapshot((0, 6, False)))
    with pytest.raises(AttributeError):
        fb.positions_T = fb.input_ids_T  # type: ignore[misc]


def test_padding_touches_no_page_and_no_row_of_a_request() -> None:
    world = BatchRig()
    world.snapshot((0, 10, True), (1, 7, True))
    world.future_map.store(torch.arange(8), 50 + torch.arange(8))
    batch = world.snapshot(decodes=[0, 1], writes=((world.row(0), 77),))
    block = world.block.fill(batch, BlockShape(5, 4), np.empty(0, dtype=np.int32))
    fb = ForwardBatch.from_model_worker_batch(batch, block)
    padding = world.future_map.padding_row
    assert fb.future_rows_B.tolist() == [world.row(0), *[padding] * 3]
    assert block.per_sequence()[3].tolist() == [world.row(0), world.row(1), padding, padding]
    of_padding = fb.input_ids_T, fb.positions_T, fb.out_pages_T, fb.out_offsets_T
    assert [values_T[2:].tolist() for values_T in of_padding] == [[0] * 3] * 4
    ids = world.future_map.resolve(fb.input_ids_T, fb.future_rows_B, fb.future_tokens_B)
    assert ids.tolist() == [77, 50 + world.row(1), 0, 0, 0]
    others = sorted({*range(8)} - {world.row(0)})
    assert world.future_map.last_token_R[others].tolist() == [50 + row for row in others]


def test_the_future_map_keeps_one_token_for_each_row() -> None:
    future_map = FutureMap(4, CPU)
    future_map.store(torch.tensor([2, 0]), torch.tensor([5, 6]))
    written = torch.tensor([2, future_map.padding_row]), torch.tensor([7, 0])
    assert future_map.resolve(torch.tensor([-1, 9, -3, -3, 0]), *written).tolist() == [6, 9, 7, 7, 0]
