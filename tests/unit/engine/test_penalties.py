"""The device's penalty state against its naive twin, while requests come, go and move and the host lags a step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from shared.config import CacheOptions
from shared.engine.build import make_ledger
from shared.engine.model_worker_batch import CountedRows, snapshot
from shared.engine.penalties import PenaltyTable, penalize
from shared.engine.sampler import sample
from shared.engine.sampling_inputs import HostSampling
from shared.protocol.messages import ReqKey, Role, Work
from shared.protocol.sampling_params import SamplingParams, TokenBias
from shared.scheduling.plan import ScheduleBatch, ScheduledReq, schedule
from shared.scheduling.req import Req
from shared.timeline import Timeline
from tests.unit.engine.naive_sampler import naive_penalize

V = 24
NUM_ROWS = 4
PARAMS = {
    "none": {},
    "frequency": {"frequency_penalty": 0.7},
    "frequency_reward": {"frequency_penalty": -2.0},
    "presence": {"presence_penalty": 1.3},
    "repetition": {"repetition_penalty": 1.5},
    "repetition_reward": {"repetition_penalty": 0.5},
    "bias": {"logit_bias": (TokenBias(3, 4.0), TokenBias(20, -100.0))},
    "all": {
        "frequency_penalty": 0.4,
        "presence_penalty": -0.9,
        "repetition_penalty": 1.2,
        "logit_bias": (TokenBias(0, 2.5),),
    },
}


@dataclass
class PenaltyRig:
    """Requests of which each forward samples some; the host learns of a token one forward late."""

    seed: int
    late: bool
    reqs: list[Req] = field(default_factory=list)
    num_counted_anew: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.ledger = make_ledger(200, CacheOptions(page_size=16), NUM_ROWS, 512)
        self.table = PenaltyTable(V, torch.device("cpu"), penalize)
        self.counted_rows = CountedRows()
        self.sampled: dict[str, list[int]] = {}
        self.in_flight: list[tuple[ScheduledReq, int]] = []

    def arrive(self, name: str) -> None:
        rid = f"r{len(self.sampled)}"
        ids = [self.rng.randrange(V) for _ in range(self.rng.randint(1, 6))]
        outputs = [self.rng.randrange(V) for _ in range(self.rng.randint(0, 3))]
        params = SamplingParams(temperature=0.0, **PARAMS[name])  # type: ignore[arg-type]
        work = Work(tuple(ids), params, tuple(outputs))
        req = Req(ReqKey("router", rid), work, Timeline(Role.DECODE), 500)
        self.sampled[rid] = outputs
        self.admit(req)
        self.reqs.append(req)

    def admit(self, req: Req) -> None:
        req.kv = self.ledger.admit(self.ledger.radix_cache.match_prefix([]), "")
        assert req.kv is not None
        assert self.ledger.grow(req.kv, 64)

    def leave(self, req: Req) -> None:
        assert req.kv is not None
        self.ledger.cache_finished_req(req.kv, ())
        req.kv = None

    def commit(self, launched: list[tuple[ScheduledReq, int]]) -> None:
        for item, token in launched:
            if not item.is_stale:
                item.req.ids.append(token)

    def retract(self, req: Req) -> None:
        """Its token in flight is dropped, and its row may go to somebody else before it is back."""
        self.leave(req)
        req.drop_results_in_flight()
        self.sampled[req.key.rid] = req.ids[req.num_input_ids :]
        others = [other for other in self.reqs if other is not req]
        if others and self.rng.random() < 0.5:
            other = self.rng.choice(others)
            self.leave(other)
            other.drop_results_in_flight()
            self.sampled[other.key.rid] = other.ids[other.num_input_ids :]
            self.admit(req)
            self.admit(other)
        else:
            self.admit(req)

    def step(self) -> None:
        """A forward of some requests; the logits that they sample from must be those of the twin."""
        chosen = self.rng.sample(self.reqs, self.rng.randint(1, len(self.reqs)))
        items = tuple(schedule(req, 1, samples=True) for req in chosen)
        inputs = snapshot(
            ScheduleBatch(decodes=items), self.ledger.rows, (), frozenset(), self.counted_rows
        ).sampling
        logits = 4 * torch.randn(len(items), V, generator=self.generator)
        expected = [
            naive_penalize(
                logits[i].numpy(),
                req.params,
                req.ids[: req.num_input_ids],
                self.sampled[req.key.rid],
            )
            for i, req in enumerate(chosen)
        ]
        tokens = self.run(logits, inputs)
        np.testing.assert_allclose(logits.numpy(), np.stack(expected), rtol=1e-5, atol=1e-5)
        assert tokens == [int(row.argmax()) for row in expected]
        for req, token in zip(chosen, tokens, strict=True):
            self.sampled[req.key.rid] = [*self.sampled[req.key.rid], token]
        launched = list(zip(items, tokens, strict=True))
        due, self.in_flight = (self.in_flight, launched) if self.late else (launched, [])
        self.commit(due)

    def run(self, logits: torch.Tensor, on_host: HostSampling) -> list[int]:
        inputs = on_host.map(torch.from_numpy)
        if inputs.penalties is not None:
            anew = inputs.penalties.anew
            self.num_counted_anew.append(0 if anew is None else len(anew.slots_A))
            self.table.apply(logits, inputs.penalties)
        token_ids = sample(logits, inputs)
        if inputs.penalties is not None:
            self.table.count(token_ids, inputs.penalties)
        return token_ids.tolist()


@given(
    seed=st.integers(0, 2**32 - 1),
    late=st.booleans(),
    names=st.lists(st.sampled_from(sorted(PARAMS)), min_size=1, max_size=NUM_ROWS),
    moves=st.lists(st.sampled_from(["step", "step", "step", "retract", "replace"]), min_size=4, max_size=30),
)
@settings(max_examples=60)
def test_the_state_is_exact_at_every_step(seed: int, late: bool, names: list[str], moves: list[str]) -> None:
    world = PenaltyRig(seed, late)
    for name in names:
        world.arrive(name)
    for move in moves:
        req = world.rng.choice(world.reqs)
        if move == "step":
            world.step()
        elif move == "retract":
            world.retract(req)
        else:  # a finished request's row goes to a newcomer
            world.leave(req)
            req.generation += 1
            world.reqs.remove(req)
            world.arrive(world.rng.choice(sorted(PARAMS)))


def test_only_what_the_device_does_not_have_is_sent() -> None:
    """Once at the start, and once after a retraction."""
    world = PenaltyRig(1, late=True)
    world.arrive("all")
    for move in ("step", "step", "step", "retract", "step", "step"):
        world.step() if move == "step" else world.retract(world.reqs[0])
    assert world.num_counted_anew == [1, 0, 0, 1, 0]


def test_nobody_asks_and_nothing_is_there() -> None:
    world = PenaltyRig(2, late=False)
    world.arrive("none")
    items = (schedule(world.reqs[0], 1, samples=True),)
    inputs = snapshot(ScheduleBatch(decodes=items), world.ledger.rows, (), frozenset()).sampling
    assert (inputs.penalties, inputs.biases, inputs.logprobs) == (None, None, None)
    assert world.table._num_output_NV.numel() == 0


def test_counting_anew_with_a_token_in_flight_is_a_bug() -> None:
    world = PenaltyRig(3, late=False)
    world.arrive("all")
    (req,) = world.reqs
    schedule(req, 1, samples=True)
    item = schedule(req, 1, samples=True)
    with pytest.raises(AssertionError, match="are to be counted"):
        CountedRows().go_on(item)


@pytest.mark.parametrize("name", [name for name in PARAMS if name != "none"])
def test_a_row_is_penalized_alike_alone_and_in_a_batch(name: str) -> None:
    """To the last bit: or else a request would sample something else when it is batched."""
    alone, together = PenaltyRig(4, late=False), PenaltyRig(4, late=False)
    alone.arrive(name)
    for other in (name, *PARAMS):
        together.arrive(other) if len(together.reqs) < NUM_ROWS else None
    logits = 4 * torch.randn(1, V, generator=torch.Generator().manual_seed(9))
    outcomes = []
    for world in (alone, together):
        items = tuple(schedule(req, 1, samples=True) for req in world.reqs)
        inputs = snapshot(ScheduleBatch(decodes=items), world.ledger.rows, (), frozenset()).sampling
        batch = logits.expand(len(items), V).clone()
        world.run(batch, inputs)
        outcomes.append(batch[0])
    assert torch.equal(*outcomes)
