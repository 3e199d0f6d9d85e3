"""How many files, and so how many connections, this process may have open."""

from __future__ import annotations

import resource

_MOST = 1 << 20
"""Systems refuse more, or allow it without a limit."""


def raise_open_files_limit() -> int:
    """Raise RLIMIT_NOFILE's soft limit to the hard one; returns how many files may be open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
