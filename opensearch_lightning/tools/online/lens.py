"""``image_search`` by Google Lens through Serper: pictures of the web that look alike, and the pages they stand on.

Request and answer: ``POST https://google.serper.dev/lens`` with header ``X-API-KEY`` and JSON ``url``, optionally
``gl`` and ``hl``; JSON with a list ``organic`` of ``title``, ``source``, ``link``, ``imageUrl``, ``thumbnailUrl``.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from PIL import Image

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.pictures import png_bytes
from opensearch_lightning.tools import schemas
from opensearch_lightning.tools.backends import BackendPolicy
from opensearch_lightning.tools.download import check_public
from opensearch_lightning.tools.formatting import sources
from opensearch_lightning.tools.images import ImageBook
from opensearch_lightning.tools.online.service import Service
from opensearch_lightning.tools.online.uploads import Uploader
from opensearch_lightning.tools.protocol import Probe, ToolOutput
from opensearch_lightning.tools.secrets import Secret
from opensearch_lightning.tools.threads import in_thread
from opensearch_lightning.types import ErrorKind

_SERPER = "https://google.serper.dev"
_PROBE_URL = "https://www.google.com/images/branding/googlelogo/2x/googlelogo_color_272x92dp.png"
_JPEG_QUALITY = 90
_MOST_TITLE, _MOST_LINK = 300, 2000
# What is shorter is a size or a date; a signature, a token and a key's id are longer.
_LEAST_SECRET = 20


class SerperLens:
    """Reverse image search by Serper's Lens.

    The service fetches the picture by its public address: the one that came with it
    (:meth:`~opensearch_lightning.tools.images.ImageBook.url`), else one that ``uploader`` makes. An address that came
    with a picture goes no further if it is not that of a host on the internet; ``uploader`` then makes another.

    Args:
        uploader: publishes pictures that have no public address; without one they cannot be searched for.
        api_key_env: environment variable with the key.
        base_url: of the service.
        top_k: results when a call does not say.
        hl: language of the results, such as ``en``.
        gl: country of the results, such as ``us``.
        policy: limits, retries and breaker of the service.
        timeout_s: seconds of a request where the policy sets none.
        resolve_names: look up the host of an address that came with a picture, and send on none that is private or
            not found; ``False`` where this machine reaches the internet through a proxy alone.
        max_png_bytes: a picture whose PNG is larger is sent as JPEG.
        probe_url: public picture that a probe searches for.

    Raises:
        ConfigurationError: the key is missing, or a value that cannot be.
    """

    name = "image_search"
    backend = "image_search"
    variant = "Serper Lens"

    def __init__(
        self,
        *,
        uploader: Uploader | None = None,
        api_key_env: str = "SERPER_API_KEY",
        base_url: str = _SERPER,
        top_k: int = 5,
        hl: str | None = None,
        gl: str | None = None,
        policy: BackendPolicy | None = None,
        timeout_s: float = 20.0,
        resolve_names: bool = True,
        max_png_bytes: int = 4_000_000,
        probe_url: str = _PROBE_URL,
    ) -> None:
        if max_png_bytes < 0:
            raise ConfigurationError(f"max_png_bytes is {max_png_bytes}: set 0 or more.")
        self.schema: Mapping[str, Any] = schemas.image_search_schema(top_k)
        self._key = Secret.from_environment(api_key_env)
        self._service = Service(
            "Serper Lens", base_url, key=self._key, policy=policy, timeout_s=timeout_s, max_bytes=2_000_000
        )
        self._uploader = uploader
        self._locale = {name: value for name, value in (("hl", hl), ("gl", gl)) if value is not None}
        self._resolve_names = resolve_names
        self._max_png_bytes = max_png_bytes
        self._probe_url = probe_url

    async def run(self, arguments: Mapping[str, Any], images: ImageBook) -> ToolOutput:
        """Titles and pages of pictures that look like the image; see :class:`~opensearch_lightning.tools.Tool`."""
        address = images.url(arguments["url"])
        if address is not None and await self._is_public(address):
            found = await self._search(address)
        else:
            address = await self._upload(images.get(arguments["url"]))
            # An address made here may be signed, and as good as a key: nothing that repeats it goes to the policy.
            found = [match for match in await self._search(address) if not _repeats(address, " ".join(match))]
        found = found[: arguments["top_k"]]
        return ToolOutput(text=sources(found), hits=len(found))

    def probes(self) -> Mapping[str, Probe]:
        """A try of each service, by its name. That of Lens costs what a search does; that of the uploader leaves a
        small picture there, and looks for it at its address.
        """
        probes: dict[str, Probe] = {"Serper Lens": self._probe_lens}
        if self._uploader is not None:
            probes["uploader"] = self._probe_uploader
        return probes

    async def aclose(self) -> None:
        """Close the connections, also those of the uploader; a later call opens new ones."""
        try:
            await self._service.aclose()
        finally:
            if self._uploader is not None:
                await self._uploader.aclose()

    async def _is_public(self, address: str) -> bool:
        if any(character.isspace() or not character.isprintable() for character in address):
            return False
        try:
            await check_public(address, resolve=self._resolve_names)
        except ToolError:
            return False
        return True

    async def _upload(self, image: Image.Image) -> str:
        if self._uploader is None:
            raise ToolError(
                ErrorKind.BACKEND_ERROR, "The image has no public address to search for it by; go on another way."
            )
        data, content_type = await in_thread(partial(encoded, image, self._max_png_bytes))
        return await self._uploader.upload(data, content_type)

    async def _search(self, address: str) -> list[tuple[str, str]]:
        headers = {"X-API-KEY": self._key.reveal()}
        payload = {"url": address, **self._locale}
        answer = await self._service.request("POST", "/lens", headers=headers, payload=payload)
        return _matches(answer)

    async def _probe_lens(self) -> None:
        await self._search(self._probe_url)

    async def _probe_uploader(self) -> None:
        assert self._uploader is not None
        data = png_bytes(Image.new("RGB", (16, 16), "teal"))
        address = await self._uploader.upload(data, "image/png")
        parts = urlsplit(address)
        path = urlunsplit(("", "", parts.path, parts.query, ""))
        origin = f"{parts.scheme}://{parts.netloc}"
        published = Service("The address of an uploaded image", origin, max_bytes=len(data))
        try:
            fetched = await published.fetch("GET", path)
        finally:
            await published.aclose()
        if fetched != data:
            raise ToolError(ErrorKind.BACKEND_ERROR, "The address of an uploaded image shows something else.")


def encoded(image: Image.Image, max_png_bytes: int) -> tuple[bytes, str]:
    """``(file, content type)``: a PNG, or a JPEG where that would be larger than ``max_png_bytes``."""
    data = png_bytes(image)
    if len(data) <= max_png_bytes:
        return data, "image/png"
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="JPEG", quality=_JPEG_QUALITY)
    return buffer.getvalue(), "image/jpeg"


def _matches(answer: Any) -> list[tuple[str, str]]:
    """``(title, link)`` of each result of an answer.

    Raises:
        ToolError: ``backend_error``, the answer is not what Lens answers.
    """
    if not isinstance(answer, dict):
        raise _malformed()
    results = answer.get("organic")
    if results is None and isinstance(answer.get("searchParameters"), dict):
        # A search that found nothing may leave the list out.
        return []
    if not isinstance(results, list):
        raise _malformed()
    matches = []
    for result in results:
        if not isinstance(result, dict):
            raise _malformed()
        title, source, link = (_text(result, field) for field in ("title", "source", "link"))
        if link and len(link) <= _MOST_LINK:
            matches.append(((title or source or link)[:_MOST_TITLE], link))
    if results and not matches:
        raise _malformed()
    return matches


def _text(result: Mapping[str, Any], field: str) -> str:
    value = result.get(field)
    if not isinstance(value, str | None):
        raise _malformed()
    return (value or "").strip()


def _malformed() -> ToolError:
    return ToolError(ErrorKind.BACKEND_ERROR, "Serper Lens answered something that is no list of pictures.")


def _repeats(address: str, text: str) -> bool:
    values = (part.partition("=")[2] for part in urlsplit(address).query.split("&"))
    return any(len(value) >= _LEAST_SECRET and value in text for value in values)
