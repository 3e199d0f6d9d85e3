"""Raises the limit on open files, and so on connections, of this process."""

from __future__ import annotations

import resource

_MOST = 1 << 20
"""The default of Linux's fs.nr_open, above which setrlimit fails."""


def raise_open_files_limit() -> int:
    """Raise the soft limit of RLIMIT_NOFILE to the hard limit. Returns the number of files that may be open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
