"""The names that clients gave to running requests: refuses duplicates, and finds what is to be aborted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from router.running_req import RunningReq
from shared.errors import RequestError


class LiveRids:
    """Request ids of clients, as long as their requests run."""

    def __init__(self) -> None:
        self._reqs: dict[str, list[RunningReq]] = {}

    def claim(self, rids: Sequence[str]) -> None:
        """Take all of these names, or none. Raises RequestError for one that is in use."""
        counts = Counter(rids)
        for rid in rids:
            if rid in self._reqs or counts[rid] > 1:
                raise RequestError(f"rid {rid!r} is the name of another request that is running", param="rid")
        for rid in rids:
            self._reqs[rid] = []

    def running(self, rid: str, req: RunningReq) -> None:
        """A sequence of the request `rid` was dispatched."""
        self._reqs[rid].append(req)

    def find(self, rid: str) -> list[RunningReq]:
        """The sequences of the request `rid`, of every prompt of a batch that was named by one string."""
        found: list[RunningReq] = []
        for name, reqs in self._reqs.items():
            if name == rid or name.startswith(f"{rid}_"):
                found += reqs
        return found

    def all(self) -> list[RunningReq]:
        """Every sequence."""
        return [req for reqs in self._reqs.values() for req in reqs]

    def release(self, rids: Sequence[str]) -> None:
        """These names are free again."""
        for rid in rids:
            self._reqs.pop(rid, None)
