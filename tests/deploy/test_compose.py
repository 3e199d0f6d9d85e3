"""The compose file is one by the Compose Specification, and its commands are Baton's."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from tests.deploy.folder import DEPLOY, HTTP_PORT_OF_NODES, parse

TEXT = (DEPLOY / "compose.yaml").read_text()
SERVICES: dict[str, Any] = yaml.safe_load(TEXT)["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"] == "baton:cpu"}


def test_it_is_valid() -> None:
    compose = PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load(TEXT)))  # without anchors
    assert set(compose.service_names()) == {*OURS, "prometheus", "grafana"}
    with pytest.raises(ValueError, match="commando"):
        PyCompose.from_yaml("services: {a: {image: b, commando: c}}")


def test_the_fleet() -> None:
    commands = {
        name: parse([word.replace("${MODEL:-builtin}", "builtin") for word in service["command"]])
        for name, service in OURS.items()
    }
    router = commands.pop("router")
    assert router.prefill == ["tcp://prefill-0:7100"]
    assert router.decode == ["tcp://decode-0:7200", "tcp://decode-1:7200"]
    assert set(commands) == {"prefill-0", "decode-0", "decode-1"}
    for name, node in commands.items():
        assert SERVICES[name]["command"][0] == f"{name.partition('-')[0]}-node"
        assert node.advertise_host == node.node_id == name and node.host == "0.0.0.0"
        assert (node.port, node.http_port) == ({"p": 7100, "d": 7200}[name[0]], HTTP_PORT_OF_NODES)
        assert SERVICES[name]["environment"]["BATON_HEALTH_URL"] == f"http://127.0.0.1:{node.http_port}/live"
        grace_s = float(SERVICES[name]["stop_grace_period"].removesuffix("s"))
        assert grace_s > max(node.drain_timeout_s, router.drain_timeout_s + router.stop_timeout_s)
    (secret,) = yaml.safe_load(TEXT)["secrets"]
    for service, flags in ((SERVICES["router"], router), *((SERVICES[n], f) for n, f in commands.items())):
        assert service["secrets"] == [secret] and flags.fleet_key == [f"/run/secrets/{secret}"]


def test_prometheus_has_a_key_of_the_router() -> None:
    """Both come from deploy/.env. An API key that is empty ends a router, so the variable is unset without one."""
    assert SERVICES["router"]["environment"]["BATON_API_KEYS"] is None
    (mounted,) = SERVICES["prometheus"]["configs"]
    assert yaml.safe_load(TEXT)["configs"][mounted["source"]]["content"] == "${PROMETHEUS_KEY:-none}"
    jobs = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    files = {job["job_name"]: job.get("authorization", {}).get("credentials_file") for job in jobs}
    assert files == {"baton-router": mounted["target"], "baton-nodes": None}


def test_what_is_published_is_for_this_machine_alone() -> None:
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert SERVICES["router"]["environment"]["BATON_HEALTH_URL"] == "http://127.0.0.1:8000/health"


def test_every_process_is_of_the_image_that_is_built() -> None:
    for service in OURS.values():
        build = service["build"]
        assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
        assert service["image"] == f"baton:{build['target']}"


def test_files_that_are_mounted_are_here() -> None:
    mounted = [volume.split(":") for service in SERVICES.values() for volume in service.get("volumes", ())]
    folders = [source for source, *_ in mounted if source.startswith(".")]
    assert len(folders) == 3 and all((DEPLOY / folder).exists() for folder in folders)
