from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shared.config import CacheOptions
from shared.engine.build import make_ledger
from shared.kvcache.ledger import KVLedger
from shared.kvcache.windows import WindowPages
from shared.protocol.messages import ReqKey, Role, Work
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.req import Req
from shared.timeline import Timeline

MakeLedger = Callable[..., KVLedger]
MakeReq = Callable[..., Req]


def cache_prefix(ledger: KVLedger, ids: Sequence[int], extra_key: str = "") -> None:
    """As if a request with these tokens had been computed and had ended."""
    kv = ledger.admit(ledger.radix_cache.match_prefix(ids, extra_key), extra_key)
    assert kv is not None and ledger.grow(kv, len(ids))
    kv.kv_committed_len = len(ids)
    ledger.cache_finished_req(kv, ids)


@pytest.fixture
def make_kv_ledger() -> MakeLedger:
    def make(
        num_pages: int = 32, *, page_size: int = 4, num_rows: int = 8, window: int | None = None
    ) -> KVLedger:
        """With a `window`, there are two window pages for every three pages."""
        windows = window and WindowPages(num_pages + 1, num_pages * 2 // 3 + 1, window, page_size)
        return make_ledger(
            num_pages + 1, CacheOptions(page_size=page_size), num_rows, 1024, windows=windows or None
        )

    return make


@pytest.fixture
def make_req() -> MakeReq:
    count = 0

    def make(
        num_ids: int = 10,
        *,
        max_output_len: int | None = None,
        output_ids: Any = (),
        priority: int = 0,
        **params: Any,
    ) -> Req:
        """A request whose tokens nobody else has."""
        nonlocal count
        count += 1
        sampling = SamplingParams(temperature=0.0, **params)
        return Req(
            key=ReqKey("router", f"r{count}"),
            work=Work(
                tuple(1000 * count + i for i in range(num_ids)),
                sampling,
                tuple(output_ids),
                priority=priority,
            ),
            timeline=Timeline(Role.DECODE),
            max_output_len=sampling.max_new_tokens if max_output_len is None else max_output_len,
        )

    return make
