"""What must hold of every forward, checked on the host when it is launched; on in tests (--debug-checks).

A wrong read of the FutureMap gives a plausible token, not an error. A record of what each slot holds shows it.
Likewise a plan that waits for the device gives right tokens, only later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.kvcache.windows import WindowPages
from shared.protocol.messages import ReqKey
from shared.scheduling.plan import ScheduleBatch, ScheduledReq


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The slot holds what a launched forward samples for this position."""

    key: ReqKey
    generation: int
    position: int


@dataclass(frozen=True, slots=True)
class _Written:
    """The slot holds this token, which the host wrote: it came from a prefill node, or was jumped over."""

    token_id: int


class _NoTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Any operation on a tensor may wait for the device; here, on this thread, there is none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} while planning: it may wait for the device")


class LaunchChecks:
    """Follows every slot of the FutureMap in launch order. Raises AssertionError."""

    def __init__(self) -> None:
        self._slots: dict[int, _Sampled | _Written] = {}
        self._is_planning = False

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Around a decision: no tensor is touched in it, and no result waited for."""
        self._is_planning = True
        try:
            with _NoTensors():  # type: ignore[no-untyped-call]
                yield
        finally:
            self._is_planning = False

    def waiting(self) -> None:
        """Call before the scheduler waits for the device."""
        assert not self._is_planning, "the plan waits for the device"

    def launching(self, batch: ScheduleBatch, inputs: ModelWorkerBatch) -> None:
        """Call once for each forward, in launch order, before it is launched."""
        check_complete(batch, inputs)
        for row, token in inputs.future_writes:
            self._slots[row] = _Written(token)
        for item in batch.decodes:
            self._check_read(item)
        for item in batch.items:
            if item.position is not None:
                self._slots[_row(item)] = _Sampled(item.req.key, item.generation, item.position)

    def _check_read(self, item: ScheduledReq) -> None:
        """`item` reads the token before the one that it samples."""
        req, found = item.req, self._slots.get(_row(item))
        assert item.position is not None, f"{req.key}: a decode step that samples nothing"
        if isinstance(found, _Written):
            at = req.num_input_ids + item.position - 1
            assert found.token_id == req.ids[at], f"{req.key}: reads the token of another request"
            return
        expected = _Sampled(req.key, item.generation, item.position - 1)
        assert found == expected, f"{req.key}: reads {found}, not {expected}"


def check_complete(batch: ScheduleBatch, inputs: ModelWorkerBatch) -> None:
    """Every field of the snapshot is there, and all agree on how many sequences and tokens there are."""
    num_seqs, num_samples = len(batch.items), sum(item.position is not None for item in batch.items)
    assert num_seqs > 0, "an empty batch"
    assert all(item.length > 0 for item in batch.items), "a sequence without a new token"
    of_draws: list[int] = []
    if inputs.sampling.draws is not None:
        inputs.sampling.draws.map(lambda values_S: of_draws.append(len(values_S)))
    lengths: Mapping[str, tuple[int, int]] = {
        "rows_B": (len(inputs.rows_B), num_seqs),
        "distinct rows": (len(set(inputs.rows_B.tolist())), num_seqs),
        "starts_B": (len(inputs.starts_B), num_seqs),
        "lengths_B": (int(inputs.lengths_B.sum()), batch.num_tokens),
        "page_table_BP": (len(inputs.page_table_BP), num_seqs),
        "input_ids": (len(inputs.input_ids), sum(item.length for item in batch.extends)),
        "num_decodes": (inputs.num_decodes, len(batch.decodes)),
        "sampled_B": (len(inputs.sampled_B), num_samples),
        **{f"draws {i}": (length, num_samples) for i, length in enumerate(of_draws)},
    }
    wrong = {name: pair for name, pair in lengths.items() if pair[0] != pair[1]}
    assert not wrong, f"found and expected lengths of {wrong}"


def check_windows(inputs: ModelWorkerBatch, windows: WindowPages | None) -> None:
    """Every token that a new token sees through its window has a window page."""
    if windows is None:
        return
    assert inputs.window_table_BP is not None
    for b, (start, length) in enumerate(
        zip(inputs.starts_B.tolist(), inputs.lengths_B.tolist(), strict=True)
    ):
        first, last = windows.first_page(start), -(-(start + length) // windows.page_size)
        seen_P = inputs.window_table_BP[b, first:last]
        assert seen_P.all(), f"sequence {b} sees pages {first} to {last} through its window, and has {seen_P}"


def _row(item: ScheduledReq) -> int:
    assert item.req.kv is not None
    return item.req.kv.row
