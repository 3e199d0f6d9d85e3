"""The names that clients gave to running requests: refuses duplicates, and finds what is to be aborted.

with rids.claim() as claim:
    claim.take(...)              refused if a name is in use; from here on /abort_request finds the request
    ... tokenize ...
    claim.hand_over()            from here on the GenerationGroup releases the names, when its sequences have ended
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from router.dispatch.running_req import RunningReq
from shared.errors import RequestError


@dataclass
class _Prompt:
    """The sequences of one prompt that were sent, and how many were not yet. `called_off` says why none will be."""

    num_unsent: int
    reqs: list[RunningReq] = field(default_factory=list)
    called_off: str | None = None


class LiveRids:
    """Request ids of clients, from before their prompts are tokenized until their requests have ended."""

    def __init__(self) -> None:
        self._holders: dict[str, list[Claim]] = {}

    def __len__(self) -> int:
        """Names that are in use."""
        return len(self._holders)

    def claim(self) -> Claim:
        """A claim for the names of one request, to be used in a with block."""
        return Claim(self._holders)

    def find(self, rid: str | None) -> list[Claim]:
        """The claims on this name, of a prompt or of a whole batch; all claims for None."""
        if rid is not None:
            return list(self._holders.get(rid, ()))
        return list(dict.fromkeys(claim for holders in self._holders.values() for claim in holders))


class Claim:
    """The names of one request: of each prompt, and that of the batch."""

    def __init__(self, holders: dict[str, list[Claim]]) -> None:
        self._holders = holders
        self._prompts: dict[str, _Prompt] = {}
        self._names: list[str] = []
        self._handed_over = False

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free the names, unless they were handed over."""
        if not self._handed_over:
            self.release()

    def take(
        self, rids: Sequence[str], num_sequences: Sequence[int], *, whole: str | None, shared: bool
    ) -> None:
        """Take the names of all prompts, which become so many sequences each, and that of the `whole`; or none.

        Raises RequestError for one that is in use, unless they are `shared`.
        """
        assert not self._names
        counts = Counter(rids)
        names = list(dict.fromkeys(rids if whole is None else (*rids, whole)))
        if not shared:
            for name in names:
                if name in self._holders or counts[name] > 1:
                    raise RequestError(
                        f"rid {name!r} is the name of another request that is running", param="rid"
                    )
        self._prompts = {rid: _Prompt(num) for rid, num in zip(rids, num_sequences, strict=True)}
        self._names = names
        for name in names:
            self._holders.setdefault(name, []).append(self)

    def hand_over(self) -> None:
        """Keep the names beyond the end of the with block, until `release`."""
        self._handed_over = True

    def release(self) -> None:
        """The request has ended; a shared name is free when all its requests have. A second call has no effect."""
        for name in self._names:
            self._holders[name].remove(self)
            if not self._holders[name]:
                del self._holders[name]
        self._names = []

    def call_off(self, name: str | None, message: str) -> tuple[int, list[RunningReq]]:
        """End the prompt of this name, or all if it is the batch's or None.

        Returns how many sequences will not be sent any more, and those that were, to be ended.
        """
        prompt = self._prompts.get(name) if name is not None else None
        num_unsent, running = 0, []
        for each in [prompt] if prompt is not None else self._prompts.values():
            if each.called_off is None:
                num_unsent += each.num_unsent
                each.called_off = message
            running += [req for req in each.reqs if not req.ended]
        return num_unsent, running

    def called_off(self, rid: str) -> str | None:
        """Why the prompt `rid` must not be sent; None when it may be."""
        return self._prompts[rid].called_off

    def sent(self, rid: str, req: RunningReq) -> None:
        """A sequence of the prompt `rid` was sent, or has ended unsent."""
        prompt = self._prompts[rid]
        prompt.num_unsent -= 1
        prompt.reqs.append(req)
