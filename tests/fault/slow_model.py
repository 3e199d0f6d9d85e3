"""A model whose KV is large and whose every stage lasts, so that a test can act in the middle of one.

A token's KV takes 24 chunks of 4096 bytes, which travel one after the other through one staging slot; a prompt is
computed three tokens at a time. A prompt of LONG tokens is prefilled for seconds, while its first pages travel. How
much is left to transfer when its first token is sampled depends on which of the two a loaded machine slows down more:
1.8 to 3.5 s of transfer, and 0.02 to 0.2 s with 150 ms more for each chunk of the prompt (2 cores). So where the
transfer itself is wanted, the prefill node has computed the prompt before, and 2.6 s or more are left.

    bootstrap      a request that runs on the decode node keeps the headroom of every other: see RESERVE
    prefilling     the prefill node has taken it from the bootstrap queue (by its load), and no token has come
    transferring   the first token has come (from the prefill node), and no second one
    decoding       more tokens have come, not all
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tests.modelzoo import IM_END_ID, make_model, random_prompt, reference_greedy
from tests.processes import Call, Fleet

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 24, 4, 128
TOKEN_NBYTES = 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * 4
POOL_TOKENS = 1600
RESERVE = 1000
"""`--num-reserved-decode-tokens`: an arrival wants this much for itself and for each that runs. Two do not fit."""
SHORT, LONG = 24, 360
LOCAL = 8
"""A prompt of this length goes to the decode node alone."""
NUM_NEW = 80

NODE_FLAGS = (
    *("--page-size", "1", "--max-total-tokens", str(POOL_TOKENS), "--chunked-prefill-size", "3"),
    *("--kv-slot-bytes", "4096", "--kv-slots", "1"),
)
DECODE_FLAGS = ("--num-reserved-decode-tokens", str(RESERVE))


class Stage(StrEnum):
    BOOTSTRAP = "bootstrap"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"


@dataclass
class SlowModel:
    """The folder, and its references by prompt."""

    folder: Path
    _greedy: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    _count: int = 0

    @classmethod
    def make(cls, folder: Path) -> SlowModel:
        return cls(
            make_model(
                folder,
                "llama",
                num_hidden_layers=NUM_LAYERS,
                num_attention_heads=NUM_KV_HEADS,
                num_key_value_heads=NUM_KV_HEADS,
                head_dim=HEAD_DIM,
                max_position_embeddings=2048,
            )
        )

    def fresh_prompt(self, length: int) -> list[int]:
        """One that no node has seen, not even its first tokens."""
        self._count += 1
        return [IM_END_ID + self._count, *random_prompt(length - 1, seed=self._count)]

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """By transformers."""
        known = self._greedy.get(tuple(ids), [])
        if len(known) < count:
            known = self._greedy[tuple(ids)] = reference_greedy(self.folder, ids, count)
        return known[:count]

    def check_next(self, fleet: Fleet, *, split: bool = True) -> None:
        """A new request is served, by both fleets unless told otherwise, and its tokens are right."""
        ids = self.fresh_prompt(SHORT)
        call = fleet.router.generate(ids, 12, return_timeline=True)
        assert call.tokens() == self.greedy(ids, 12)
        moved = call.last["meta_info"]["kv_bytes_transferred"]
        assert moved == (SHORT * TOKEN_NBYTES if split else 0)


@dataclass
class Running:
    """A request that is in `stage` now."""

    stage: Stage
    prompt: list[int]
    call: Call
    num_new: int
    blocker: Call | None = None
    """What occupies the decode node while `call` waits for pages there."""

    def hang_up(self) -> None:
        for call in (self.call, self.blocker):
            if call is not None:
                call.hang_up()


def bring_into(stage: Stage, fleet: Fleet, model: SlowModel, *, num_new: int = NUM_NEW) -> Running:
    """Send a request through p0 and d0 and return when it is in `stage`."""
    router, blocker = fleet.router, None
    if stage is Stage.BOOTSTRAP:
        blocker = router.generate(model.fresh_prompt(LOCAL), 1200, stream=True)
        blocker.wait_tokens(2)
    prompt = model.fresh_prompt(SHORT if stage is Stage.DECODING else LONG)
    if stage is Stage.TRANSFERRING:
        # Computed by p0 alone, which then offers all pages from its cache together with the first token.
        router.generate(prompt, 1).finish()
    call = router.generate(prompt, num_new, stream=True, return_timeline=True)
    match stage:
        case Stage.BOOTSTRAP:
            router.wait_load("p0", num_bootstrapping=1, num_transferring=0)
            router.wait_load("d0", num_bootstrapping=1, num_transferring=0)
        case Stage.PREFILLING:
            router.wait_load("p0", num_bootstrapping=0, num_transferring=1)
        case Stage.TRANSFERRING:
            call.wait_tokens(1)
        case Stage.DECODING:
            call.wait_tokens(3)
    running = Running(stage, prompt, call, num_new, blocker)
    assert_in_stage(running)
    return running


def assert_in_stage(running: Running) -> None:
    """What has come of the answer fits the stage: to be asked again when the request has failed in it."""
    count = len(running.call.token_ids)
    match running.stage:
        case Stage.BOOTSTRAP | Stage.PREFILLING:
            assert count == 0
        case Stage.TRANSFERRING:
            assert count == 1
        case Stage.DECODING:
            assert 3 <= count < running.num_new
