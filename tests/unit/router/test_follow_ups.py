"""Where a prompt goes whose beginning a decode node holds."""

from __future__ import annotations

from pathlib import Path

import httpx

from router.config import DispatchOptions
from router.dispatch.node import ASK_AFTER_PONGS
from shared.protocol.block_hash import block_hashes
from shared.protocol.messages import (
    CacheEvents,
    CacheResync,
    Decode,
    Prefill,
)
from tests.unit.router.fake_node import LAYOUT, FakeNode
from tests.unit.router.fakes import joined_pair, until_loads

SIZE = LAYOUT.page_size
IDS = [3 + i % 50 for i in range(5 * SIZE)]
SHORT = DispatchOptions(local_prefill_tokens=SIZE)


async def holds(client: httpx.AsyncClient, node: FakeNode, num_pages: int) -> None:
    blocks = tuple(block_hashes(IDS[: num_pages * SIZE], SIZE))
    node.send(CacheEvents(0, blocks, (), reset=True))
    await until_loads(client, node)


async def test_a_short_suffix_is_prefilled_where_the_prefix_is_known_to_be(model_folder: Path) -> None:
    async with joined_pair(model_folder, dispatch=SHORT) as ((prefill, decode), _, client):

        async def asked(**fields: object) -> Decode:
            body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 4}, **fields}
            assert (await client.post("/generate", json=body)).status_code == 200
            return decode.all(Decode)[-1]

        for num_pages in (3, 4):  # the last page is computed in any case, so 5 pages are no more than 4
            await holds(client, decode, num_pages)
            sent = await asked()
            alone = num_pages == 4
            assert (sent.prefill, sent.local_prefill_limit) == (
                (None, SIZE) if alone else (prefill.ref, None)
            )
        assert len(prefill.all(Prefill)) == 1
        assert (await asked(extra_key="tenant")).prefill == prefill.ref, "another tenant's prefix"

        decode.send(CacheEvents(2, (5,), ()))  # the one before is missing
        await decode.wait_for(CacheResync)
        await until_loads(client, decode)
        assert (await asked()).prefill == prefill.ref, "nothing is known until all has come"
        await holds(client, decode, 4)
        assert (await asked()).prefill is None

        decode.cache_seq = 1  # the last event is lost, which a pong tells
        for _ in range(ASK_AFTER_PONGS):
            await until_loads(client, decode)
        await decode.wait_for(CacheResync, 2)
