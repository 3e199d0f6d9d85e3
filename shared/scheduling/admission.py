"""What a node refuses outright, whoever sent it: the last line behind the router's own checks."""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import RequestError
from shared.protocol.messages import Decode, NodeLimits, Prefill
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.req import Req
from shared.timeline import Role, Timeline


def accept(message: Prefill | Decode, limits: NodeLimits, vocab_size: int) -> Req:
    """The request that a router's message describes. Raises RequestError when it can never be served here.

    A prefill node samples one token of it, a decode node all that are wanted.
    """
    check_prompt(message.input_ids, message.output_ids, message.params, limits, vocab_size)
    is_prefill = isinstance(message, Prefill)
    wanted = message.params.max_new_tokens
    return Req(
        key=message.key,
        ids=[*message.input_ids, *message.output_ids],
        num_input_ids=len(message.input_ids),
        params=message.params,
        timeline=Timeline(Role.PREFILL if is_prefill else Role.DECODE),
        max_output_len=min(wanted, len(message.output_ids) + 1) if is_prefill else wanted,
        num_sampled=len(message.output_ids),
        extra_key=message.extra_key,
    )


def check_prompt(
    input_ids: Sequence[int],
    output_ids: Sequence[int],
    params: SamplingParams,
    limits: NodeLimits,
    vocab_size: int,
) -> None:
    """Raise RequestError when the sequence can never be served here: then no retraction could make room for it."""
    if not input_ids:
        raise RequestError("input_ids: the prompt is empty", param="input_ids")
    worst = next((i for i in (*input_ids, *output_ids) if not 0 <= i < vocab_size), None)
    if worst is not None:
        raise RequestError(
            f"input_ids: token id {worst} is not between 0 and {vocab_size - 1}", param="input_ids"
        )
    most = min(limits.context_length, limits.max_total_num_tokens)
    total = len(input_ids) + max(params.max_new_tokens, len(output_ids))
    if total > most:
        raise RequestError(
            f"the prompt of {len(input_ids)} tokens and max_new_tokens {params.max_new_tokens} make {total}; "
            f"context_length {limits.context_length} and max_total_num_tokens {limits.max_total_num_tokens} "
            f"leave room for {most}",
            param="max_new_tokens",
        )
    bad = next((i for i in params.stop_token_ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise RequestError(
            f"stop_token_ids: token id {bad} is not between 0 and {vocab_size - 1}", param="stop_token_ids"
        )
