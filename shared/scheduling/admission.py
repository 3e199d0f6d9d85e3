"""What a node refuses outright, whoever sent it: the last line behind the router's own checks."""

from __future__ import annotations

from shared.errors import RequestError
from shared.protocol.messages import Decode, NodeLimits, Prefill
from shared.scheduling.req import Req
from shared.timeline import Role, Timeline

MAX_TOP_K = 2**31 - 1


def accept(message: Prefill | Decode, limits: NodeLimits, vocab_size: int) -> Req:
    """The request that a router's message describes. Raises RequestError when it can never be served here.

    A prefill node samples one token of it, a decode node all that are wanted.
    """
    is_prefill = isinstance(message, Prefill)
    wanted = message.params.max_new_tokens
    max_output_len = min(wanted, len(message.output_ids) + 1) if is_prefill else wanted
    check_request(message, max_output_len, limits, vocab_size)
    return Req(
        key=message.key,
        ids=[*message.input_ids, *message.output_ids],
        num_input_ids=len(message.input_ids),
        params=message.params,
        timeline=Timeline(Role.PREFILL if is_prefill else Role.DECODE),
        max_output_len=max_output_len,
        num_sampled=len(message.output_ids),
        extra_key=message.extra_key,
    )


def check_request(
    message: Prefill | Decode, max_output_len: int, limits: NodeLimits, vocab_size: int
) -> None:
    """Raise RequestError when the sequence can never be served here: then no retraction could make room for it.

    Only `max_output_len` output tokens will be computed on this node.
    """
    input_ids, output_ids, params = message.input_ids, message.output_ids, message.params
    if not input_ids:
        raise RequestError("input_ids: the prompt is empty", param="input_ids")
    worst = next((i for i in (*input_ids, *output_ids) if not 0 <= i < vocab_size), None)
    if worst is not None:
        raise RequestError(
            f"input_ids: token id {worst} is not between 0 and {vocab_size - 1}", param="input_ids"
        )
    most = min(limits.context_length, limits.max_total_num_tokens)
    total = len(input_ids) + max(max_output_len, len(output_ids))
    if total > most:
        raise RequestError(
            f"the prompt of {len(input_ids)} tokens and {max_output_len} of output make {total}; "
            f"context_length {limits.context_length} and max_total_num_tokens {limits.max_total_num_tokens} "
            f"leave room for {most}",
            param="max_new_tokens",
        )
    bad = next((i for i in params.stop_token_ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise RequestError(
            f"stop_token_ids: token id {bad} is not between 0 and {vocab_size - 1}", param="stop_token_ids"
        )
    if not -1 <= params.top_k <= MAX_TOP_K:
        raise RequestError(f"top_k: {params.top_k} is not between -1 and {MAX_TOP_K}", param="top_k")
