"""The types of fields that all dialects have."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, WithJsonSchema

from router.config import MAX_BATCH_SIZE
from router.http.body import FailFast, OneOf, about, one_or_more
from shared.protocol.logprobs import MAX_TOP_LOGPROBS

MAX_RID_CHARS = 256
MAX_TOKEN_ID = 2**31 - 1

TokenId = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID})]
"""`check_token_ids` checks the model's bounds. The type checks none, since a prompt may have 100,000 ids."""
TokenIds = Annotated[list[TokenId], FailFast()]
Texts = Annotated[list[str], FailFast(), Field(min_length=1, max_length=MAX_BATCH_SIZE)]
IdRows = Annotated[list[TokenIds], FailFast(), Field(min_length=1, max_length=MAX_BATCH_SIZE)]
IdPrompts = Annotated[
    list[int] | list[list[int]],
    OneOf(
        "a list of token ids, or a list of such lists",
        {"list[int]": Annotated[TokenIds, Field(min_length=1)], "list[list]": IdRows},
    ),
]
Rid = Annotated[str, Field(min_length=1, max_length=MAX_RID_CHARS)]
Rids = Annotated[
    str | list[str] | None,
    one_or_more("a string or a list of strings", "str", Rid, MAX_BATCH_SIZE),
    about("Names the request, for /abort_request; no other that runs may have the same."),
]
ReturnTimeline = Annotated[bool, about("Tell when it was in which stage, and on which node.")]
CHOSEN_HERE = "the router's to choose"
"""The error text for fields that name the nodes of a request or how they connect."""
TopNum = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
ExtraKey = Annotated[str, Field(max_length=MAX_RID_CHARS)]
MAX_PRIORITY = 1000
"""The bound on a priority and its negative. Ageing raises priorities, so this bounds how long a request waits."""
MAX_ROUTING_KEY_CHARS = 256
AddSpecialTokens = Annotated[bool, about("A text gets those that the tokenizer adds, such as the BOS.")]
Priority = Annotated[
    int,
    about(
        "Higher is served first, where the nodes have --enable-priority-scheduling.",
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
    ),
]
RoutingKey = Annotated[
    str | None,
    about(
        "Requests with one key are grouped under --schedule-policy routing-key. "
        "The header X-SMG-Routing-Key counts where this is left out.",
        max_length=MAX_ROUTING_KEY_CHARS,
    ),
]
