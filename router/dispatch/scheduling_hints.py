"""What a client says about the order in which nodes should serve it: a priority, and a key to be grouped by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from router.http.wording import wrong

MAX_PRIORITY = 1000
"""Either way. Ageing lifts a request by one for so many forwards: a bound on priorities is one on waiting."""
MAX_ROUTING_KEY_CHARS = 256
ROUTING_KEY_HEADER = "x-smg-routing-key"
"""SGLang's name; proxies in front of a fleet set it, since they do not rewrite bodies."""

Priority = Annotated[
    int,
    Field(
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Higher is served first, where the nodes have --enable-priority-scheduling.",
    ),
]
RoutingKey = Annotated[
    str | None,
    Field(
        max_length=MAX_ROUTING_KEY_CHARS,
        description="Requests with one key are grouped under --schedule-policy routing-key. "
        "The header X-SMG-Routing-Key counts where this is left out.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class SchedulingHints:
    """Goes with a sequence to every node that works on it."""

    priority: int = 0
    routing_key: str = ""


def read_hints(priority: int, routing_key: str | None, headers: Mapping[str, str]) -> SchedulingHints:
    """The hints of a body; the header counts where the body has no key. Raises RequestError."""
    if routing_key is None:
        routing_key = headers.get(ROUTING_KEY_HEADER, "")
        if len(routing_key) > MAX_ROUTING_KEY_CHARS:
            raise wrong("routing_key", f"at most {MAX_ROUTING_KEY_CHARS} characters long", routing_key)
    return SchedulingHints(priority=priority, routing_key=routing_key)
