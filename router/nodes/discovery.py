"""Where nodes are, when neither the operator nor the nodes say so: names in DNS, or the API of Kubernetes.

A source lists all nodes that it knows, again and again. `Membership.on_listing` has the rules: a source that fails,
or lists nothing, removes no node that answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from router.http.topology import address_of
from shared.errors import ConfigError, LinkError
from shared.log import LimitedWarning
from shared.protocol.messages import Role
from shared.protocol.resolver import Resolver

POLL_S = 5.0
"""DNS answers are cached for seconds, and a connection that is lost is dialled again without them."""

Listing = frozenset[tuple[Role, str]]
"""Role and `tcp://HOST:PORT` of each node."""


class Discovery(Protocol):
    """A source of listings."""

    async def run(self, tell: Callable[[Listing], None]) -> None:
        """Tell every listing, for ever. A source that fails is asked again."""
        ...


@dataclass(frozen=True)
class DnsDiscovery:
    """Every address of one name, such as that of a headless service. Nodes say their roles in their hellos."""

    address: str
    resolver: Resolver
    poll_s: float = POLL_S

    @classmethod
    def of(cls, text: str) -> DnsDiscovery:
        """From NAME[:PORT]. Raises ValueError."""
        return cls(address_of(Role.DECODE, text), Resolver())

    async def run(self, tell: Callable[[Listing], None]) -> None:
        """Look the name up, for ever. A name without an address fails, so the last listing holds."""
        failed = LimitedWarning("discovery_failed")
        while True:
            try:
                found = await asyncio.wrap_future(self.resolver.resolve(self.address))
            except LinkError as error:
                failed(reason=error)
            else:
                tell(frozenset((Role.DECODE, address) for address in found))
            await asyncio.sleep(self.poll_s)


def make_discovery(text: str, namespace: str | None, selectors: Mapping[Role, str]) -> Discovery:
    """What `--discovery` names: `dns:NAME[:PORT]` or `k8s`. Raises ConfigError."""
    kind, _, name = text.partition(":")
    if kind == "dns":
        try:
            return DnsDiscovery.of(name)
        except ValueError as error:
            raise ConfigError(f"--discovery {text}: {error}") from None
    if text != "k8s":
        raise ConfigError(f"--discovery {text!r} is neither dns:NAME[:PORT] nor k8s")
    try:
        from router.nodes.k8s_discovery import K8sDiscovery
    except ImportError:
        raise ConfigError(
            "--discovery k8s needs the package kubernetes: pip install baton-serve[k8s]"
        ) from None
    return K8sDiscovery.connect(namespace, selectors)
