"""Tokens to text until a stop: the same for any cut of tokens into messages, and as a plain loop would have it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.dispatch.running_req import Aborted
from router.request.output_text import OutputText
from router.request.prompt import AnswerOptions, Prompt
from router.text.detokenizer import Vocabulary
from router.text.stops import StopConditions
from router.text.tokenizer import Tokenizer
from shared.protocol.messages import Finish, Work
from shared.protocol.sampling_params import SamplingParams
from tests.unit.router.sample_tokenizers import SPECIAL, TEXTS, sample

KINDS = ("gpt2", "llama2", "unigram")
TOKENIZERS = {kind: Tokenizer(sample(kind)) for kind in KINDS}
PROMPT = "The quick brown"
Told = tuple[list[int], str, str | None]


def prompt_of(
    kind: str,
    stop: Sequence[str] = (),
    *,
    skip: bool = True,
    keep: bool = False,
    min_new_tokens: int = 0,
) -> Prompt:
    prompt_ids = tuple(sample(kind).encode(PROMPT).ids)
    options = AnswerOptions(stop=tuple(stop), skip_special_tokens=skip, no_stop_trim=keep)
    params = SamplingParams(min_new_tokens=min_new_tokens)
    return Prompt(rid="a", work=Work(prompt_ids, params), options=options)


def output_of(kind: str, prompt: Prompt, patterns: Sequence[str] = ()) -> OutputText:
    stop = prompt.options.stop
    conditions = StopConditions(stop, patterns) if stop or patterns else None
    return OutputText(TOKENIZERS[kind], prompt, conditions)


def told(output: OutputText, pieces: Sequence[Sequence[int]], finish: Finish | Aborted) -> Told:
    shown = ""
    for at, piece in enumerate(pieces):
        shown += output.add(piece, finish if at == len(pieces) - 1 else None)
        assert output.text == shown
        if output.matched is not None:
            break
    return output.token_ids, shown, output.matched


def slowly(kind: str, prompt: Prompt, ids: Sequence[int], finish: Finish | Aborted) -> Told:
    """The specification: after each token, look for every stop in all of the text, hidden special tokens included."""
    vocabulary = Vocabulary(sample(kind))
    is_stopped = isinstance(finish, Finish) and finish.type == "stop"
    detokenizer = TOKENIZERS[kind].detokenizer(
        skip_special_tokens=prompt.options.skip_special_tokens, prompt_ids=prompt.work.input_ids
    )
    text, visible, token_ids = "", list[bool](), list[int]()
    rounds: list[int | None] = [*ids, None]
    for at, token_id in enumerate(rounds):
        num_before = len(text)
        is_end = is_stopped and at >= len(ids) - 1
        if token_id is None:
            piece = detokenizer.flush()
        else:
            token_ids.append(token_id)
            if is_end and not prompt.options.no_stop_trim:
                continue
            hidden = vocabulary.special_text(token_id) if prompt.options.skip_special_tokens else ""
            text, visible = text + hidden, visible + [False] * len(hidden)
            piece = detokenizer.feed(token_id)
        text, visible = text + piece, visible + [True] * len(piece)
        if is_end or len(token_ids) <= prompt.work.params.min_new_tokens:
            continue
        for end in range(num_before + 1, len(text) + 1):
            completed = [stop for stop in prompt.options.stop if text[:end].endswith(stop)]
            if completed:
                stop = max(completed, key=len)
                end -= 0 if prompt.options.no_stop_trim else len(stop)
                return token_ids, "".join(itertools.compress(text[:end], visible)), stop
    return token_ids, "".join(itertools.compress(text, visible)), None


@st.composite
def outputs(draw: st.DrawFn) -> tuple[str, list[int], list[str]]:
    """Tokens of one kind of tokenizer, and stops of which some are in their text, across tokens and special ones."""
    kind = draw(st.sampled_from(KINDS))
    tokenizer = sample(kind)
    chunks = st.one_of(
        st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=1, max_size=4),
        st.sampled_from(TEXTS).map(lambda text: tokenizer.encode(text, add_special_tokens=False).ids[:12]),
        st.just([tokenizer.token_to_id(SPECIAL)]),
    )
    ids = [i for chunk in draw(st.lists(chunks, min_size=1, max_size=5)) for i in chunk]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    slices = st.tuples(st.integers(0, len(text)), st.integers(1, 12)).map(lambda s: text[s[0] : s[0] + s[1]])
    stops = draw(st.lists(st.one_of(slices, st.text(min_size=1, max_size=3)), max_size=3))
    return kind, ids, [stop for stop in stops if stop]


@given(
    outputs(),
    st.lists(st.integers(0, 60), max_size=8),
    st.booleans(),
    st.booleans(),
    st.integers(0, 12),
    st.sampled_from(["length", "stop", "abort"]),
)
@settings(max_examples=400)
def test_any_cut_gives_what_the_specification_says(
    output: tuple[str, list[int], list[str]],
    cuts: list[int],
    skip: bool,
    keep: bool,
    min_new_tokens: int,
    how: str,
) -> None:
    kind, ids, stops = output
    prompt = prompt_of(kind, stops, skip=skip, keep=keep, min_new_tokens=min_new_tokens)
    finish = Aborted("off") if how == "abort" else Finish(how, ids[-1] if how == "stop" else None)
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [ids[start:end] for start, end in itertools.pairwise(edges)]
    pieces = [piece for piece in pieces if piece]
    expected = slowly(kind, prompt, ids, finish)
    assert told(output_of(kind, prompt), pieces, finish) == expected


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("skip", [True, False])
def test_a_special_token_as_a_stop_string(size: int, skip: bool) -> None:
    ids = sample("gpt2").encode("The quick").ids + [sample("gpt2").token_to_id(SPECIAL)] * 2
    pieces = [ids[at : at + size] for at in range(0, len(ids), size)]
    text = told(output_of("gpt2", prompt_of("gpt2", [SPECIAL], skip=skip)), pieces, Finish("length"))
    assert text == (ids[:-1], "The quick", SPECIAL)


def test_a_stop_that_the_last_allowed_token_completes_has_ended_it() -> None:
    ids = sample("gpt2").encode("The quick").ids
    output = output_of("gpt2", prompt_of("gpt2", ["ck"]))
    assert told(output, [ids], Finish("length")) == (ids, "The qui", "ck")


def test_a_token_that_stops_it_completes_no_stop_string() -> None:
    """As in SGLang, ids go before text: `matched` is the id."""
    ids = [*sample("gpt2").encode("The quick").ids, sample("gpt2").token_to_id(SPECIAL)]
    output = output_of("gpt2", prompt_of("gpt2", [f"k{SPECIAL}"], skip=False, keep=True))
    assert told(output, [ids], Finish("stop", ids[-1])) == (ids, f"The quick{SPECIAL}", None)


def test_patterns_and_strings_together() -> None:
    ids = sample("gpt2").encode("The quick brown fox jumps").ids
    for stops, patterns, expected in (
        (["jump"], [r"b\w+n"], ("The quick ", r"b\w+n")),
        (["row"], [r"b\w+n"], ("The quick b", "row")),
        (["never"], [r"\d"], ("The quick brown fox jumps", None)),
    ):
        output = output_of("gpt2", prompt_of("gpt2", stops), patterns)
        _, text, matched = told(output, [ids[:2], ids[2:]], Finish("length"))
        assert (text, matched) == expected
