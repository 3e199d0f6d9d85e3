"""The number of connections that the limit on open files allows."""

from __future__ import annotations

from shared.log import warn
from shared.open_files import raise_open_files_limit

_NOT_CLIENTS = 512
"""Files that are not clients: listeners, nodes (about five each), the model's files and libraries."""


def room_for(max_connections: int) -> int:
    """Raise the limit on open files; returns how many of `max_connections` it allows."""
    open_files = raise_open_files_limit()
    possible = max(1, open_files - _NOT_CLIENTS)
    if possible >= max_connections:
        return max_connections
    warn("max_connections_limited", asked=max_connections, possible=possible, open_files_limit=open_files)
    return possible
