"""What a client says about the order in which nodes should serve it: a priority, and a key to be grouped by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.fields import Fields

MAX_PRIORITY = 1000
"""Either way. Ageing lifts a request by one for so many forwards: a bound on priorities is one on waiting."""
MAX_ROUTING_KEY_CHARS = 256
ROUTING_KEY_HEADER = "x-smg-routing-key"
"""SGLang's name; proxies in front of a fleet set it, since they do not rewrite bodies."""


@dataclass(frozen=True, kw_only=True)
class SchedulingHints:
    """Goes with a sequence to every node that works on it."""

    priority: int = 0
    routing_key: str = ""


def read_hints(fields: Fields, headers: Mapping[str, str]) -> SchedulingHints:
    """`priority` and `routing_key` of a body; the header counts where the body has no key. Raises RequestError."""
    if fields.raw("routing_key") is None and ROUTING_KEY_HEADER in headers:
        fields = Fields({"priority": fields.raw("priority"), "routing_key": headers[ROUTING_KEY_HEADER]})
    return SchedulingHints(
        priority=fields.integer("priority", 0, low=-MAX_PRIORITY, high=MAX_PRIORITY),
        routing_key=fields.string("routing_key", max_chars=MAX_ROUTING_KEY_CHARS) or "",
    )
