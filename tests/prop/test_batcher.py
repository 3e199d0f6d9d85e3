"""One Batcher with its launcher: what each role computes, and forwards that fail."""

from __future__ import annotations

import pytest

from shared.engine.launcher import MAX_FAILED_IN_A_ROW, Launcher
from shared.engine.model_worker_batch import ModelWorkerBatch
from shared.kvcache.audit import audit_idle
from shared.protocol.messages import Finish
from shared.scheduling.req import Req
from tests.prop.stepping import Stepping, new_req, rids
from tests.token_engine import EOS, TokenResult, reference_tokens


def turn(stepping: Stepping, launcher: Launcher | None = None) -> list[Req]:
    """One turn in which requests may fail; returns those, ended."""
    outcome = (launcher or stepping.launcher).turn(stepping.batcher.plan())
    for req in outcome.failed:
        stepping.end(req)
    return list(outcome.failed)


def test_prefill_role_samples_one_token_and_never_decodes() -> None:
    stepping = Stepping(num_tokens=320, chunked_prefill_size=8, max_running_requests=4)
    req = new_req("p", list(range(30)), 9)
    req.max_output_len = 1
    stepping.add(req)
    while stepping.step() is not None or stepping.launcher.in_flight is not None:
        assert not stepping.batcher.running_batch
    assert req.ids[30:] == reference_tokens(range(30), 1)
    assert req.finish is None


@pytest.mark.parametrize("overlap", [False, True])
def test_eos_under_overlap_drops_the_step_launched_too_early(overlap: bool) -> None:
    ids = next([i, 5, 3] for i in range(5000) if len(reference_tokens([i, 5, 3], 40)) in range(3, 20))
    stepping = Stepping(num_tokens=320, overlap=overlap)
    stepping.add(new_req("e", ids, 40, ignore_eos=False))
    stepping.run()
    expected = reference_tokens(ids, 40)
    assert stepping.done["e"].finish == Finish("stop", EOS)
    # one prefill, one forward for each further token, and under overlap one forward too many
    assert stepping.engine.stream.num_forwards == len(expected) + overlap


def test_a_forward_that_raises_fails_its_own_requests_only() -> None:
    stepping = Stepping(num_tokens=320, overlap=False)
    stepping.add(new_req("a", [1, 2, 3], 5))
    stepping.engine.stream.fail_next = True
    assert [req.key.rid for req in turn(stepping)] == ["a"]
    audit_idle(stepping.ledger)
    stepping.add(new_req("b", [4, 5, 6], 5))
    stepping.run()


def test_a_mixed_chunk_stalls_no_stream() -> None:
    """Each forward with a part of a long prompt has a step of every stream, and no more tokens than a chunk."""
    stepping = Stepping(chunked_prefill_size=24, enable_mixed_chunk=True)
    for i in range(3):
        stepping.add(new_req(f"stream{i}", [i, 2, 3], 40))
    while len(stepping.batcher.running_batch) < 3:
        stepping.step()
    stepping.add(new_req("long", range(100, 400), 8))
    for _ in range(-(-300 // (24 - 3))):
        batch = stepping.step()
        assert batch is not None and batch.extends
        assert len(batch.decodes) == 3 and batch.num_tokens <= 24
    stepping.run()


class Idle:
    def wait(self) -> None: ...


def test_the_share_reserved_for_output_falls_with_each_step_and_is_whole_again_after_idling() -> None:
    """Of a pool of 1,600 tokens 70 % of 2,000 outputs are reserved at first, which leaves no room for 250 more."""
    stepping = Stepping(num_tokens=1600)
    ids = next([i, 5, 3] for i in range(5000) if len(reference_tokens([i, 5, 3], 150)) == 150)
    for idles in (0, 1):
        running, waiting = f"running{idles}", f"waiting{idles}"
        stepping.add(new_req(running, ids, 2000, ignore_eos=False))
        stepping.add(new_req(waiting, range(700 * idles, 700 * idles + 250), 1, ignore_eos=False))
        assert rids(stepping.step()) == [running]
        while waiting not in stepping.admitted_at:
            stepping.step()
            assert stepping.live[running].output_len < 140
        stepping.end(stepping.live[running])
        while stepping.step() is not None or stepping.launcher.in_flight is not None:
            pass


class RefusingStream:
    """A stream whose `submit` raises, as a CUDA forward does when it runs out of memory."""

    def submit(self, batch: ModelWorkerBatch) -> TokenResult:
        raise RuntimeError("cannot launch")

    def fence(self) -> Idle:
        return Idle()

    def close(self) -> None:
        return


def refusing(stepping: Stepping) -> Launcher:
    return Launcher(RefusingStream(), stepping.ledger, frozenset({EOS}), overlap=False)  # type: ignore[arg-type]


def test_a_forward_that_cannot_be_launched_fails_its_requests_only() -> None:
    stepping = Stepping(num_tokens=320)
    stepping.add(new_req("a", [1, 2, 3], 5))
    assert [req.key.rid for req in turn(stepping, refusing(stepping))] == ["a"]
    audit_idle(stepping.ledger)


def test_a_device_that_is_broken_ends_the_node() -> None:
    stepping = Stepping(num_tokens=320)
    launcher = refusing(stepping)
    for i in range(MAX_FAILED_IN_A_ROW - 1):
        stepping.add(new_req(f"r{i}", [1, 2, 3], 5))
        assert turn(stepping, launcher)
    stepping.add(new_req("last", [1, 2, 3], 5))
    with pytest.raises(RuntimeError, match="cannot launch"):
        turn(stepping, launcher)
