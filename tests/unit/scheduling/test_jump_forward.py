"""Whether a request jumps and how far, decision by decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shared.grammar.state import GrammarState
from shared.protocol.logprobs import LogprobParams
from shared.protocol.messages import Finish
from shared.protocol.sampling_params import TokenBias
from shared.scheduling.commit import MIN_TOKENS, Outcome, Sampled, commit_result
from shared.scheduling.plan import ScheduleBatch, schedule
from shared.scheduling.req import Req
from tests.unit.scheduling.conftest import MakeLedger, MakeReq

EOS = frozenset({7})
TOKEN = 55
FORCED = [60, 61, 62, 63, 64, 65]


class ScriptedMatcher:
    """Forces FORCED behind TOKEN; `refused` is not accepted, `last` ends the grammar."""

    def __init__(self, refused: int = -1, last: int = -1) -> None:
        self.accepted: list[int] = []
        self.refused, self.last = refused, last

    @property
    def is_terminated(self) -> bool:
        return self.accepted[-1:] == [self.last]

    def accept(self, token_id: int) -> bool:
        self.accepted += [token_id] * (token_id != self.refused)
        return token_id != self.refused

    def fill_mask(self, mask_GW: np.ndarray, row: int) -> None:
        raise AssertionError("nobody samples here")

    def forced_tokens(self) -> list[int]:
        return FORCED if self.accepted == [TOKEN] else []


class Scripted:
    vocab_size = 997

    def __init__(self, **matcher: int) -> None:
        self.matcher = matcher

    def new_matcher(self) -> ScriptedMatcher:
        return ScriptedMatcher(**self.matcher)


def committed(
    make_kv_ledger: MakeLedger,
    make_req: MakeReq,
    *,
    jump_forward: bool = True,
    matcher: dict[str, int] | None = None,
    **params: Any,
) -> tuple[Req, Outcome]:
    """A request of 10 tokens whose first sampled token is TOKEN."""
    ledger, req = make_kv_ledger(), make_req(10, **params)
    req.grammar = GrammarState(Scripted(**(matcher or {})), jump_forward=jump_forward)
    req.kv = ledger.admit(ledger.match_prefix(req.ids, ""), "")
    assert req.kv is not None and ledger.grow(req.kv, 10)
    batch = ScheduleBatch(extends=(schedule(req, 10, samples=True),))
    outcome = Outcome()
    commit_result(batch, Sampled([TOKEN]), ledger, EOS, outcome)
    return req, outcome


def outputs(req: Req) -> Sequence[int]:
    return req.ids[req.num_input_ids :]


def test_all_but_the_last_forced_token_are_appended(make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
    req, out = committed(make_kv_ledger, make_req, max_new_tokens=50)
    assert outputs(req) == list(req.newest_ids) == [TOKEN, *FORCED[:-1]]
    assert (req.num_jumped, req.num_sampled, req.generation) == (5, 6, 1)
    assert req.kv is not None and (req.kv_len, req.kv.kv_committed_len) == (10, 10)
    assert (out.sampled, out.finished) == ([req], [])
    assert req.finish is None


@pytest.mark.parametrize(
    ("params", "num_jumped"),
    [
        ({"max_new_tokens": 5}, 4),
        ({"max_new_tokens": 1 + MIN_TOKENS}, MIN_TOKENS),
        ({"max_new_tokens": MIN_TOKENS}, 0),
        ({"stop_token_ids": (63,)}, 3),
        ({"stop_token_ids": (62,)}, 0),
        ({"stop_token_ids": (63,), "min_new_tokens": 20}, 3),
        ({"logprobs": LogprobParams()}, 0),
        ({"logit_bias": (TokenBias(60, 1.0),)}, 0),
        ({"frequency_penalty": 1.0}, 5),
    ],
    ids=str,
)
def test_how_far(
    make_kv_ledger: MakeLedger, make_req: MakeReq, params: dict[str, Any], num_jumped: int
) -> None:
    req, out = committed(make_kv_ledger, make_req, **params)
    assert outputs(req) == [TOKEN, *FORCED[:num_jumped]]
    assert req.num_jumped == num_jumped
    assert bool(req.generation) == bool(num_jumped)
    if req.output_len == params.get("max_new_tokens"):
        assert req.finish == Finish("length") and out.finished == [req]


def test_not_unless_it_is_enabled(make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
    req, _ = committed(make_kv_ledger, make_req, jump_forward=False)
    assert outputs(req) == [TOKEN]


def test_an_eos_among_the_forced_is_left_to_the_sampler(
    make_kv_ledger: MakeLedger, make_req: MakeReq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "FORCED", [60, 61, 62, 7, 64, 65])
    req, _ = committed(make_kv_ledger, make_req)
    assert outputs(req) == [TOKEN, 60, 61, 62]


@pytest.mark.parametrize(
    ("params", "matcher"), [({"stop_token_ids": (TOKEN,)}, {}), ({}, {"last": TOKEN})], ids=["stop", "end"]
)
def test_nothing_follows_the_last_token(
    make_kv_ledger: MakeLedger, make_req: MakeReq, params: dict[str, Any], matcher: dict[str, int]
) -> None:
    req, out = committed(make_kv_ledger, make_req, matcher=matcher, **params)
    assert outputs(req) == [TOKEN]
    assert req.finish == Finish("stop", TOKEN) and out.finished == [req]


@pytest.mark.parametrize(("refused", "num_jumped"), [(60, 0), (61, 1), (64, 4)])
def test_a_token_that_the_grammar_refuses_ends_the_jump(
    make_kv_ledger: MakeLedger, make_req: MakeReq, refused: int, num_jumped: int
) -> None:
    req, out = committed(make_kv_ledger, make_req, matcher={"refused": refused})
    assert outputs(req) == [TOKEN, *FORCED[:num_jumped]]
    assert bool(req.generation) == bool(num_jumped)
    assert not out.failed


def test_the_next_sampled_token_is_told_alone_again(make_kv_ledger: MakeLedger, make_req: MakeReq) -> None:
    req, _ = committed(make_kv_ledger, make_req)
    ledger = make_kv_ledger()
    req.kv = ledger.admit(ledger.match_prefix(req.ids, ""), "")
    assert req.kv is not None and ledger.grow(req.kv, len(req.ids))
    batch = ScheduleBatch(extends=(schedule(req, len(req.ids), samples=True),))
    commit_result(batch, Sampled([70]), ledger, EOS, Outcome())
    assert (req.num_jumped, req.newest_ids) == (0, (70,))
