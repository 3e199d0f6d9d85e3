"""Scripts of nodes that tell logprobs where a request asks for them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from shared.protocol.logprobs import LogprobParams, Logprobs
from shared.protocol.messages import Decode, Finish, Prefill, ReqReport, TokenEntry, Tokens
from tests.unit.router.fake_node import FakeNode, tell_first_token, tell_story


def value(position: int, rank: int = 0) -> float:
    """A logprob that names its position, exact in float32; prompt positions are negative."""
    return -1.0 - position / 64 - rank / 8


def packed(positions: Sequence[int], wanted: LogprobParams) -> Logprobs:
    """Top tokens are ids 100, 101, .. at every position."""
    top = [(value(p, rank), 100 + rank) for p in positions for rank in range(wanted.top_num)]
    of_ids = [value(p, 20 + i) for p in positions for i in range(len(wanted.token_ids))]
    return Logprobs(
        struct.pack(f"<{len(positions)}f", *map(value, positions)),
        struct.pack(f"<{len(top)}i", *(i for _, i in top)),
        struct.pack(f"<{len(top)}f", *(x for x, _ in top)),
        struct.pack(f"<{len(of_ids)}f", *of_ids),
    )


def entry(
    node: FakeNode, message: Prefill | Decode, position: int, finish: Finish | None = None
) -> TokenEntry:
    wanted = message.work.params.logprobs
    assert wanted is not None
    of_prompt = None
    if position == 0 and wanted.start_len >= 0:
        of_prompt = packed(
            [i - 1000 for i in range(wanted.start_len + 1, len(message.work.input_ids))], wanted
        )
    told = position < message.work.params.max_new_tokens
    return TokenEntry(
        message.key,
        position,
        (node.story[position % len(node.story)],) if told else (),
        finish,
        ReqReport(),
        packed([position], wanted) if told else None,
        of_prompt,
    )


async def scored_first_token(node: FakeNode, message: Prefill | Decode) -> None:
    """A script."""
    if message.work.params.logprobs is None:
        await tell_first_token(node, message)
        return
    finish = Finish("length") if message.work.params.max_new_tokens <= 1 else None
    node.send(Tokens((entry(node, message, 0, finish),)))


async def scored_story(node: FakeNode, message: Prefill | Decode) -> None:
    """A script."""
    if message.work.params.logprobs is None:
        await tell_story(node, message)
        return
    last = message.work.params.max_new_tokens - 1
    for position in range(last + 1):
        node.send(Tokens((entry(node, message, position, Finish("length") if position == last else None),)))
