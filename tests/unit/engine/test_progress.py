"""Layers count when they are computed, in launch order, on whichever thread they are counted."""

from __future__ import annotations

from dataclasses import dataclass

from shared.engine.progress import Progress


@dataclass
class Event:
    is_passed: bool = False
    num_queries: int = 0

    def query(self) -> bool:
        self.num_queries += 1
        return self.is_passed


def test_a_queued_layer_counts_when_it_is_computed() -> None:
    progress, events = Progress(), [Event(), Event(), Event()]
    for num_layers, event in zip((1, 1, 28), events, strict=True):
        progress.queued(num_layers, event.query)
    assert progress.count == 0
    events[0].is_passed = True
    assert progress.count == 1
    events[1].is_passed = events[2].is_passed = True
    assert progress.count == 30
    assert progress.count == 30


def test_a_device_that_hangs_stands_still_whatever_is_launched_behind() -> None:
    progress, hanging = Progress(), Event()
    progress.queued(28, hanging.query)
    for _ in range(3):
        progress.queued(28, Event(is_passed=True).query)  # it may say so: nothing overtakes on a stream
    assert progress.count == 0


def test_what_is_computed_is_let_go_though_nobody_asks() -> None:
    progress = Progress()
    first = Event(is_passed=True)
    progress.queued(5, first.query)
    for _ in range(100):
        progress.queued(5, Event(is_passed=True).query)
    assert first.num_queries == 1
    assert progress.count == 505


def test_layers_of_native_code_and_turns_count_too() -> None:
    progress = Progress()
    progress.layers[0] += 3
    progress.turns += 2
    assert progress.count == 5
