"""Which types each route takes and answers, for the OpenAPI document; a test holds them against real answers."""

from __future__ import annotations

from collections.abc import Mapping

from router.api.chat_bodies import ChatBody
from router.api.fleet_api import AddNode, DrainQuery
from router.api.generate_requests import GenerateBody
from router.api.live_feed import LiveEvent
from router.api.native_answers import GenerateAnswer
from router.api.openai_answers import ChatCompletion, ChatCompletionChunk, Completion, ModelCard, ModelList
from router.api.openai_bodies import CompletionBody
from router.api.openapi import Operation
from router.api.profile_api import StartProfileBody
from router.api.service_api import AbortBody, DetokenizeBody, FlushQuery, TokenizeBody
from router.dispatch.metrics import CONTENT_TYPE
from router.nodes.fleet_answers import (
    Detokenized,
    Fleet,
    Flushed,
    Health,
    ModelInfo,
    NodeAdded,
    NodeRemoved,
    RequestsAborted,
    ServerInfo,
    Tokenized,
    Traces,
)

_NATIVE, _OPENAI, _STATE, _ADMIN = "SGLang", "OpenAI", "State", "Operation"
_BODY = (400, 408, 413, 415)
_GENERATES = (*_BODY, 429, 500, 503)

_USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 1,
    "total_tokens": 6,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_CARD = {
    "id": "tiny",
    "root": "Qwen/Qwen3-0.6B",
    "max_model_len": 40960,
    "object": "model",
    "created": 0,
    "owned_by": "baton",
}
_MEMBER = {
    "node_id": "decode-0",
    "address": "tcp://10.0.0.2:7200",
    "state": "alive",
    "incarnation": "4f2a",
    "num_running_reqs": 3,
    "num_queue_reqs": 0,
}
_HEALTH = {"status": "ok", "model": "tiny", "prefill": [], "decode": [_MEMBER]}
_MODEL_INFO = {
    "model_path": "Qwen/Qwen3-0.6B",
    "tokenizer_path": "/models/qwen3",
    "served_model_name": "tiny",
    "weight_version": "default",
    "vocab_size": 151936,
    "context_length": 40960,
    "max_model_len": 40960,
    "has_chat_template": True,
    "is_generation": True,
}

_GENERATE = Operation(
    tag=_NATIVE,
    body=GenerateBody,
    answer=GenerateAnswer | list[GenerateAnswer],
    event=GenerateAnswer,
    errors=_GENERATES,
    example={
        "text": " Paris",
        "output_ids": [12095],
        "meta_info": {
            "id": "0d9c",
            "finish_reason": {"type": "length", "length": 1},
            "prompt_tokens": 5,
            "completion_tokens": 1,
            "cached_tokens": 0,
            "weight_version": "default",
            "e2e_latency": 0.05,
        },
    },
)
_MODEL = Operation(tag=_STATE, answer=ModelInfo, errors=(503,), example=_MODEL_INFO)
_SERVER = Operation(tag=_STATE, answer=ServerInfo, errors=(503,))
_FLUSH = Operation(
    tag=_ADMIN,
    query={"timeout": {"schema": FlushQuery.model_json_schema()["properties"]["timeout"]}},
    answer=Flushed,
    errors=(400,),
    example={"success": True, "message": "Cache flushed.", "nodes": ["decode-0", "prefill-0"]},
)

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/generate"): _GENERATE,
    ("PUT", "/generate"): _GENERATE,
    ("POST", "/v1/completions"): Operation(
        tag=_OPENAI,
        body=CompletionBody,
        answer=Completion,
        event=Completion,
        errors=(*_GENERATES, 404),
        example={
            "id": "cmpl-0d9c",
            "object": "text_completion",
            "created": 1760000000,
            "model": "tiny",
            "choices": [
                {
                    "index": 0,
                    "text": " Paris",
                    "logprobs": None,
                    "finish_reason": "length",
                    "matched_stop": None,
                }
            ],
            "usage": _USAGE,
        },
    ),
    ("POST", "/v1/chat/completions"): Operation(
        tag=_OPENAI,
        body=ChatBody,
        answer=ChatCompletion,
        event=ChatCompletionChunk,
        errors=(*_GENERATES, 404),
        example={
            "id": "chatcmpl-0d9c",
            "object": "chat.completion",
            "created": 1760000000,
            "model": "tiny",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Paris", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "length",
                    "matched_stop": None,
                }
            ],
            "usage": _USAGE,
        },
    ),
    ("GET", "/v1/models"): Operation(
        tag=_OPENAI, answer=ModelList, errors=(503,), example={"object": "list", "data": [_CARD]}
    ),
    ("GET", "/v1/models/{model_id}"): Operation(
        tag=_OPENAI, answer=ModelCard, errors=(404, 503), example=_CARD
    ),
    ("GET", "/health"): Operation(
        tag=_STATE, answer=Health, also={503: Health}, needs_key=False, example=_HEALTH
    ),
    ("GET", "/health_generate"): Operation(
        tag=_STATE, answer=Health, errors=(429, 500, 503), example={**_HEALTH, "generated_in_s": 0.02}
    ),
    ("GET", "/model_info"): _MODEL,
    ("GET", "/get_model_info"): _MODEL,
    ("GET", "/server_info"): _SERVER,
    ("GET", "/get_server_info"): _SERVER,
    ("GET", "/metrics"): Operation(tag=_STATE, answer=CONTENT_TYPE),
    ("GET", "/live"): Operation(tag=_STATE, answer=None, event=LiveEvent),
    ("GET", "/live/state"): Operation(tag=_STATE, answer=LiveEvent),
    ("POST", "/tokenize"): Operation(
        tag=_NATIVE,
        body=TokenizeBody,
        answer=Tokenized,
        errors=(*_BODY, 503),
        example={"tokens": [785, 6722], "count": 2, "max_model_len": 40960},
    ),
    ("POST", "/detokenize"): Operation(
        tag=_NATIVE,
        body=DetokenizeBody,
        answer=Detokenized,
        errors=(*_BODY, 503),
        example={"text": "The capital"},
    ),
    ("GET", "/flush_cache"): _FLUSH,
    ("POST", "/flush_cache"): _FLUSH,
    ("POST", "/abort_request"): Operation(
        tag=_ADMIN,
        body=AbortBody,
        answer=RequestsAborted,
        errors=_BODY,
        example={"success": True, "aborted": 1},
    ),
    ("POST", "/start_profile"): Operation(
        tag=_ADMIN,
        body=StartProfileBody,
        body_required=False,
        answer=Traces,
        errors=(*_BODY, 503),
        example={"success": True, "traces": {"decode-0": "/tmp/trace.json"}},
    ),
    ("POST", "/stop_profile"): Operation(
        tag=_ADMIN,
        answer=Traces,
        errors=(400, 503),
        example={"success": True, "traces": {"decode-0": "/tmp/trace.json"}},
    ),
    ("GET", "/fleet"): Operation(
        tag=_ADMIN,
        answer=Fleet,
        errors=(403,),
    ),
    ("POST", "/fleet/nodes"): Operation(
        tag=_ADMIN,
        body=AddNode,
        answer=NodeAdded,
        errors=(*_BODY, 403),
    ),
    ("DELETE", "/fleet/nodes/{node_id}"): Operation(
        tag=_ADMIN,
        query={
            "drain_timeout_s": {"schema": DrainQuery.model_json_schema()["properties"]["drain_timeout_s"]}
        },
        answer=NodeRemoved,
        errors=(400, 403, 404),
        example={
            "success": True,
            "node_id": "decode-0",
            "address": "tcp://10.0.0.2:7200",
            "num_ended_requests": 0,
        },
    ),
}
