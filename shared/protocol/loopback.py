"""Whether other machines can reach an address that a process listens on."""

from __future__ import annotations

import ipaddress

from shared.errors import ConfigError


def require_key_beyond_loopback(flag: str, host: str, *, has_key: bool, insecure: bool) -> None:
    """Refuse a `host` that other machines can reach, without a key or `insecure`. The ConfigError names `flag`."""
    if has_key or insecure or is_loopback(host):
        return
    raise ConfigError(
        f"{flag} {host} is reachable from other machines: give every process the same --fleet-key FILE, "
        "or --insecure when the network is trusted"
    )


def is_loopback(host: str) -> bool:
    """True for localhost and the loopback ranges."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
