"""Greedy tokens of real processes: 1P1D == 0P1D == a plain loop over transformers, in float32. In int4: 1P1D == 0P1D.

tests/golden has every model with every option, in one process. In each case here, a second router that knows the
decode node alone is the unsplit baseline. Since it flushes only that node, it also serves to leave a prefix on one
side and not on the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shared.model.config import load_model_config
from shared.protocol.messages import first_window_page
from tests.golden.references import Zoo
from tests.modelzoo import random_prompt, reference_greedy_batch
from tests.patience import until
from tests.processes import Call, Fleet, Router

pytestmark = pytest.mark.processes

NUM_NEW = 16
NUM_CONCURRENT = 12


@dataclass(frozen=True, kw_only=True)
class Case:
    """20 divides every prompt's length and 23 does not."""

    model: str
    page_size: int
    chunk: int
    overlap: bool
    retract_every: int
    is_int4: bool = False
    carried_by: str = "shm"
    """Which transport moves the pages; shm is what --kv-transfer auto comes to on one host."""

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            *("--page-size", str(self.page_size), "--chunked-prefill-size", str(self.chunk)),
            *("--retract-every", str(self.retract_every)),
            *(() if self.overlap else ("--disable-overlap-schedule",)),
            *(("--dtype", "bfloat16", "--quantization", "int4") if self.is_int4 else ()),
            *(() if self.carried_by == "shm" else ("--kv-transfer", self.carried_by)),
        )

    def __str__(self) -> str:
        overlap = "overlap" if self.overlap else "serial"
        retract = f"retract{self.retract_every}"
        model = f"{self.model}{'-int4' * self.is_int4}"
        return f"{model}-page{self.page_size}-chunk{self.chunk}-{overlap}-{retract}-{self.carried_by}"


CASES = [
    Case(model="llama", page_size=1, chunk=23, overlap=False, retract_every=5, carried_by="gloo"),
    Case(model="qwen3", page_size=16, chunk=23, overlap=True, retract_every=5),
    # Experts, and windows of 24 tokens that prefixes end within.
    Case(model="mixtral", page_size=16, chunk=23, overlap=True, retract_every=5, is_int4=True),
]


@dataclass(frozen=True, kw_only=True)
class Serving:
    """One fleet, as both routers see it."""

    case: Case
    folder: Path
    prompts: list[list[int]]
    split: Router
    unsplit: Router

    def reference(self, ids: list[int]) -> list[int]:
        """Its tokens alone (`references`)."""
        (tokens,) = self.references([ids])
        return tokens

    def references(self, prompts: list[list[int]]) -> list[list[int]]:
        """By transformers; in int4 by the decode node alone, one by one. Its cache is empty afterwards."""
        if not self.case.is_int4:
            return reference_greedy_batch(self.folder, prompts, NUM_NEW)
        tokens = [self.unsplit.generate(ids, NUM_NEW).tokens() for ids in prompts]
        self.flush(self.unsplit)
        return tokens

    def pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.case.page_size)

    def whole_pages(self, num_tokens: int) -> int:
        return num_tokens // self.case.page_size

    def sent_nbytes(self, num_tokens: int, num_pages: int) -> int:
        """Of the last `num_pages` pages of a prompt. Layers with a window send what it shows."""
        config, size = load_model_config(self.folder), self.case.page_size
        windows = [layer.attention.window or 0 for layer in config.layers]
        first = first_window_page(num_tokens, max(windows), size)
        num_seen = min(num_pages, self.pages(num_tokens) - first)
        num_units = sum(num_seen if window else num_pages for window in windows)
        return num_units * 2 * config.num_kv_heads * config.head_dim * size * (2 if self.case.is_int4 else 4)

    def split_request(self, ids: list[int], *, cached_on_prefill: int, cached_on_decode: int) -> list[int]:
        """Tokens of a request whose prefix of so many tokens is known on either side: only the rest is moved."""
        call = self.split.generate(ids, NUM_NEW, return_timeline=True)
        tokens = call.tokens()
        meta: dict[str, Any] = call.last["meta_info"]
        moved = self.pages(len(ids)) - self.whole_pages(cached_on_decode)
        assert meta["prompt_tokens"] == len(ids)
        assert meta["completion_tokens"] == NUM_NEW
        assert meta["finish_reason"] == {"type": "length", "length": NUM_NEW}
        assert meta["cached_tokens"] == self.whole_pages(cached_on_prefill) * self.case.page_size
        assert meta["kv_pages_transferred"] == moved
        assert meta["kv_bytes_transferred"] == self.sent_nbytes(len(ids), moved)
        return tokens

    def flush(self, router: Router) -> None:
        status, answer = router.get("/flush_cache?timeout=600")
        assert status == 200, answer


@pytest.mark.parametrize("case", CASES, ids=str)
def test_golden(case: Case, zoo: Zoo, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if case.is_int4:  # torch gives a row other bits in another batch
        request.getfixturevalue("native_kernels")
    folder = zoo.folder(case.model)
    logs = tmp_path / "logs"
    with (
        Fleet(
            logs,
            folder,
            flags=case.flags,
            router_flags=("--local-prefill-tokens", "0"),  # a prefix on D does not keep P out of it
        ) as fleet,
        Router(logs, "--decode", fleet.nodes["d0"].address, name="unsplit") as unsplit,
    ):
        unsplit.wait_ready()
        serving = Serving(
            case=case,
            folder=folder,
            prompts=zoo.prompts(case.model)[:NUM_CONCURRENT],
            split=fleet.router,
            unsplit=unsplit,
        )
        check_prefix_hits(serving)
        check_concurrent(serving)
        fleet.router.wait_home()
        handoffs, lent = until(lambda: links_of_both(fleet.router), "both ends of each link tell of it")
        assert handoffs == [case.carried_by]
        # The decode node has a link back if the router has asked it to lend.
        assert set(lent) <= {case.carried_by} and len(lent) <= 1
        retractions = fleet.router.loads()["d0"]["num_retractions"]
        assert retractions >= 4
        assert unsplit.stop() == 0
        unsplit.assert_clean_log()
        fleet.stop()


def links_of_both(router: Router) -> tuple[list[str], list[str]] | None:
    """Transports from P to D, and back; None while one end of a link tells of it and the other does not yet."""
    ways: dict[str, tuple[list[str], list[str]]] = {name: ([], []) for name in ("p0", "d0")}
    for name, load in router.loads().items():
        for link in load["links"]:
            ways[name][link["incoming"] is (name == "p0")].append(link["transport"])
    return ways["p0"] if ways["p0"] == ways["d0"] else None


def check_prefix_hits(serving: Serving) -> None:
    """One request at a time, its prefix known to neither node, to both, to P, to D."""
    ids, on_decode, on_prefill = serving.prompts[:3]
    expected = serving.reference(ids)
    assert serving.split_request(ids, cached_on_prefill=0, cached_on_decode=0) == expected
    assert (
        serving.split_request(ids, cached_on_prefill=len(ids) - 1, cached_on_decode=len(ids))  # all but one
        == expected
    )
    longer = [*ids, *expected, *random_prompt(10, seed=7)]
    assert serving.split_request(
        longer, cached_on_prefill=len(ids), cached_on_decode=len(ids) + NUM_NEW - 1
    ) == serving.reference(longer)

    expected = serving.reference(on_decode)
    call = serving.unsplit.generate(on_decode, NUM_NEW)
    assert call.tokens() == expected
    assert call.last["meta_info"]["cached_tokens"] == 0  # not what it finds of itself after a retraction
    assert serving.split_request(on_decode, cached_on_prefill=0, cached_on_decode=len(on_decode)) == expected

    expected = serving.reference(on_prefill)
    assert serving.split_request(on_prefill, cached_on_prefill=0, cached_on_decode=0) == expected
    serving.flush(serving.unsplit)
    assert (
        serving.split_request(on_prefill, cached_on_prefill=len(on_prefill) - 1, cached_on_decode=0)
        == expected
    )


def check_concurrent(serving: Serving) -> None:
    """All at once, every other one streamed; through both fleets, then through the decode node alone."""
    expected = serving.references(serving.prompts)
    assert len({token for output in expected for token in output}) > 60, (
        "a model that repeats itself proves nothing"
    )
    for router in (serving.split, serving.unsplit):
        serving.flush(serving.split)
        calls: list[Call] = [
            router.generate(ids, NUM_NEW, stream=n % 2 == 0) for n, ids in enumerate(serving.prompts)
        ]
        assert [call.tokens() for call in calls] == expected, router.name
