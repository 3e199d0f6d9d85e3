"""The rids of running requests, by which duplicates are refused and requests are aborted.

with rids.claim() as claim:
    claim.take(...)              refused if a rid is in use; from here on /abort_request finds the request
    ... tokenize ...
    claim.hand_over()            from here on the GenerationGroup releases the rids, when its sequences have ended
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
    """The sequences of one prompt that were sent, and the number of others. With an `abort_message` none is sent."""

    num_unsent: int
    reqs: list[RunningReq] = field(default_factory=list)
    abort_message: str | None = None


class LiveRids:
    """Request ids of clients, from before their prompts are tokenized until their requests have ended."""

    def __init__(self) -> None:
        self._holders: dict[str, list[Claim]] = {}

    def __len__(self) -> int:
        """The number of rids in use."""
        return len(self._holders)

    def claim(self) -> Claim:
        """A claim for the rids of one request, a context."""
        return Claim(self._holders)

    def find(self, rid: str | None) -> list[Claim]:
        """The claims on this rid, of a prompt or of a whole batch; all claims for None."""
        if rid is not None:
            return list(self._holders.get(rid, ()))
        return list(dict.fromkeys(claim for holders in self._holders.values() for claim in holders))


class Claim:
    """The rids of one request: one for each prompt, and that of the batch."""

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
        """Free the rids, unless they were handed over."""
        if not self._handed_over:
            self.release()

    def take(
        self, rids: Sequence[str], num_sequences: Sequence[int], *, whole: str | None, shared: bool
    ) -> None:
        """Take the rids of all prompts, which become `num_sequences` each, and that of the `whole` batch.

        Raises RequestError, and takes none, if one is in use and they are not `shared`.
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
        """Keep the rids beyond the end of the with block, until `release`."""
        self._handed_over = True

    def release(self) -> None:
        """Free the rids. A shared one is free when all of its requests have ended. A second call has no effect."""
        for name in self._names:
            self._holders[name].remove(self)
            if not self._holders[name]:
                del self._holders[name]
        self._names = []

    def abort(self, name: str | None, message: str) -> tuple[int, list[RunningReq]]:
        """Keep the prompt of this rid from being sent, or all prompts if it is the batch's or None.

        Returns the number of sequences that will not be sent, and those that were sent, which the caller ends.
        """
        prompt = self._prompts.get(name) if name is not None else None
        num_unsent, running = 0, []
        for each in [prompt] if prompt is not None else self._prompts.values():
            if each.abort_message is None:
                num_unsent += each.num_unsent
                each.abort_message = message
            running += [req for req in each.reqs if not req.ended]
        return num_unsent, running

    def abort_message(self, rid: str) -> str | None:
        """Why the prompt `rid` must not be sent; None if it may be."""
        return self._prompts[rid].abort_message

    def sent(self, rid: str, req: RunningReq) -> None:
        """Note that a sequence of the prompt `rid` was sent, or has ended unsent."""
        prompt = self._prompts[rid]
        prompt.num_unsent -= 1
        prompt.reqs.append(req)
