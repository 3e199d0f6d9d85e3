"""Where nodes are, when neither the operator nor the nodes say so: the addresses of a name in DNS.

A discovery lists all nodes that it knows, again and again. `Membership.on_listing` has the rules: a name that does
not resolve removes no node that answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from router.topology import address_of
from shared.errors import ConfigError, LinkError
from shared.log import LimitedWarning
from shared.protocol.messages import Role
from shared.protocol.resolver import Resolver

POLL_S = 5.0
"""DNS answers are cached for seconds, and a connection that is lost is dialled again without them."""

Listing = frozenset[str]
"""`tcp://HOST:PORT` of each node. Nodes say their roles in their hellos."""


@dataclass(frozen=True)
class DnsDiscovery:
    """Every address of one name, such as that of a headless service of Kubernetes."""

    address: str
    resolver: Resolver
    poll_s: float = POLL_S

    @classmethod
    def of(cls, source: str) -> DnsDiscovery:
        """From a value of --discovery, `dns:NAME[:PORT]`. Raises ConfigError."""
        kind, _, name = source.partition(":")
        if kind != "dns":
            raise ConfigError(f"--discovery {source!r} is not dns:NAME[:PORT]")
        try:
            return cls(address_of(Role.DECODE, name), Resolver())
        except ValueError as error:
            raise ConfigError(f"--discovery {source}: {error}") from None

    async def run(self, tell: Callable[[Listing], None]) -> None:
        """Look the name up, for ever. A name without an address fails, so the last listing holds."""
        failed = LimitedWarning("discovery_failed")
        while True:
            try:
                found = await asyncio.wrap_future(self.resolver.resolve(self.address))
            except LinkError as error:
                failed(reason=error)
            else:
                tell(frozenset(found))
            await asyncio.sleep(self.poll_s)
