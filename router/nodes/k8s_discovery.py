"""Nodes as the pods of a Kubernetes namespace: the client's informer lists, watches, and lists again after a 410."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.informer import ERROR, SharedInformer

from router.http.topology import DEFAULT_PORTS
from router.nodes.discovery import Listing
from shared.errors import ConfigError
from shared.log import LimitedWarning
from shared.protocol.messages import Role

CONTROL_PORT_NAME = "control"
"""The container port with this name is the control port; without one it is the default port of the role."""
POLL_S = 0.5
RETRY_S = 2.0
"""After an error of the API. The informer itself would ask again at once, and for ever."""
RESYNC_S = 300
"""A watch lasts so long; then pods are listed anew."""
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_ENDED = ("Succeeded", "Failed")


class K8sDiscovery:
    """The pods that match the label selector of a role. Each role has a watch, on a thread of its own.

    What the watches know is told every `poll_s`; after an error of the API a watch pauses for `retry_s`.
    """

    def __init__(
        self,
        api: client.CoreV1Api,
        namespace: str,
        selectors: Mapping[Role, str],
        *,
        poll_s: float = POLL_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._poll_s = poll_s
        self._retry_s = retry_s
        self._informers = {
            role: SharedInformer(
                api.list_namespaced_pod, namespace, resync_period=RESYNC_S, label_selector=selector
            )
            for role, selector in selectors.items()
        }
        self._failed = LimitedWarning("discovery_failed")
        self._ended = threading.Event()
        for informer in self._informers.values():
            informer.add_event_handler(ERROR, self._on_error)

    @classmethod
    def connect(cls, namespace: str | None, selectors: Mapping[Role, str]) -> K8sDiscovery:
        """As the service account of this pod, or as `kubectl` would, also in the namespace. Raises ConfigError."""
        try:
            try:
                config.load_incluster_config()
                namespace = namespace or _OWN_NAMESPACE.read_text().strip()
            except config.ConfigException:
                config.load_kube_config()
                _, active = config.list_kube_config_contexts()
                namespace = namespace or active["context"].get("namespace") or "default"
        except (config.ConfigException, OSError) as error:
            raise ConfigError(f"--discovery k8s: {error}") from None
        return cls(client.CoreV1Api(), namespace, selectors)

    async def run(self, tell: Callable[[Listing], None]) -> None:
        """Tell what the informers know, for ever. They keep it while the API does not answer."""
        logging.getLogger("kubernetes.informer").setLevel(logging.CRITICAL)  # `discovery_failed` says it
        for informer in self._informers.values():
            informer.start()
        try:
            while True:
                tell(
                    frozenset(
                        (role, address)
                        for role, informer in self._informers.items()
                        for pod in informer.cache.list()
                        if (address := address_of_pod(pod, role)) is not None
                    )
                )
                await asyncio.sleep(self._poll_s)
        finally:
            self._ended.set()
            for informer in self._informers.values():
                # `stop` waits for the request under way, which may be stuck. The supervisor does not wait for it.
                threading.Thread(target=informer.stop, name="stop informer", daemon=True).start()

    def _on_error(self, error: object) -> None:
        """On the thread of an informer, which goes on afterwards."""
        self._failed(reason=str(error).strip().partition("\n")[0])
        self._ended.wait(self._retry_s)


def address_of_pod(pod: Any, role: Role) -> str | None:
    """The control socket of a pod; None while it has no address, and when it ends."""
    if pod.metadata is None or pod.spec is None or pod.status is None:  # all three are optional in the API
        return None
    ip = pod.status.pod_ip
    if not ip or pod.status.phase in _ENDED or pod.metadata.deletion_timestamp is not None:
        return None
    ports = [port for container in pod.spec.containers or () for port in container.ports or ()]
    named = (port.container_port for port in ports if port.name == CONTROL_PORT_NAME)
    port = next(named, DEFAULT_PORTS[role])
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"
