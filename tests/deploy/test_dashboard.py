"""Every query of the dashboard, and of the autoscaler's adapter, finds its series in what a running fleet exports."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.folder import DEPLOY, HTTP_PORT_OF_NODES, parse
from tests.patience import PATIENCE_S
from tests.processes import HOST, Fleet

DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/baton.json").read_text())
ADAPTER = yaml.safe_load((DEPLOY / "kubernetes/autoscaling/prometheus-adapter.yaml").read_text())
SCRAPES = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
JOB_OF_ROUTERS, JOB_OF_NODES = (scrape["job_name"] for scrape in SCRAPES)
TARGETS = [
    (panel["title"], target["expr"], target["legendFormat"])
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]

Series = list[dict[str, str]]
"""The labels of each series, with its name as `__name__`."""


@dataclass(frozen=True)
class Query:
    """A PromQL expression, taken apart."""

    selectors: tuple[promql_parser.VectorSelector, ...]
    groups: tuple[str, ...]
    """The labels of every `by`."""

    @classmethod
    def parse(cls, text: str) -> Query:
        nodes = [*_walk(promql_parser.parse(text.replace("$__rate_interval", "1m")))]
        groups = [
            label
            for node in nodes
            if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None
            for label in node.modifier.labels
        ]
        return cls(tuple(n for n in nodes if isinstance(n, promql_parser.VectorSelector)), tuple(groups))


def _walk(node: Any) -> Iterator[Any]:
    yield node
    children = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector")]
    for child in (*children, *(getattr(node, "args", None) or ())):
        if child is not None:
            yield from _walk(child)


def selected(selector: promql_parser.VectorSelector, series: Series) -> Series:
    found = [one for one in series if selector.name in (None, one["__name__"])]
    for matcher in selector.matchers.matchers:
        match matcher.op:
            case promql_parser.MatchOp.Equal:
                found = [one for one in found if one.get(matcher.name, "") == matcher.value]
            case promql_parser.MatchOp.NotEqual:
                found = [one for one in found if one.get(matcher.name, "") != matcher.value]
            case promql_parser.MatchOp.Re:
                found = [one for one in found if re.fullmatch(matcher.value, one.get(matcher.name, ""))]
            case op:
                raise AssertionError(op)
    return found


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Series]]:
    """What Prometheus would have of a fleet that has served a request, by job."""
    folder = tmp_path_factory.mktemp("dashboard")
    with Fleet(folder, "builtin", flags=("--http-port", "0")) as fleet:
        fleet.router.generate("def read(path):\n" * 8, 4).tokens()
        nodes = [
            f"{HOST}:{found[1]}"
            for node in fleet.nodes.values()
            if (found := re.search(r"node_http .*port=(\d+)", node.log))
        ]
        assert len(nodes) == 2
        for address in nodes:
            assert _get(address, "/live") == _get(address, "/ready") == "ok\n"
        yield {
            JOB_OF_ROUTERS: _scrape(f"{HOST}:{fleet.router.port}", JOB_OF_ROUTERS),
            JOB_OF_NODES: [one for address in nodes for one in _scrape(address, JOB_OF_NODES)],
        }


def _get(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=PATIENCE_S) as response:
        return str(response.read().decode())


def _scrape(address: str, job: str) -> Series:
    of_target = {"job": job, "instance": address}
    return [{"__name__": "up", **of_target}] + [
        {"__name__": sample.name, **sample.labels, **of_target}
        for family in text_string_to_metric_families(_get(address, "/metrics"))
        for sample in family.samples
    ]


@pytest.mark.processes
@pytest.mark.parametrize(("expr", "legend"), [(expr, legend) for _, expr, legend in TARGETS])
def test_a_query_finds_its_series(expr: str, legend: str, series: Mapping[str, Series]) -> None:
    query = Query.parse(expr)
    assert query.selectors
    for selector in query.selectors:
        found = selected(selector, [one for of_job in series.values() for one in of_job])
        assert found, f"no series of a running fleet: {selector}"
        if selector.name.startswith(("sglang:", "baton:")):
            assert all(set(query.groups) <= set(one) for one in found), query.groups
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    assert shown <= set(query.groups) if query.groups else shown <= {"job", "instance"}


@pytest.mark.processes
@pytest.mark.parametrize("rule", ADAPTER["rules"]["custom"], ids=lambda rule: rule["name"]["as"])
def test_the_adapter_finds_a_series_for_each_pod(rule: Any, series: Mapping[str, Series]) -> None:
    in_pods = [one | {"namespace": "baton", "pod": one["instance"]} for one in series[JOB_OF_NODES]]
    (selector,) = Query.parse(rule["seriesQuery"]).selectors
    (found,) = selected(selector, in_pods)
    asked = rule["metricsQuery"]
    for template, value in (
        ("<<.Series>>", found["__name__"]),
        (
            "<<.LabelMatchers>>",
            f'namespace="baton",pod=~"{re.escape(found["pod"])}|other"'.replace("\\", "\\\\"),
        ),
        ("<<.GroupBy>>", "pod"),
    ):
        assert template in asked
        asked = asked.replace(template, value)
    query = Query.parse(asked)
    (of_pod,) = query.selectors
    assert selected(of_pod, in_pods) == [found] and query.groups == ("pod",)
    assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}


def test_prometheus_scrapes_every_process_of_the_compose_file() -> None:
    expected = set()
    for name, service in COMPOSE["services"].items():
        if service["image"] == "baton:cpu":
            flags = parse([word.replace("${MODEL:-builtin}", "builtin") for word in service["command"]])
            expected.add(f"{name}:{flags.port if name == 'router' else flags.http_port}")
    assert {f"{name}:{HTTP_PORT_OF_NODES}" for name in ("prefill-0", "decode-0", "decode-1")} < expected
    assert {t for scrape in SCRAPES for part in scrape["static_configs"] for t in part["targets"]} == expected


def test_panels_and_their_provisioning() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) and len(TARGETS) > 40
    provisioned = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioned / "datasources/prometheus.yaml").read_text())["datasources"]
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            assert target["datasource"] == {"type": source["type"], "uid": source["uid"]}
    (provider,) = yaml.safe_load((provisioned / "dashboards/baton.yaml").read_text())["providers"]
    mounts = [Path(volume.split(":")[1]) for volume in COMPOSE["services"]["grafana"]["volumes"]]
    assert Path(provider["options"]["path"]) in mounts
