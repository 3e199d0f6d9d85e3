"""Masks of grammars: who gets a row, and what it does to the logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.engine.sampling_inputs import VocabMask, apply_vocab_mask, fill_vocab_mask, must_wait_for_commit
from shared.grammar.state import GrammarState
from shared.protocol.messages import Finish, ReqKey, Work
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.plan import ScheduleBatch, ScheduledReq
from shared.scheduling.req import Req
from shared.timeline import Role, Timeline
from tests.device import device
from tests.token_engine import EOS, VOCAB_SIZE
from tests.token_grammar import TokenCompiled

INF = torch.inf


def make_req(rid: str, output_ids: tuple[int, ...], modulus: int | None) -> Req:
    key = ReqKey("router", rid)
    req = Req(key, Work((1, 2), SamplingParams(), output_ids), Timeline(Role.DECODE), 50)
    if modulus is not None:
        req.grammar = GrammarState(TokenCompiled(modulus, 9))
        assert req.grammar.follow(req.ids, 2)
    return req


def item(req: Req, position: int | None) -> ScheduledReq:
    return ScheduledReq(req, req.generation, 0, 1, position)


def decode(*items: ScheduledReq) -> ScheduleBatch:
    return ScheduleBatch(decodes=items)


def allowed(mask: VocabMask[np.ndarray], row: int) -> set[int]:
    bits = np.unpackbits(mask.allowed_GW[row].view(np.uint8), bitorder="little")
    return set(np.nonzero(bits[:VOCAB_SIZE])[0].tolist())


def test_a_batch_without_grammars_has_no_mask() -> None:
    batch = decode(item(make_req("a", (), None), 0))
    assert fill_vocab_mask(batch) is None
    assert not must_wait_for_commit(batch)


def test_each_row_is_its_requests_own() -> None:
    plain, chunk = make_req("plain", (4,), None), make_req("chunk", (), 3)
    two, five = make_req("two", (4,), 2), make_req("five", (), 5)
    mask = fill_vocab_mask(decode(item(chunk, None), item(plain, 1), item(two, 1), item(five, 0)))
    assert mask is not None
    assert mask.entries_G.tolist() == [1, 2]  # of those that sample
    assert allowed(mask, 0) == {i for i in range(VOCAB_SIZE) if i % 2 == 0}
    assert allowed(mask, 1) == {i for i in range(VOCAB_SIZE) if i % 5 == 0}
    assert EOS % 2 and EOS % 5


def test_sampling_waits_only_for_tokens_in_flight() -> None:
    known, in_flight = make_req("known", (3,), 3), make_req("in flight", (3,), 3)
    assert not must_wait_for_commit(decode(item(known, 1)))
    assert must_wait_for_commit(decode(item(known, 1), item(in_flight, 2)))
    assert not must_wait_for_commit(decode(item(known, 1), item(make_req("plain", (3,), None), 2)))


def test_a_result_that_will_be_dropped_needs_no_mask() -> None:
    ended, failed = make_req("ended", (3,), 3), make_req("failed", (3,), 3)
    batch = decode(item(ended, 1), item(failed, 2))
    ended.end(Finish("stop", EOS))
    assert fill_vocab_mask(batch) is None


def words(*rows: list[int], vocab_size: int) -> np.ndarray:
    bits = np.zeros((len(rows), -(-vocab_size // 32) * 32), dtype=np.uint8)
    for row, ids in zip(bits, rows, strict=True):
        row[ids] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def mask_of(
    entries: list[int], allowed_GW: np.ndarray, where: str | torch.device = "cpu"
) -> VocabMask[torch.Tensor]:
    mask = VocabMask(entries_G=np.array(entries), allowed_GW=allowed_GW)
    return mask.map(lambda array: torch.from_numpy(array).to(where))


@pytest.mark.parametrize("vocab_size", [5, 32, 33, 64, 997])
def test_logits_of_other_tokens_are_gone(vocab_size: int) -> None:
    logits = torch.randn(3, vocab_size, device=device())
    before = logits.cpu()
    ids = [0, vocab_size - 1] if vocab_size < 32 else [0, 31, vocab_size - 1]
    apply_vocab_mask(logits, mask_of([0, 2], words(ids, [1], vocab_size=vocab_size), device()))
    expected = torch.full((3, vocab_size), -INF)
    expected[0, ids], expected[1], expected[2, 1] = before[0, ids], before[1], before[2, 1]
    assert torch.equal(logits.cpu(), expected)


def test_the_grammar_wins_where_nothing_else_is_left() -> None:
    logits = torch.tensor([[-INF, 1.0, 2.0, -INF]])
    apply_vocab_mask(logits, mask_of([0], words([0, 3], vocab_size=4)))
    assert logits.tolist() == [[0.0, -INF, -INF, 0.0]]


def test_a_grammar_that_allows_nothing_leaves_nothing() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    apply_vocab_mask(logits, mask_of([0], words([], vocab_size=2)))
    assert logits.tolist() == [[-INF, -INF]]
