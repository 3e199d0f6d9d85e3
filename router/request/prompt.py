"""What a client asks of one prompt: the nodes' part of it is a `Work`, the rest is done where the text is."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from shared.errors import RequestError
from shared.protocol.messages import Work
from shared.protocol.sampling_params import MAX_SEED


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How many answers a prompt gets, where their texts end, and what of them is shown.

    `stop_regex_field` and `grammar_field` say where in the request the patterns and the grammar were.
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
    """One prompt of a request; it becomes `options.n` sequences, and `work` is that of the first.

    `rid` is the client's name for it, `asked_in` the field that held it. `split` sends it through both fleets,
    however short it is.
    """

    rid: str
    work: Work
    options: AnswerOptions = field(default_factory=AnswerOptions)
    asked_in: str | None = None
    split: bool = False

    def work_of(self, choice: int) -> Work:
        """The work of choice `choice` of n: the seeds of choices follow each other."""
        params = self.work.params
        seed = (params.seed + choice) & MAX_SEED
        return msgspec.structs.replace(self.work, params=msgspec.structs.replace(params, seed=seed))

    def in_terms_of_request(self, error: RequestError) -> RequestError:
        """A node's error about the grammar, which it knows by its kind, with the client's field in its place."""
        grammar, asked_in = self.work.params.grammar, self.options.grammar_field
        if grammar is None or asked_in is None or error.param != grammar.kind:
            return error
        message = f"{asked_in}: {error.message.removeprefix(f'{grammar.kind}: ')}"
        return RequestError(message, status=error.status, param=asked_in, code=error.code)
