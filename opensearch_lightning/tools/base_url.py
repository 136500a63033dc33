"""Addresses of services, as an operator configures them."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from opensearch_lightning.errors import ConfigurationError


def base_url(name: str, url: str) -> str:
    """``url`` without slashes at its end.

    Args:
        name: what has the address, for messages.
        url: ``http`` or ``https``, with nothing in it that could be a key.

    Raises:
        ConfigurationError: it is no such address; it is not repeated where it may hold a key.
    """
    try:
        parts = urlsplit(url)
        host, secret = parts.hostname, parts.username is not None or parts.password is not None or bool(parts.query)
        port_is_fine = parts.port != 0
    except ValueError:
        raise ConfigurationError(f"The address of {name} is no URL: set one such as http://localhost:8080.") from None
    if secret or parts.fragment:
        raise ConfigurationError(
            f"The address of {name} holds a user name, a query or a fragment: set the bare address; keys come from the "
            "environment."
        )
    if parts.scheme not in ("http", "https") or not host or not port_is_fine:
        raise ConfigurationError(f"The address of {name} is {url!r}: set one such as http://localhost:8080.")
    return url.rstrip("/")


def proxy_of(url: str) -> str | None:
    """The proxy that the environment names for an address, if any; none for this machine's own."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host == "localhost" or _is_loopback(host) or proxy_bypass(host):
        return None
    return getproxies().get(parts.scheme)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
