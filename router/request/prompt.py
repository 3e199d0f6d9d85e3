"""One prompt of a request: the `Work` for the nodes, and the options that the router applies to its text."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import blake2b

import msgspec

from shared.errors import RequestError
from shared.protocol.messages import Work
from shared.protocol.sampling_params import MAX_SEED


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How many answers a prompt gets, where their texts end, and which parts of them are shown.

    `stop_regex_field` and `grammar_field` are the fields of the request that had the patterns and the grammar.
    """

    n: int = 1
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_regex_field: str = "stop_regex"
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    grammar_field: str | None = None


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt of a request. It becomes `options.n` sequences, and `work` is that of the first.

    `rid` is the client's or a random one, `asked_in` the field of the request that had the prompt. `split` sends the
    prompt through both fleets, however short it is.
    """

    rid: str
    work: Work
    options: AnswerOptions = field(default_factory=AnswerOptions)
    asked_in: str | None = None
    split: bool = False

    def work_of(self, choice: int) -> Work:
        """The work of choice `choice`, from 0 to n - 1, which is added to the seed."""
        params = self.work.params
        seed = (params.seed + choice) & MAX_SEED
        return msgspec.structs.replace(self.work, params=msgspec.structs.replace(params, seed=seed))

    def in_cache_of(self, owner: bytes) -> Prompt:
        """The prompt, which shares cached prefixes with prompts of the same `owner` alone; as it is if that is empty.

        `owner` is a digest of an API key. Nodes are sent a digest under it, which tells neither key nor `extra_key`.
        """
        if not owner:
            return self
        digest = blake2b(self.work.extra_key.encode(), key=owner, digest_size=16, person=b"baton-cache")
        return replace(self, work=msgspec.structs.replace(self.work, extra_key=digest.hexdigest()))

    def in_terms_of_request(self, error: RequestError) -> RequestError:
        """A node's error about the grammar names its kind; the result names the client's field instead."""
        grammar, asked_in = self.work.params.grammar, self.options.grammar_field
        if grammar is None or asked_in is None or error.param != grammar.kind:
            return error
        message = f"{asked_in}: {error.message.removeprefix(f'{grammar.kind}: ')}"
        return RequestError(message, status=error.status, param=asked_in, code=error.code)
