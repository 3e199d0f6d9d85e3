"""How many files, and so how many connections, this process may have open."""

from __future__ import annotations

import resource

from shared.log import warn

_NOT_CLIENTS = 512
"""Left for listeners, nodes (about five each), the model's files and libraries."""


def room_for(max_connections: int) -> int:
    """Raise RLIMIT_NOFILE's soft limit where that many need it; returns how many connections it then allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + _NOT_CLIENTS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    if raised >= needed:
        return max_connections
    possible = max(1, raised - _NOT_CLIENTS)
    warn("max_connections_limited", asked=max_connections, possible=possible, open_files_hard_limit=hard)
    return possible
