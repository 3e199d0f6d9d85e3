"""Jump-forward: text that a grammar forces is appended at once, and computed as one extend instead of step by step.

As in SGLang (Zheng et al. 2024, "Efficient Execution of Structured Language Model Programs"), but what was sampled is
never spelled anew: only tokens that come after it are appended.

Whether a request jumps, and how far, follows from its output tokens and its parameters alone, and is decided once for
each token that was sampled, when it is committed. So overlap, retraction and moving to another node change nothing.
A sampled token and those jumped over after it are told in one entry: whoever resumes a request has both or neither.
"""

from __future__ import annotations

from shared.scheduling.req import Req

MIN_TOKENS = 3
"""A shorter jump is not worth it: with overlap the step in flight is lost, so that k tokens save k - 1 forwards."""


def jump_forward(req: Req, eos_token_ids: frozenset[int]) -> None:
    """Append what the grammar of `req` forces after its newest token, which was just committed and does not end it.

    Results in flight are dropped. The KV of the appended tokens, and of the one before them, is still to be
    computed: the next step of the request takes them all (see `Batcher.jumped`).
    """
    tokens = _tokens_to_jump(req, eos_token_ids)
    if len(tokens) < MIN_TOKENS:
        return
    assert req.grammar is not None and req.kv is not None
    for token in tokens:
        if not req.grammar.accept(token):
            break  # the tokenizer does not spell the text as the grammar reads it
        req.ids.append(token)
        req.num_jumped += 1
    if req.num_jumped:
        req.drop_results_in_flight()
        req.kv.kv_allocated_len = req.kv.kv_committed_len


def _tokens_to_jump(req: Req, eos_token_ids: frozenset[int]) -> list[int]:
    params = req.params
    if req.grammar is None or params.logprobs is not None or params.logit_bias:
        return []  # logprobs come with sampling; a bias is about which spelling is chosen
    tokens = req.grammar.forced_tokens()[: params.max_new_tokens - req.output_len]
    ends = {*eos_token_ids, *params.stop_token_ids}
    return tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]
