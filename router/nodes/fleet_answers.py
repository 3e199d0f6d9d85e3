"""The answers of the routes about the fleets, the model and the router itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from router.http.answer import Answer
from router.nodes.member import MemberState
from shared.protocol.messages import Role

NumTokens = Annotated[int, Meta(description="Tokens.")]


Fields = Annotated[dict[str, Any], Meta(description="As nodes tell them: see shared/protocol/messages.py.")]
State = Annotated[str, Meta(extra_json_schema={"enum": [*map(str, MemberState), "loading"]})]
Status = Annotated[
    str, Meta(extra_json_schema={"enum": ["ok", "degraded", "starting", "unavailable", "stopping"]})
]


class FleetNode(Answer, kw_only=True, frozen=True):
    """A node at this router; of one that loads, `what` it loads, and the `fraction` that is loaded.

    /fleet tells `pinned` and, once the node has told it, the `load`; /server_info tells `limits` and `flags`.
    """

    node_id: Annotated[str | None, Meta(description="Null until the node has answered.")]
    role: Role
    state: State
    address: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    incarnation: str | UnsetType = UNSET
    num_running_reqs: int | UnsetType = UNSET
    num_queue_reqs: int | UnsetType = UNSET
    what: str | UnsetType = UNSET
    fraction: float | UnsetType = UNSET
    pinned: Annotated[
        bool | UnsetType, Meta(description="Named by the operator, and so never forgotten.")
    ] = UNSET
    load: Fields | UnsetType = UNSET
    limits: Fields | UnsetType = UNSET
    flags: dict[str, str | int | float | bool | None] | UnsetType = UNSET


class Fleet(Answer, kw_only=True, frozen=True):
    """Every node that is dialled."""

    nodes: list[FleetNode]


class NodeReady(Answer, kw_only=True, frozen=True):
    """The node that was added, or that has changed its role."""

    node: FleetNode
    success: bool = True


class NodeRemoved(Answer, kw_only=True, frozen=True):
    """The node that was removed from this router."""

    node_id: str | None
    address: str
    num_failed_over: Annotated[
        int, Meta(description="Sequences that were sent to other nodes when the time was up.")
    ]
    success: bool = True


class Health(Answer, kw_only=True, frozen=True):
    """The state of each fleet."""

    status: Status
    model: Annotated[str, Meta(description="Its name; empty before it is known.")]
    prefill: list[FleetNode]
    decode: list[FleetNode]
    reason: Annotated[str | UnsetType, Meta(description="Why it is not ok.")] = UNSET
    generated_in_s: Annotated[float | UnsetType, Meta(description="Of /health_generate.")] = UNSET


class ModelInfo(Answer, kw_only=True, frozen=True):
    """The model that is served."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    vocab_size: int
    weight_version: str
    context_length: Annotated[
        int, Meta(description="Tokens of prompt and output that every decode node takes.")
    ]
    max_model_len: Annotated[int, Meta(description="The same.")]
    has_chat_template: bool
    is_generation: bool = True


class ServerInfo(Answer, kw_only=True, frozen=True, forbid_unknown_fields=False):
    """Sizes, and each connected node. The router's own flags are here too, each under its name."""

    version: str
    status: Status
    model_path: str
    served_model_name: str
    context_length: NumTokens
    max_model_len: NumTokens
    page_size: Annotated[int | None, Meta(description="Tokens in a page; null while no node is connected.")]
    dtype: str | None
    quantization: Annotated[
        str | None,
        Meta(description="Bits of weights and activations, and where they come from; null: not quantized."),
    ]
    kv_cache_dtype: Annotated[str | None, Meta(description="The type of KV pages.")]
    max_total_num_tokens: Annotated[int, Meta(description="Tokens in the smallest KV pool of a decode node.")]
    max_running_requests: int
    tool_call_parser: Annotated[str, Meta(description="The family whose calls of tools are read, or none.")]
    reasoning_parser: Annotated[str, Meta(description="think: reasoning is told apart; or none.")]
    internal_states: list[Fields]
    nodes: list[FleetNode]


class Tokenized(Answer, kw_only=True, frozen=True):
    """Token ids; of a list of texts, a list of them."""

    tokens: Sequence[int | Sequence[int]]
    count: int | list[int]
    max_model_len: NumTokens


class Detokenized(Answer, kw_only=True, frozen=True):
    """Text; of a list of rows, a list of texts."""

    text: str | list[str]


class Flushed(Answer, kw_only=True, frozen=True):
    """The nodes whose RadixCache was emptied."""

    message: str
    nodes: list[str]
    success: bool = True


class RequestsAborted(Answer, kw_only=True, frozen=True):
    """The number of aborted sequences. 0 is no error."""

    aborted: Annotated[int, Meta(description="Aborted sequences of the router that answers.")]
    success: bool = True


class Traces(Answer, kw_only=True, frozen=True):
    """Where each node writes its trace, on its own disk."""

    traces: dict[str, str]
    success: bool = True
