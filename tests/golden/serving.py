"""Starts 1P1D or 0P1D of real engines over the fake network, and runs requests through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from shared.config import CacheOptions, ModelOptions, NodeConfig, ScheduleOptions
from shared.cpu_cores import CpuCores
from shared.engine.build import Engine, build_engine
from shared.protocol.messages import ReqKey
from shared.protocol.sampling_params import SamplingParams
from shared.scheduling.commit import Outcome
from shared.scheduling.plan import Plan, ScheduleBatch
from tests.cluster import Cluster, MakeEngine

GREEDY = SamplingParams(max_new_tokens=32, temperature=0.0, ignore_eos=True)


def real_engine(config: NodeConfig) -> Engine:
    return build_engine(config, lambda what, fraction: None)


def node_config(
    folder: Path,
    *,
    page_size: int = 16,
    chunk: int = 20,
    overlap: bool = True,
    retract_every: int = 0,
    max_total_tokens: int = 4096,
    disable_radix_cache: bool = False,
    host_kv_tokens: int = 0,
    **schedule: float,
) -> NodeConfig:
    return NodeConfig(
        model=ModelOptions(model=str(folder), dtype="float32", device="cpu", cpu_cores=CpuCores(1)),
        cache=CacheOptions(
            page_size=page_size,
            max_total_tokens=max_total_tokens,
            disable_radix_cache=disable_radix_cache,
            host_kv_tokens=host_kv_tokens,
        ),
        schedule=ScheduleOptions(
            chunked_prefill_size=chunk,
            disable_overlap_schedule=not overlap,
            retract_every=retract_every,
            debug_checks=True,
            **schedule,  # type: ignore[arg-type]
        ),
    )


def split(config: NodeConfig, make_engine: MakeEngine = real_engine, *, seed: int = 0) -> Cluster:
    """1P1D."""
    return Cluster(1, 1, make_engine, config, seed=seed)


def unsplit(config: NodeConfig) -> Cluster:
    """0P1D: one node that does both."""
    return Cluster(0, 1, real_engine, config)


Topology = Callable[..., Cluster]
topologies = pytest.mark.parametrize("topology", [split, unsplit], ids=["1P1D", "0P1D"])
overlaps = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])


def watch(cluster: Cluster) -> list[ScheduleBatch]:
    """Everything that d0 launches from now on."""
    launcher, launched = cluster.nodes["d0"].scheduler._launcher, []
    turn = launcher.turn

    def watching(plan: Plan) -> Outcome:
        launched.extend([plan.batch] if plan.batch is not None else [])
        return turn(plan)

    launcher.turn = watching  # type: ignore[method-assign]
    return launched


class Client:
    """Sends each request to p0 and d0, or to d0 alone where there is no p0."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.prefill = "p0" if "p0" in cluster.nodes else None
        self._count = 0

    def submit(
        self,
        input_ids: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        output_ids: Sequence[int] = (),
    ) -> ReqKey:
        return self._submit(input_ids, params, self.prefill, "d0", output_ids)

    def submit_to(self, node: str, input_ids: Sequence[int], params: SamplingParams) -> ReqKey:
        """To one node alone."""
        prefill, decode = (node, None) if node.startswith("p") else (None, node)
        return self._submit(input_ids, params, prefill, decode, ())

    def tokens(self, requests: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
        """The outputs of requests that run concurrently; afterwards nothing is held anywhere."""
        keys = [self.submit(ids, params) for ids in requests]
        self.cluster.run_all()
        self.cluster.assert_idle()
        return [self.cluster.tokens(key) for key in keys]

    def leave_prefix(self, node: str, ids: Sequence[int]) -> None:
        """Have `node` compute `ids`, so that its RadixCache keeps their whole pages."""
        params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        key = self.submit_to(node, ids, params)
        self.cluster.run_all()
        assert len(self.cluster.tokens(key)) == 1

    def _submit(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        prefill: str | None,
        decode: str | None,
        output_ids: Sequence[int],
    ) -> ReqKey:
        self._count += 1
        return self.cluster.router.submit(
            f"r{self._count:03d}", ids, params, prefill, decode, output_ids=output_ids
        )
