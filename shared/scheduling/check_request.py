"""Requests that a node refuses, whatever the router has checked before."""

from __future__ import annotations

import time

from shared.errors import RequestError
from shared.protocol.logprobs import (
    MAX_INPUT_LOGPROBS,
    MAX_TOKEN_IDS_LOGPROB,
    MAX_TOP_LOGPROBS,
    OUTPUTS_ONLY,
    LogprobParams,
)
from shared.protocol.messages import Decode, NodeLimits, Prefill, Work
from shared.protocol.sampling_params import MAX_LOGIT_BIAS, MAX_PENALTY, SamplingParams
from shared.scheduling.req import Req
from shared.timeline import Clock, Role, Timeline

MAX_TOP_K = 2**31 - 1


def accept(
    message: Prefill | Decode, limits: NodeLimits, vocab_size: int, stamp_clock: Clock = time.time
) -> Req:
    """The request that a router's message describes. Raises RequestError when it can never be served here.

    A prefill node samples one token of it, a decode node all that are wanted. `stamp_clock` times its stages.
    """
    is_prefill = isinstance(message, Prefill)
    work = message.work
    wanted = work.params.max_new_tokens
    max_output_len = min(wanted, len(work.output_ids) + 1) if is_prefill else wanted
    check_request(work, max_output_len, limits, vocab_size)
    timeline = Timeline(Role.PREFILL if is_prefill else Role.DECODE, clock=stamp_clock)
    return Req(message.key, work, timeline, max_output_len, evict_first=message.evict_first)


def check_request(work: Work, max_output_len: int, limits: NodeLimits, vocab_size: int) -> None:
    """Raise RequestError when the sequence can never be served here: then no retraction could make room for it.

    Only `max_output_len` output tokens will be computed on this node.
    """
    input_ids, output_ids, params = work.input_ids, work.output_ids, work.params
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
    _check_penalties(params, vocab_size)
    if params.logprobs is not None:
        _check_logprobs(params.logprobs, len(input_ids), vocab_size)


def _check_penalties(params: SamplingParams, vocab_size: int) -> None:
    for name, penalty, low in (
        ("frequency_penalty", params.frequency_penalty, -MAX_PENALTY),
        ("presence_penalty", params.presence_penalty, -MAX_PENALTY),
        ("repetition_penalty", params.repetition_penalty, 0.0),
    ):
        if not low <= penalty <= MAX_PENALTY or (name == "repetition_penalty" and penalty == 0.0):
            raise RequestError(f"{name}: {penalty} is not between {low:g} and {MAX_PENALTY:g}", param=name)
    for entry in params.logit_bias:
        if not (0 <= entry.token_id < vocab_size and abs(entry.bias) <= MAX_LOGIT_BIAS):
            raise RequestError(
                f"logit_bias: {entry.bias} for token id {entry.token_id}; ids are between 0 and {vocab_size - 1}, "
                f"biases between -{MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}",
                param="logit_bias",
            )


def _check_logprobs(wanted: LogprobParams, num_input_ids: int, vocab_size: int) -> None:
    if not OUTPUTS_ONLY <= wanted.start_len < num_input_ids:
        raise RequestError(
            f"logprob_start_len: {wanted.start_len} is not between -1 and {num_input_ids - 1}, the last of "
            f"{num_input_ids} prompt tokens",
            param="logprob_start_len",
        )
    if not 0 <= wanted.top_num <= MAX_TOP_LOGPROBS:
        raise RequestError(
            f"top_logprobs_num: {wanted.top_num} is not between 0 and {MAX_TOP_LOGPROBS}",
            param="top_logprobs_num",
        )
    if len(wanted.token_ids) > MAX_TOKEN_IDS_LOGPROB or not all(
        0 <= i < vocab_size for i in wanted.token_ids
    ):
        raise RequestError(
            f"token_ids_logprob: at most {MAX_TOKEN_IDS_LOGPROB} ids between 0 and {vocab_size - 1}",
            param="token_ids_logprob",
        )
    num_logprobs = wanted.num_input_logprobs(num_input_ids)
    if num_logprobs > MAX_INPUT_LOGPROBS:
        raise RequestError(
            f"logprob_start_len {wanted.start_len}, top_logprobs_num {wanted.top_num} and {len(wanted.token_ids)} "
            f"token_ids_logprob ask for {num_logprobs} numbers about {num_input_ids} prompt tokens; at most "
            f"{MAX_INPUT_LOGPROBS}",
            param="logprob_start_len",
        )
