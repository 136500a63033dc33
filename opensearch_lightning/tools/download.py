"""Fetching what a model, or a page that it read, named by URL: only from public addresses, within limits.

The check is made on the address of every connection that is about to be opened, so that neither names that resolve to
private addresses, nor redirects, nor ways of writing an address get around it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.types import ErrorKind

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_ROUTED = ipaddress.IPv6Network("2000::/3")
# Azure's machines reach their own host there.
_CLOUD_HOST = ipaddress.IPv4Address("168.63.129.16")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")
_LOCAL_ENDINGS = (".localhost", ".local", ".localdomain", ".internal", ".home.arpa")


@dataclass(frozen=True, kw_only=True)
class Download:
    """What came: ``url`` after redirects, ``content_type`` and ``charset`` as the server calls them."""

    url: str
    content_type: str
    body: bytes
    charset: str | None = None


def is_public(address: Address) -> bool:
    """Whether an address belongs to the internet at large, also where it wraps an IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        # Whatever else wraps an IPv4 address, or is of one site, lies outside what the internet routes.
        if address not in _ROUTED:
            return False
    return address.is_global and not address.is_multicast and address != _CLOUD_HOST


class Downloader:
    """Fetches URLs; for one event loop.

    Args:
        timeout_s: seconds of a download, redirects included.
        max_bytes: most bytes of a body.
        max_redirects: most redirects on the way.
        allowed: which addresses may be contacted.

    Raises:
        ConfigurationError: a limit that is not positive.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 20.0,
        max_bytes: int = 20_000_000,
        max_redirects: int = 5,
        allowed: Callable[[Address], bool] = is_public,
    ) -> None:
        if not timeout_s > 0 or max_bytes < 1 or max_redirects < 0:
            raise ConfigurationError(
                f"timeout_s is {timeout_s}, max_bytes {max_bytes}, max_redirects {max_redirects}: set the first two "
                "above 0 and the last to 0 or more."
            )
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._max_redirects = max_redirects
        self._allowed = allowed
        self._session: aiohttp.ClientSession | None = None

    async def get(self, url: str) -> Download:
        """The body behind ``url``.

        Raises:
            ToolError: ``invalid_argument`` for a URL that may not be contacted; else the kind of what went wrong.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._follow(url)
        except TimeoutError as error:
            raise ToolError(ErrorKind.TIMEOUT, f"The page did not come within {self._timeout_s:g} s.") from error
        except _Refused as error:
            raise ToolError(ErrorKind.INVALID_ARGUMENT, str(error)) from error
        except (aiohttp.InvalidURL, ValueError) as error:
            raise ToolError(ErrorKind.INVALID_ARGUMENT, f"{url[:80]!r} is no URL of a web page.") from error
        except aiohttp.ClientError as error:
            if (refused := _refusal(error)) is not None:
                raise ToolError(ErrorKind.INVALID_ARGUMENT, str(refused)) from error
            kind = ErrorKind.UNREACHABLE if isinstance(error, aiohttp.ClientConnectorError) else ErrorKind.BACKEND_ERROR
            raise ToolError(kind, f"The page could not be fetched ({type(error).__name__}).") from error

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _follow(self, url: str) -> Download:
        for _ in range(self._max_redirects + 1):
            _check_form(url)
            async with self._open_session().get(url, allow_redirects=False) as response:
                if response.status not in _REDIRECTS or "Location" not in response.headers:
                    return await self._read(url, response)
                url = urljoin(url, response.headers["Location"])
        raise ToolError(ErrorKind.BACKEND_ERROR, f"The page redirects more than {self._max_redirects} times.")

    async def _read(self, url: str, response: aiohttp.ClientResponse) -> Download:
        check_status(response)
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            # asked for as it is: what is packed could be a thousand times larger than it looks
            raise ToolError(ErrorKind.BACKEND_ERROR, "The page comes packed, though it was asked for as it is.")
        body = bytearray()
        async for chunk in response.content.iter_chunked(65536):
            body += chunk
            if len(body) > self._max_bytes:
                raise ToolError(ErrorKind.BACKEND_ERROR, f"The page is larger than {self._max_bytes} bytes.")
        kind = response.content_type.lower()
        return Download(url=url, content_type=kind, body=bytes(body), charset=response.charset)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(socket_factory=self._socket),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity"},
                auto_decompress=False,
                trust_env=False,
            )
        return self._session

    def _socket(self, info: Any) -> socket.socket:
        """The socket for a connection to an address that may be contacted."""
        family, kind, protocol, _, target = info
        address = ipaddress.ip_address(str(target[0]).partition("%")[0])
        if not self._allowed(address):
            raise _Refused("The address of the page is not public; only pages of the internet can be read.")
        return socket.socket(family, kind, protocol)


class _Refused(OSError):
    """A connection that may not be made."""


def check_status(response: aiohttp.ClientResponse) -> None:
    """Refuse an answer that is none.

    Raises:
        ToolError: ``rate_limited`` with what ``Retry-After`` says, or ``backend_error``.
    """
    if response.status == 429 or (response.status == 503 and "Retry-After" in response.headers):
        wait = retry_after_s(response.headers.get("Retry-After"))
        raise ToolError(ErrorKind.RATE_LIMITED, "Too many requests for now.", retry_after_s=wait)
    if response.status >= 400:
        raise ToolError(ErrorKind.BACKEND_ERROR, f"The server answered with status {response.status}.")


def retry_after_s(header: str | None, *, now: datetime | None = None) -> float | None:
    """Seconds that a ``Retry-After`` header asks for, given as a number or a date; ``None`` if it says neither."""
    if header is None:
        return None
    text = header.strip()
    if text.isdecimal():
        return float(text)
    try:
        then = parsedate_to_datetime(text)
    except (TypeError, ValueError, OverflowError):
        return None
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return max(0.0, (then - (now or datetime.now(UTC))).total_seconds())


async def check_public(url: str, *, resolve: bool = True) -> None:
    """Refuse a URL that another machine is about to be asked to fetch, unless it names a public address.

    Here no connection is seen, so the name is looked up; what the other machine finds under it may differ.

    Args:
        url: as a model or a page gave it.
        resolve: ``False`` looks no name up, for machines that reach the internet through a proxy alone. Addresses that
            are not public, ``localhost``, names without a dot and those of local networks are refused even so.

    Raises:
        ToolError: ``invalid_argument`` for a URL that may not be fetched, ``unreachable`` for a name that is not found.
    """
    try:
        host, port = _host(url)
        if (address := _literal(host)) is not None:
            addresses = [address]
        elif host.endswith(_LOCAL_ENDINGS) or "." not in host:
            raise _Refused("The host of the page is not public; only pages of the internet can be read.")
        else:
            addresses = await _look_up(host, port) if resolve else []
        if not all(is_public(address) for address in addresses):
            raise _Refused("The address of the page is not public; only pages of the internet can be read.")
    except _Refused as error:
        raise ToolError(ErrorKind.INVALID_ARGUMENT, str(error)) from None


def _host(url: str) -> tuple[str, int]:
    """Host in ASCII and lower case, and port. One that parsers could read in two ways is refused."""
    _check_form(url)
    parts = urlsplit(url)
    try:
        url.encode()
        host = (parts.hostname or "").encode("idna").decode().rstrip(".")
    except UnicodeError:
        raise _Refused("The URL names no host.") from None
    # A last label of digits is meant as an address, and read as one by some; so is what stands in brackets.
    is_meant_so = host.rpartition(".")[2].isdigit() or "[" in parts.netloc
    if not _HOST.fullmatch(host) or (is_meant_so and _literal(host) is None):
        raise _Refused("The URL names no host.")
    return host, parts.port or (443 if parts.scheme == "https" else 80)


def _literal(host: str) -> Address | None:
    """The address that a host spells out, also in the short, octal and hexadecimal ways of writing one."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        return None


async def _look_up(host: str, port: int) -> list[Address]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        message = f"There is no host {host[:80]!r}, as far as this machine knows."
        raise ToolError(ErrorKind.UNREACHABLE, message) from None
    return [ipaddress.ip_address(str(target[0]).partition("%")[0]) for *_, target in found]


def _check_form(url: str) -> None:
    try:
        parts = urlsplit(url)
        port_is_fine = parts.port != 0
    except ValueError:
        raise _Refused(f"{url[:80]!r} is no URL.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_fine:
        raise _Refused(f"{url[:80]!r} is no URL of a web page.")
    if parts.username is not None or parts.password is not None:
        raise _Refused("A URL with a user name is not read.")


def _refusal(error: BaseException | None) -> _Refused | None:
    """The refusal behind an error of the connection."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, _Refused):
            return error
        inner = getattr(error, "os_error", None)
        error = inner if isinstance(inner, BaseException) else error.__cause__ or error.__context__
    return None
