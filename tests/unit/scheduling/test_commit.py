"""What a finished forward changes, and which of its results are dropped."""

from __future__ import annotations

import pytest

from shared.kvcache.ledger import KVLedger
from shared.protocol.messages import Finish
from shared.scheduling.commit import Outcome, Sampled, commit_result, finish_reason
from shared.scheduling.plan import ScheduleBatch, schedule
from shared.scheduling.req import Req
from shared.timeline import ReqStage
from tests.unit.scheduling.conftest import MakeLedger, MakeReq

EOS = frozenset({7, 8})


def admit(ledger: KVLedger, req: Req) -> Req:
    req.kv = ledger.admit(ledger.match_prefix(req.ids, ""), "")
    assert req.kv is not None
    assert ledger.grow(req.kv, len(req.ids) + 8)
    return req


def extend(req: Req, length: int, *, samples: bool = True) -> ScheduleBatch:
    return ScheduleBatch(extends=(schedule(req, length, samples=samples),))


def commit(ledger: KVLedger, batch: ScheduleBatch, *tokens: int) -> Outcome:
    outcome = Outcome()
    commit_result(batch, Sampled(tokens), ledger, EOS, outcome)
    return outcome


def test_a_chunk_brings_kv_and_no_token(make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
    ledger, req = make_kv_ledger(), make_req(10)
    admit(ledger, req)
    out = commit(ledger, extend(req, 6, samples=False))
    assert (out.computed, out.sampled, out.finished) == ([req], [], [])
    assert req.kv is not None
    assert (req.kv.kv_committed_len, req.kv.num_tree_pages) == (6, 1)
    assert req.output_len == 0


def test_the_last_chunk_brings_a_token(make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
    ledger, req = make_kv_ledger(), make_req(10)
    out = commit(ledger, extend(admit(ledger, req), 10), 55)
    assert (out.computed, out.sampled, out.finished) == ([req], [req], [])
    assert req.ids[10:] == [55]


def test_a_decode_step_shares_nothing(make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
    """Pages that fill while decoding enter the tree when the request ends, not step by step."""
    ledger, req = make_kv_ledger(), make_req(11)
    commit(ledger, extend(admit(ledger, req), 11), 55)
    assert req.kv is not None
    before = req.kv.num_tree_pages
    commit(ledger, ScheduleBatch(decodes=(schedule(req, 1, samples=True),)), 56)
    assert (req.kv.num_tree_pages, req.kv.kv_committed_len) == (before, 12)
    assert req.ids[11:] == [55, 56]


def test_tokens_go_to_those_who_sample_in_order(make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
    ledger = make_kv_ledger()
    reqs = [admit(ledger, make_req(6)) for _ in range(3)]
    items = (
        schedule(reqs[0], 6, samples=True),
        schedule(reqs[1], 4, samples=False),
        schedule(reqs[2], 6, samples=True),
    )
    out = commit(ledger, ScheduleBatch(extends=items), 51, 52)
    assert out.sampled == [reqs[0], reqs[2]]
    assert [req.ids[6:] for req in reqs] == [[51], [], [52]]


@pytest.mark.parametrize("drop", ["retracted", "ended"])
def test_results_in_flight_of_a_request_that_is_gone_are_dropped(
    make_kv_ledger: MakeLedger, make_req: MakeReq, drop: str
) -> None:
    """Its neighbour in the batch still gets its own token, not the stale one's."""
    ledger = make_kv_ledger()
    gone, stays = admit(ledger, make_req(6)), admit(ledger, make_req(6))
    batch = ScheduleBatch(extends=(schedule(gone, 6, samples=True), schedule(stays, 6, samples=True)))
    gone.drop_results_in_flight() if drop == "retracted" else gone.end(Finish("abort"))
    out = commit(ledger, batch, 51, 52)
    assert (out.computed, out.sampled) == ([stays], [stays])
    assert gone.output_len == 0
    assert gone.kv is not None
    assert gone.kv.kv_committed_len == 0
    assert stays.ids[6:] == [52]


def test_a_step_launched_before_the_eos_was_seen_is_dropped(
    make_kv_ledger: MakeLedger, make_req: MakeReq
) -> None:
    ledger, req = make_kv_ledger(), make_req(6)
    first = extend(admit(ledger, req), 6)
    second = ScheduleBatch(decodes=(schedule(req, 1, samples=True),))
    assert commit(ledger, first, 7).finished == [req]
    assert req.timeline.stage is ReqStage.FINISHED
    out = commit(ledger, second, 99)
    assert (out.computed, out.sampled, out.finished) == ([], [], [])
    assert req.ids[6:] == [7]


def test_no_token_is_wanted_but_the_prompt_is_computed(make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
    ledger, req = make_kv_ledger(), make_req(6, max_new_tokens=0)
    out = commit(ledger, extend(admit(ledger, req), 6), 55)
    assert (out.computed, out.sampled, out.finished) == ([req], [], [req])
    assert req.output_len == 0
    assert req.finish == Finish("length")


def test_a_position_that_does_not_follow_is_a_bug(make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
    ledger, req = make_kv_ledger(), make_req(6, output_ids=(1, 2))
    batch = extend(admit(ledger, req), 8)
    req.ids.append(3)
    with pytest.raises(AssertionError, match="position 2"):
        commit(ledger, batch, 55)


@pytest.mark.parametrize(
    ("params", "outputs", "expected"),
    [
        ({"max_new_tokens": 3}, [1, 2], None),
        ({"max_new_tokens": 3}, [1, 2, 3], Finish("length")),
        ({"max_new_tokens": 0}, [], Finish("length")),
        ({}, [], None),
        ({}, [1, 7], Finish("stop", 7)),
        ({}, [7, 1], None),
        ({}, [8], Finish("stop", 8)),
        ({"ignore_eos": True}, [1, 7], None),
        ({"stop_token_ids": (5,)}, [5], Finish("stop", 5)),
        ({"stop_token_ids": (5,), "ignore_eos": True}, [5], Finish("stop", 5)),
        ({"stop_token_ids": (7,), "ignore_eos": True}, [7], Finish("stop", 7)),
        ({"max_new_tokens": 2}, [1, 7], Finish("stop", 7)),
        ({"max_new_tokens": 2, "ignore_eos": True}, [1, 7], Finish("length")),
        ({"stop_token_ids": (1003,)}, [], None),
    ],
)
def test_finish_reason(
    make_req: MakeReq, params: dict[str, object], outputs: list[int], expected: Finish | None
) -> None:
    """The last case: the prompt's own last token is no stop token."""
    assert finish_reason(make_req(4, output_ids=outputs, **params), EOS) == expected
