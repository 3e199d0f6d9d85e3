"""The checks find what they are for: a slot written by somebody else, and a snapshot that lacks something."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from shared.config import CacheOptions, NodeConfig, ScheduleOptions
from shared.engine.debug_checks import LaunchChecks, check_complete
from shared.engine.launcher import Launcher
from shared.engine.model_worker_batch import ModelWorkerBatch, snapshot
from shared.protocol.messages import ReqKey, Work
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.batcher import Batcher
from shared.scheduling.plan import Plan, ScheduleBatch, ScheduledReq
from shared.scheduling.req import Req
from shared.timeline import Role, Timeline
from tests.token_engine import token_engine

CONFIG = NodeConfig(
    cache=CacheOptions(page_size=4, max_total_tokens=400),
    schedule=ScheduleOptions(max_running_requests=4),
)


class ChecksRig:
    """Two requests whose prompts have been launched; `decode` is the step after."""

    def __init__(self) -> None:
        self.engine = token_engine(CONFIG)
        self.batcher = Batcher(self.engine.ledger, CONFIG.schedule)
        self.checks = LaunchChecks()
        self.reqs = [
            Req(ReqKey("router", rid), Work((9, 8, 7), SamplingParams()), Timeline(Role.DECODE), 20)
            for rid in "ab"
        ]
        for req in self.reqs:
            self.batcher.add(req)
        self.launch(self.next())
        self.decode = self.next()

    def next(self) -> ScheduleBatch:
        batch = self.batcher.plan().batch
        assert batch is not None
        return batch

    def launch(self, batch: ScheduleBatch, writes: tuple[tuple[int, int], ...] = ()) -> ModelWorkerBatch:
        inputs = snapshot(batch, self.engine.ledger.rows, writes, self.engine.eos_token_ids)
        self.checks.launching(batch, inputs)
        return inputs


def changed(batch: ScheduleBatch, **fields: object) -> ScheduleBatch:
    first, *others = batch.items
    return dataclasses.replace(batch, decodes=(dataclasses.replace(first, **fields), *others))  # type: ignore[arg-type]


def test_steps_in_order_are_fine() -> None:
    world = ChecksRig()
    world.launch(world.decode)
    world.launch(world.next())


def test_a_generation_that_did_not_write_its_slot() -> None:
    world = ChecksRig()
    with pytest.raises(AssertionError, match="router/a"):
        world.launch(changed(world.decode, generation=1))


def test_a_step_that_was_left_out() -> None:
    world = ChecksRig()
    with pytest.raises(AssertionError, match="router/a"):
        world.launch(world.next())


def test_a_slot_that_another_request_wrote() -> None:
    world = ChecksRig()
    a, b = world.reqs
    a.kv, b.kv = b.kv, a.kv
    with pytest.raises(AssertionError, match="router/a"):
        world.launch(world.decode)


def test_a_token_from_elsewhere_is_read_by_its_request_alone() -> None:
    world = ChecksRig()
    req = world.reqs[0]
    assert req.kv is not None
    req.ids.append(55)
    world.launch(world.decode, ((req.kv.row, 55),))
    world = ChecksRig()
    req = world.reqs[0]
    assert req.kv is not None
    req.ids.append(55)
    with pytest.raises(AssertionError, match="another request"):
        world.launch(world.decode, ((req.kv.row, 56),))


@pytest.mark.parametrize(
    "field", ["rows_B", "starts_B", "lengths_B", "page_table_BP", "input_ids", "sampled_B"]
)
def test_a_field_that_is_too_short(field: str) -> None:
    world = ChecksRig()
    inputs = world.launch(world.decode)
    check_complete(world.decode, inputs)
    wrong = np.zeros(1, dtype=np.int64)
    with pytest.raises(AssertionError, match=field):
        world.checks.launching(world.decode, dataclasses.replace(inputs, **{field: wrong}))


def test_a_launcher_with_checks_does_not_hide_what_they_find() -> None:
    world = ChecksRig()
    launcher = Launcher(
        world.engine.stream,
        world.engine.ledger,
        world.engine.eos_token_ids,
        overlap=True,
        debug_checks=True,
    )
    with pytest.raises(AssertionError, match="router/a"):
        launcher.turn(Plan(world.decode))  # it has never seen the prompts


def test_an_item_without_tokens_is_a_defect() -> None:
    world = ChecksRig()
    item = world.decode.items[0]
    empty = ScheduledReq(item.req, item.generation, item.start, 0, item.position)
    with pytest.raises(AssertionError, match="without a new token"):
        check_complete(ScheduleBatch(decodes=(empty,)), world.launch(world.decode))


def test_a_plan_that_touches_a_tensor_is_found() -> None:
    lengths = torch.tensor([3, 4])
    checks = LaunchChecks()
    with pytest.raises(AssertionError, match="while planning"), checks.planning():
        lengths.sum().item()
    assert lengths.sum().item() == 7


def test_a_plan_that_waits_for_a_result_is_found() -> None:
    checks = LaunchChecks()
    checks.waiting()
    with pytest.raises(AssertionError, match="waits for the device"), checks.planning():
        checks.waiting()
    checks.waiting()
