"""The manifests render, are valid for Kubernetes and its restricted security, and name what Baton has."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from router.nodes.discovery import DnsDiscovery
from tests.deploy.folder import DEPLOY, HTTP_PORT_OF_NODES, parse

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the manifests")

Manifest = dict[str, Any]
RESOURCES = ("base", "overlays/gpu", "overlays/api-keys", "autoscaling")
OPERATORS = ("monitoring.coreos.com/v1",)
"""Whose kinds have no schema here."""
NODES = ("prefill-node", "decode-node")


def copy_to(folder: Path) -> Path:
    """The manifests with a key, as the quickstart has a reader make it."""
    shutil.copytree(DEPLOY / "kubernetes", folder)
    (folder / "base" / "fleet.key").write_text("0123456789abcdef")
    return folder


def render(folder: Path) -> list[Manifest]:
    argv = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert not done.returncode and not done.stderr, done.stderr
    return [*yaml.safe_load_all(done.stdout)]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Manifest]]:
    folder = copy_to(tmp_path_factory.mktemp("kubernetes") / "kubernetes")
    return {name: render(folder / name) for name in RESOURCES}


def deployments(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m for m in manifests if m["kind"] == "Deployment"}


def one(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name]
    return found


def labels(deployment: Manifest) -> dict[str, str]:
    found: dict[str, str] = deployment["spec"]["template"]["metadata"]["labels"]
    return found


def container_of(deployment: Manifest) -> Manifest:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def command_of(deployment: Manifest) -> list[str]:
    """With what Kubernetes puts in for $(NAME)."""
    container = container_of(deployment)
    names = {entry["name"] for entry in container.get("env", ())}
    referred = {name for word in container["args"] for name in re.findall(r"\$\((\w+)\)", word)}
    assert referred <= names
    return [
        re.sub(r"\$\(POD_IP\)", "10.1.2.3", word).replace("$(POD_NAME)", "pod") for word in container["args"]
    ]


def selects(selector: Manifest, of: Mapping[str, str]) -> bool:
    matches = selector.get("matchLabels", {})
    expressions = selector.get("matchExpressions", ())
    assert all(e["operator"] == "In" for e in expressions)
    return all(of.get(key) == value for key, value in matches.items()) and all(
        of.get(e["key"]) in e["values"] for e in expressions
    )


@pytest.mark.parametrize("name", RESOURCES)
def test_each_is_valid_for_kubernetes(name: str, rendered: Mapping[str, list[Manifest]]) -> None:
    for manifest in rendered[name]:
        assert manifest["kind"] == "Namespace" or manifest["metadata"]["namespace"] == "baton"
        if manifest["apiVersion"] not in OPERATORS:
            kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", ["base", "overlays/gpu"])
def test_pods_are_as_the_namespace_enforces(name: str, rendered: Mapping[str, list[Manifest]]) -> None:
    for deployment in deployments(rendered[name]).values():
        pod = deployment["spec"]["template"]["spec"]["securityContext"]
        assert pod["runAsNonRoot"] and pod["seccompProfile"]["type"] == "RuntimeDefault"
        container = container_of(deployment)["securityContext"]
        assert container["allowPrivilegeEscalation"] is False
        assert container["capabilities"]["drop"] == ["ALL"]


@pytest.mark.parametrize("name", ["base", "overlays/gpu"])
def test_commands_ports_and_probes(name: str, rendered: Mapping[str, list[Manifest]]) -> None:
    of = deployments(rendered[name])
    assert set(of) == {"router", *NODES}
    for deployment in of.values():
        container, spec = container_of(deployment), deployment["spec"]["template"]["spec"]
        flags = parse(command_of(deployment))
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        probes = [probe for key, probe in container.items() if key.endswith("Probe")]
        assert len(probes) >= 2
        for probe in probes:
            assert (probe.get("httpGet") or probe["tcpSocket"])["port"] in ports
        (key,) = flags.fleet_key
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert set(mounts.values()) == set(volumes)
        secret = volumes[mounts[str(Path(key).parent)]]["secret"]["secretName"]
        assert Path(key).name in one(rendered[name], "Secret", secret)["data"]
        stop_s = getattr(flags, "stop_timeout_s", 0) + 5 * ("lifecycle" in container)
        assert spec["terminationGracePeriodSeconds"] > flags.drain_timeout_s + stop_s
        if container["args"][0] == "router":
            assert ports["http"] == flags.port
        else:
            assert ports["http"] == flags.http_port == HTTP_PORT_OF_NODES
            assert flags.http_host == flags.host == "10.1.2.3" and flags.node_id == "pod"
            assert flags.fixed_role
            assert ports.get("kv") == (flags.kv_port if flags.backend == "tcp" else None)


def test_the_router_finds_the_nodes(rendered: Mapping[str, list[Manifest]]) -> None:
    of = deployments(rendered["base"])
    found = {DnsDiscovery.of(source).address for source in parse(command_of(of["router"])).discovery}
    assert len(found) == 2
    for name in NODES:
        spec = one(rendered["base"], "Service", name)["spec"]
        assert spec["clusterIP"] == "None", "its name has an address for each pod"
        assert spec["publishNotReadyAddresses"], "routers wait for a node that loads"
        assert f"tcp://{name}:{parse(command_of(of[name])).port}" in found


def test_every_selector_selects_its_pods_alone(rendered: Mapping[str, list[Manifest]]) -> None:
    manifests = rendered["base"]
    of = deployments(manifests)
    for manifest in manifests:
        spec, name = manifest.get("spec", {}), manifest["metadata"]["name"]
        match manifest["kind"]:
            case "Service":
                selector = {"matchLabels": spec["selector"]}
                (port,) = spec["ports"]
                ports = {p["name"]: p["containerPort"] for p in container_of(of[name])["ports"]}
                assert ports[port["targetPort"]] == port["port"]
            case "PodDisruptionBudget" | "Deployment":
                selector = spec["selector"]
            case "NetworkPolicy":
                selected = {
                    n for n, deployment in of.items() if selects(spec["podSelector"], labels(deployment))
                }
                assert selected == ({"router"} if name == "router" else {*NODES})
                continue
            case _:
                continue
        assert [n for n, deployment in of.items() if selects(selector, labels(deployment))] == [name]
    kinds = [m["kind"] for m in manifests]
    assert kinds.count("PodDisruptionBudget") == kinds.count("Service") == 3


def test_the_network_lets_in_what_is_used(rendered: Mapping[str, list[Manifest]]) -> None:
    of = deployments(rendered["base"])
    to_nodes, from_router, from_prometheus = one(rendered["base"], "NetworkPolicy", "nodes")["spec"][
        "ingress"
    ]
    (peers,) = to_nodes["from"]
    listens_at = {p["containerPort"] for n in NODES for p in container_of(of[n])["ports"]} - {
        HTTP_PORT_OF_NODES
    }
    assert {port["port"] for port in to_nodes["ports"]} == listens_at
    any_port, *_ = one(rendered["overlays/gpu"], "NetworkPolicy", "nodes")["spec"]["ingress"]
    assert "ports" not in any_port and any_port["from"] == to_nodes["from"]
    assert all(selects(peers["podSelector"], labels(of[name])) for name in NODES)
    assert not selects(peers["podSelector"], labels(of["router"]))
    (routers,) = from_router["from"]
    assert selects(routers["podSelector"], labels(of["router"]))
    control = {
        port["containerPort"]
        for n in NODES
        for port in container_of(of[n])["ports"]
        if port["name"] == "control"
    }
    assert {port["port"] for port in from_router["ports"]} == control
    assert [port["port"] for port in from_prometheus["ports"]] == [HTTP_PORT_OF_NODES]


def test_each_fleet_scales_by_a_metric_that_the_adapter_serves(
    rendered: Mapping[str, list[Manifest]],
) -> None:
    adapter = yaml.safe_load((DEPLOY / "kubernetes/autoscaling/prometheus-adapter.yaml").read_text())
    served = {rule["name"]["as"] for rule in adapter["rules"]["custom"]}
    scaled: dict[str, str] = {}
    for manifest in rendered["autoscaling"]:
        match manifest["kind"]:
            case "HorizontalPodAutoscaler":
                (metric,) = manifest["spec"]["metrics"]
                scaled[manifest["spec"]["scaleTargetRef"]["name"]] = metric["pods"]["metric"]["name"]
            case "PodMonitor":
                selector = manifest["spec"]["selector"]
                for deployment in deployments(rendered["base"]).values():
                    if selects(selector, labels(deployment)):
                        (endpoint,) = manifest["spec"]["podMetricsEndpoints"]
                        assert endpoint["port"] in {p["name"] for p in container_of(deployment)["ports"]}
                        assert endpoint["honorLabels"], "`node` is a label of Baton's"
            case kind:
                raise AssertionError(kind)
    assert set(scaled) == {*NODES} and len(set(scaled.values())) == 2 and set(scaled.values()) == served


def test_prometheus_has_a_key_of_the_router(rendered: Mapping[str, list[Manifest]]) -> None:
    """Nodes answer without one."""
    with_keys = {m["metadata"]["name"]: m for m in rendered["overlays/api-keys"]}
    (endpoint,) = with_keys["baton-router"]["spec"]["podMetricsEndpoints"]
    environment = container_of(deployments(rendered["base"])["router"])["env"]
    assert endpoint.pop("authorization")["credentials"]["name"] in {
        entry["valueFrom"]["secretKeyRef"]["name"] for entry in environment
    }
    assert with_keys == {m["metadata"]["name"]: m for m in rendered["autoscaling"]}


def test_gpus_are_asked_for_and_used(rendered: Mapping[str, list[Manifest]]) -> None:
    of = deployments(rendered["overlays/gpu"])
    for name in NODES:
        assert container_of(of[name])["resources"]["limits"]["nvidia.com/gpu"] == "1"
        flags = parse(command_of(of[name]))
        assert (flags.device, flags.model, flags.backend) == ("cuda", "/models/model", "auto")
    assert all(container_of(d)["image"] == "baton:cuda" for d in of.values())
    assert all(container_of(d)["image"] == "baton:cpu" for d in deployments(rendered["base"]).values())


@pytest.mark.parametrize("registry", ["registry.example", "registry.example:5000/team"])
def test_one_edit_says_where_the_images_are(registry: str, tmp_path: Path) -> None:
    """The edit of the quickstart, in the base alone, holds for the GPU overlay too."""
    page = (DEPLOY.parent / "docs/quickstart-kubernetes.md").read_text()
    (edit,) = re.findall(r"`(newName: REGISTRY/\S+)`", page)
    folder = copy_to(tmp_path / "kubernetes")
    base = folder / "base" / "kustomization.yaml"
    text, made = base.read_text(), edit.replace("REGISTRY", registry)
    assert text.count("newName: baton\n") == 1
    base.write_text(text.replace("newName: baton\n", f"{made}\n"))
    for name, tag in (("base", "cpu"), ("overlays/gpu", "cuda")):
        images = [container_of(of)["image"] for of in deployments(render(folder / name)).values()]
        assert images == [f"{registry}/baton:{tag}"] * 3
