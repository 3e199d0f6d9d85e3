"""A scheduler ends and leaves its engine as it found it: another one, of either role, goes on over the same model."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from shared.config import NodeConfig
from shared.kvcache.audit import audit_idle
from shared.protocol.messages import ReqKey, Role
from shared.protocol.sampling_params import SamplingParams
from shared.timeline import ReqStage
from tests.cluster import Cluster, small_config
from tests.token_engine import reference_tokens, token_engine

NUM_NEW = 12


def config(*, overlap: bool) -> NodeConfig:
    own = {"retract_policy": "host", "retract_every": 5, "headroom": 32}
    return small_config(tokens=240, host_tokens=64, chunk=8, context_length=96, overlap=overlap, **own)  # type: ignore[arg-type]


def submit(
    cluster: Cluster, name: str, prefill: str | None, decode: str | None, num: int = 6
) -> list[ReqKey]:
    rng = random.Random(name)
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    keys = []
    for i in range(num):
        ids = [rng.randrange(8, 900) for _ in range(rng.randint(3, 30))]
        keys.append(cluster.router.submit(f"{name}{i}", ids, params, prefill, decode))
    return keys


def stages(cluster: Cluster, name: str) -> Iterator[ReqStage]:
    return (req.timeline.stage for req in cluster.nodes[name].scheduler.reqs.values())


def check_service(cluster: Cluster, name: str, prefill: str, decode: str) -> None:
    """Requests that use both nodes end with the right tokens, and nothing is held afterwards."""
    wanted = {}
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    for i in range(8):
        ids = [100 * i + 8 + j for j in range(3 + 4 * i)]
        key = cluster.router.submit(f"{name}{i}", [id_ % 900 + 8 for id_ in ids], params, prefill, decode)
        wanted[key] = reference_tokens([id_ % 900 + 8 for id_ in ids], NUM_NEW, eos=None)
    cluster.run_all(check=True)
    assert {key: cluster.tokens(key) for key in wanted} == wanted
    cluster.assert_idle()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("role", "stage"),
    [
        (Role.PREFILL, ReqStage.QUEUED),
        (Role.PREFILL, ReqStage.PREFILLING),
        (Role.PREFILL, ReqStage.TRANSFERRING),
        (Role.DECODE, ReqStage.TRANSFERRING),
        (Role.DECODE, ReqStage.DECODING),
        (Role.DECODE, ReqStage.RETRACTED),
    ],
)
def test_the_other_role_opens_over_the_engine_of_a_closed_scheduler(
    role: Role, stage: ReqStage, overlap: bool
) -> None:
    with Cluster(2, 2, token_engine, config(overlap=overlap)) as cluster:
        flips = "p1" if role is Role.PREFILL else "d1"
        keys = submit(cluster, "before", "p1", "d1")
        cluster.run(lambda: stage in stages(cluster, flips))
        engine = cluster.stop(flips)
        audit_idle(engine.ledger)
        cluster.run(lambda: all(cluster.router.answers[key].ended for key in keys))

        if role is Role.PREFILL:
            cluster.start("d2", Role.DECODE, engine)
            check_service(cluster, "after", "p0", "d2")
            cluster.start("p2", Role.PREFILL, cluster.stop("d2"))
            check_service(cluster, "again", "p2", "d0")
        else:
            cluster.start("p2", Role.PREFILL, engine)
            check_service(cluster, "after", "p2", "d0")
            cluster.start("d2", Role.DECODE, cluster.stop("p2"))
            check_service(cluster, "again", "p0", "d2")
