"""A Work as a later release may have it, every field of which says something."""

from __future__ import annotations

from typing import Any

import msgspec

from shared.protocol.messages import Work
from shared.protocol.sampling_params import SamplingParams


class LaterWork(Work, frozen=True):
    """Has a field more."""

    later: str = ""


def later_work(ids: tuple[int, ...], params: SamplingParams) -> LaterWork:
    """The Work of a prompt, in which no field but `output_ids` has its default: the first attempt has none."""
    said = {"extra_key": "tenant", "priority": 3, "routing_key": "group", "rid": "client's", "later": "new"}
    work = LaterWork(ids, params, **said)  # type: ignore[arg-type]
    for field in msgspec.structs.fields(LaterWork):
        is_said = field.required or getattr(work, field.name) != field.default
        assert is_said or field.name == "output_ids", f"{field.name} is to be given a value here"
    return work


def assert_kept(work: Work, before: Work, **changed: Any) -> None:
    """Everything but what is `changed` is as it was."""
    assert type(work) is type(before) and msgspec.structs.asdict(work) == {
        **msgspec.structs.asdict(before),
        **changed,
    }
