"""Before a node is ready: does an extend compute what decode steps compute? (ADR 27 says what a backend promises.)"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace

from shared.cuda_streams import synchronize
from shared.engine.cuda.batches import GREEDY, Extend, StartBatches
from shared.engine.device_share import BoundModel
from shared.engine.engine_shape import EngineShape
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.errors import ConfigError
from shared.kvcache.pools import TokenToKVPool
from shared.protocol.logprobs import LogprobParams

PARAMS = replace(GREEDY, logprobs=LogprobParams())
NUM_TOKENS = 40
NUM_DECODES = 3
MAX_MEAN_ERROR = 0.1
"""Of K and V of one token, relative to their mean size, where a backend does not promise equal bits."""


def self_test(bound: BoundModel, shape: EngineShape, batches: StartBatches) -> None:
    """Compute a sequence by two extends and decode steps, then by one extend, over pages that no request holds yet.

    Raises ConfigError when K, V or tokens differ by more than the backend promises. Clears the pages.
    """
    page_size, pool = shape.cache.page_size, bound.pool
    pools = (pool,) if isinstance(pool, TokenToKVPool) else (pool.full, pool.window)
    pages_each = min(-(-NUM_TOKENS // page_size), *((each.num_pages - 1) // 2 for each in pools))
    num_tokens = min(NUM_TOKENS, pages_each * page_size, shape.context_length)
    num_decodes = min(NUM_DECODES, num_tokens - 1) if shape.decodes else 0
    first, second = np.arange(1, 1 + 2 * pages_each).reshape(2, -1).tolist()
    ids = [(17 + 7919 * i) % shape.model.vocab_size for i in range(num_tokens - num_decodes)]
    half = len(ids) // 2
    try:
        batches.set_pages(0, first)
        if half:
            _sample(bound, batches.forward([Extend(0, 0, ids[:half])], params=PARAMS))
        sampled = [_sample(bound, batches.forward([Extend(0, half, ids[half:])], params=PARAMS))]
        sampled += [
            _sample(bound, batches.forward([], [(0, position)], PARAMS))
            for position in range(len(ids), num_tokens)
        ]
        batches.set_pages(0, second)
        all_ids = ids + [token for token, _ in sampled[:-1]]
        again = _sample(bound, batches.forward([Extend(0, 0, all_ids)], params=PARAMS))
        kv = _kv_of(pools, first, num_tokens), _kv_of(pools, second, num_tokens)
        problem = problem_with(bound.backend.is_exact, *kv, sampled[-1], again)
    finally:
        for each in pools:
            each.buffer_LSNHPD[:, :, 1 : 1 + 2 * pages_each] = 0
        synchronize(pool.device)
    if problem is not None:
        raise ConfigError(
            f"the self test on {shape.device} failed: {problem}; the weights, the device, its driver or the kernels "
            f"({bound.backend.numerics}) are broken"
        )


def _sample(bound: BoundModel, batch: ModelWorkerBatch) -> tuple[int, float]:
    """The token that the one sequence of a batch samples, and its logprob."""
    sampled = bound.stream.sample(bound.stream.submit(batch)).wait()
    return sampled.token_ids[0], sampled.logprobs[0].unpack()[0].logprob


def _kv_of(pools: Sequence[TokenToKVPool], pages: Sequence[int], num_tokens: int) -> torch.Tensor:
    """K and V of a sequence, whose window pages have the same ids, as [layers, 2, heads, tokens, head_dim]."""
    kv_LSPHTD = torch.cat([pool.buffer_LSNHPD[:, :, pages] for pool in pools])
    return kv_LSPHTD.transpose(2, 3).flatten(3, 4)[:, :, :, :num_tokens]


def problem_with(
    is_exact: bool,
    decoded: torch.Tensor,
    extended: torch.Tensor,
    sampled: tuple[int, float],
    again: tuple[int, float],
) -> str | None:
    """What is wrong with two computations of one sequence: their K and V, and what each sampled last."""
    if not (torch.isfinite(decoded).all() and torch.isfinite(extended).all()):
        return "K or V is infinite or not a number"
    if not (math.isfinite(sampled[1]) and math.isfinite(again[1])):
        return "a logprob is infinite or not a number"
    if is_exact:
        if torch.equal(decoded, extended) and sampled == again:
            return None
        return "an extend and decode steps gave different bits, which this backend promises not to do"
    decoded_T, extended_T = (kv.float().movedim(3, 0).flatten(1) for kv in (decoded, extended))
    error_T = (decoded_T - extended_T).abs().mean(1) / decoded_T.abs().mean(1)
    error = float(error_T.max())
    return (
        None if error <= MAX_MEAN_ERROR else f"K and V of an extend and of decode steps differ by {error:.0%}"
    )
