"""The names that clients gave to running requests: refuses duplicates, and finds what is to be aborted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.dispatch.running_req import RunningReq
from shared.errors import RequestError


@dataclass
class _Name:
    num_holders: int = 0
    reqs: list[RunningReq] = field(default_factory=list)


class LiveRids:
    """Request ids of clients, as long as their requests run."""

    def __init__(self) -> None:
        self._names: dict[str, _Name] = {}

    def claim(self, rids: Sequence[str], *, shared: bool) -> None:
        """Take all of these names, or none. Raises RequestError for one that is in use, unless they are `shared`."""
        if not shared:
            counts = Counter(rids)
            for rid in rids:
                if rid in self._names or counts[rid] > 1:
                    raise RequestError(
                        f"rid {rid!r} is the name of another request that is running", param="rid"
                    )
        for rid in rids:
            self._names.setdefault(rid, _Name()).num_holders += 1

    def running(self, rid: str, req: RunningReq) -> None:
        """A sequence of the request `rid` was dispatched."""
        self._names[rid].reqs.append(req)

    def find(self, rid: str) -> list[RunningReq]:
        """The sequences of the request `rid`, of every prompt of a batch that was named by one string."""
        found: list[RunningReq] = []
        for name, held in self._names.items():
            if name == rid or name.startswith(f"{rid}_"):
                found += held.reqs
        return found

    def all(self) -> list[RunningReq]:
        """Every sequence."""
        return [req for held in self._names.values() for req in held.reqs]

    def release(self, rids: Sequence[str]) -> None:
        """Whoever claimed these names has ended; they are free when all have."""
        for rid in rids:
            held = self._names[rid]
            held.num_holders -= 1
            held.reqs = [req for req in held.reqs if not req.ended]
            if held.num_holders == 0:
                del self._names[rid]
