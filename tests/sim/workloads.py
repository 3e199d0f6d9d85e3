"""Small made-up workloads for tests, in the shape of the traces."""

from __future__ import annotations

import random
from collections.abc import Sequence

from planner.traffic.trace import SimRequest


def chats(
    rng: random.Random,
    num: int,
    *,
    gap_s: float,
    block_tokens: int,
    num_prompts: int = 3,
    prompt_blocks: tuple[int, int] = (1, 8),
    output_len: tuple[int, int] = (1, 16),
) -> list[SimRequest]:
    """`num` requests, on average `gap_s` apart, over `num_prompts` shared beginnings of four blocks each.

    The beginning is also the routing key.
    """
    at_s, own, requests = 0.0, 1000, []
    for _ in range(num):
        at_s += rng.expovariate(1 / gap_s)
        first = 10 * rng.randrange(num_prompts)
        length = rng.randint(*prompt_blocks)
        blocks = [*range(first, first + min(length, rng.randint(0, 4)))]
        blocks += range(own, own + length - len(blocks))
        own += length
        input_len = length * block_tokens - rng.randrange(block_tokens)
        requests.append(
            SimRequest(
                at_s, input_len, rng.randint(*output_len), tuple(blocks), block_tokens, f"prompt {first}"
            )
        )
    return requests


def few_shot(
    rng: random.Random,
    num: int,
    *,
    gap_s: float,
    block_tokens: int = 32,
    num_prompts: int = 24,
    shared_blocks: int = 24,
    own_blocks: int = 4,
    output_len: int = 8,
) -> list[SimRequest]:
    """`num` requests, on average `gap_s` apart, each one of `num_prompts` long examples and a question of its own."""
    at_s, own, requests = 0.0, num_prompts * shared_blocks, []
    for _ in range(num):
        at_s += rng.expovariate(1 / gap_s)
        first = rng.randrange(num_prompts) * shared_blocks
        blocks = (*range(first, first + shared_blocks), *range(own, own + own_blocks))
        own += own_blocks
        requests.append(SimRequest(at_s, len(blocks) * block_tokens, output_len, blocks, block_tokens))
    return requests


def unrelated(
    rng: random.Random,
    num: int,
    *,
    gap_s: float,
    input_lens: Sequence[int],
    output_len: int = 4,
    block_tokens: int = 32,
) -> list[SimRequest]:
    """`num` requests, on average `gap_s` apart, that share nothing. The length of each is one of `input_lens`."""
    at_s, own, requests = 0.0, 0, []
    for _ in range(num):
        at_s += rng.expovariate(1 / gap_s)
        input_len = rng.choice(input_lens)
        num_blocks = -(-input_len // block_tokens)
        blocks = tuple(range(own, own + num_blocks))
        own += num_blocks
        requests.append(SimRequest(at_s, input_len, output_len, blocks, block_tokens))
    return requests
