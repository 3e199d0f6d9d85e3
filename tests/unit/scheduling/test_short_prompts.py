"""Prompts that go beside a prompt of several chunks, and those that do not."""

from __future__ import annotations

from shared.scheduling.plan import ScheduleBatch
from shared.scheduling.req import Req
from tests.prop.stepping import Stepping, new_req

CHUNK = 16


def prompt(rid: str, num_tokens: int, *, first: int = 0, priority: int = 0) -> Req:
    """A prompt that shares nothing with one of another `first`."""
    return new_req(rid, range(first + 1, first + 1 + num_tokens), 1, priority=priority)


def shorts(count: int, num_tokens: int = 4) -> list[Req]:
    return [prompt(f"short{i}", num_tokens, first=100 + 20 * i) for i in range(count)]


def stepping(**schedule: object) -> Stepping:
    """A batcher without overlap that has launched the first chunk of a prompt of four."""
    stepping = Stepping(overlap=False, **{"chunked_prefill_size": CHUNK, **schedule})
    stepping.add(prompt("long", 4 * CHUNK))
    assert extends(stepping.step()) == {"long": CHUNK}
    return stepping


def extends(batch: ScheduleBatch | None) -> dict[str, int]:
    """How many tokens of which request a forward computes."""
    assert batch is not None
    return {item.req.key.rid: item.length for item in batch.extends}


def test_a_short_prompt_goes_beside_the_chunk() -> None:
    steps = stepping()
    steps.add(*shorts(1))
    assert extends(steps.step()) == {"long": CHUNK - 4, "short0": 4}
    assert extends(steps.step()) == {"long": CHUNK}
    steps.run()


def test_the_chunk_keeps_half_of_the_forward() -> None:
    steps = stepping()
    steps.add(*shorts(5))
    assert extends(steps.step()) == {"long": 8, "short0": 4, "short1": 4}
    assert extends(steps.step()) == {"long": 8, "short2": 4, "short3": 4}
    assert extends(steps.step()) == {"long": 12, "short4": 4}
    steps.run()


def test_a_long_prompt_that_waits_is_passed_until_it_can_begin() -> None:
    steps = stepping()
    steps.add(prompt("second", 2 * CHUNK, first=50), *shorts(9))
    for i in (0, 2, 4, 6):
        assert extends(steps.step()) == {"long": 8, f"short{i}": 4, f"short{i + 1}": 4}
    assert extends(steps.step()) == {"long": CHUNK}  # its last: short8 waits for one forward
    assert extends(steps.step()) == {"second": CHUNK - 4, "short8": 4}
    steps.run()


def test_without_a_share_prompts_go_in_order() -> None:
    steps = stepping(short_prompt_share=0.0)
    steps.add(*shorts(1))
    for _ in range(3):
        assert extends(steps.step()) == {"long": CHUNK}
    assert extends(steps.step()) == {"short0": 4}


def test_a_long_prompt_is_short_if_most_of_it_is_cached() -> None:
    steps = Stepping(overlap=False, chunked_prefill_size=CHUNK)
    steps.add(prompt("before", 40, first=50))
    steps.run()
    steps.add(prompt("long", 4 * CHUNK))
    assert extends(steps.step()) == {"long": CHUNK}
    steps.add(prompt("turn", 44, first=50))
    assert extends(steps.step()) == {"long": CHUNK - 4, "turn": 4}
    steps.run()


def test_a_prompt_of_lower_priority_takes_nothing_from_the_chunk() -> None:
    steps = Stepping(overlap=False, chunked_prefill_size=CHUNK, enable_priority_scheduling=True)
    steps.add(prompt("long", 4 * CHUNK, priority=1))
    steps.step()
    steps.add(*shorts(1))
    assert extends(steps.step()) == {"long": CHUNK}
    steps.run()


def test_a_prompt_that_has_aged_is_not_passed() -> None:
    steps = stepping(priority_aging_steps=1)
    steps.add(prompt("second", 2 * CHUNK, first=50))
    steps.step()
    steps.add(*shorts(1))
    assert extends(steps.step()) == {"long": CHUNK}
    assert extends(steps.step()) == {"long": CHUNK}
    assert extends(steps.step()) == {"second": CHUNK - 4, "short0": 4}
    steps.run()
