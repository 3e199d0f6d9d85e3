"""What the bench of overlap against multi-step takes for granted: equal outputs, and who throws how much away."""

from __future__ import annotations

import pytest

from shared.kvcache.audit import audit_idle
from tests.bench.devices import timed_device
from tests.bench.multi_step import run
from tests.bench.open_loop import MAX_NEW_TOKENS, Load

NUM_REQS, MAX_RUNNING = 12, 5


@pytest.mark.parametrize("prefilled", [True, False])
def test_schools_differ_in_what_they_throw_away_alone(prefilled: bool) -> None:
    device = timed_device(MAX_RUNNING, step_s=0.0)
    load = Load(num_reqs=NUM_REQS, rate=None, prefilled=prefilled)
    seen = {k: run(device, MAX_RUNNING, load, k) for k in (None, 1, 4)}
    audit_idle(device.ledger)
    useful = {s.num_useful for s in seen.values()}
    assert len(useful) == 1
    assert NUM_REQS < useful.pop() < NUM_REQS * MAX_NEW_TOKENS, "nobody, or everybody, stopped early"
    thrown_away = {k: s.num_computed - s.num_useful for k, s in seen.items()}
    assert thrown_away[1] == 0
    assert 0 < thrown_away[None] <= NUM_REQS
    assert thrown_away[None] < thrown_away[4] <= 3 * NUM_REQS
