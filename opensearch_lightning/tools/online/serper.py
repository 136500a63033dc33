"""Web search by Serper (``https://serper.dev``)."""

from __future__ import annotations

from typing import Any

from opensearch_lightning.errors import ToolError
from opensearch_lightning.tools.backends import BackendPolicy
from opensearch_lightning.tools.formatting import encodable
from opensearch_lightning.tools.online.service import Service
from opensearch_lightning.tools.online.web_protocol import WebHit
from opensearch_lightning.tools.secrets import Secret
from opensearch_lightning.types import ErrorKind

_TITLE_CHARS = 300
_URL_CHARS = 2000
_SNIPPET_CHARS = 600


class Serper:
    """Google results by ``POST /search``.

    Args:
        api_key_env: environment variable that holds the key.
        base_url: address of the service.
        gl: country of the search, such as ``us``; ``None`` leaves it to the service.
        policy: limits, retries and breaker of the service.
        timeout_s: seconds of a search, retries included, where the policy sets none.
        max_bytes: most bytes of an answer.

    Raises:
        MissingKeyError: the variable is not set.
        ConfigurationError: a URL, a limit or a variable's name that cannot be.
    """

    name = "Serper"

    def __init__(
        self,
        *,
        api_key_env: str = "SERPER_API_KEY",
        base_url: str = "https://google.serper.dev",
        gl: str | None = None,
        policy: BackendPolicy | None = None,
        timeout_s: float = 10.0,
        max_bytes: int = 2_000_000,
    ) -> None:
        self._key = Secret.from_environment(api_key_env)
        self._gl = gl
        self._service = Service(
            self.name, base_url, key=self._key, policy=policy, timeout_s=timeout_s, max_bytes=max_bytes
        )

    async def search(self, query: str, *, language: str, limit: int) -> list[WebHit]:
        """At most ``limit`` organic results, best first; an entry without a link is left out.

        Raises:
            ToolError: of the kind of what went wrong; ``backend_error`` too for an answer that holds no results and
                does not say so.
        """
        body: dict[str, Any] = {"q": query, "hl": language, "num": limit}
        if self._gl is not None:
            body["gl"] = self._gl
        answer = await self._service.request("POST", "/search", headers={"X-API-KEY": self._key.reveal()}, payload=body)
        return self._hits(answer)[:limit]

    async def aclose(self) -> None:
        """Close the connections."""
        await self._service.aclose()

    def _hits(self, answer: Any) -> list[WebHit]:
        # The echo of the parameters tells a search without hits from an answer of something else.
        organic = (
            answer.get("organic", [] if "searchParameters" in answer else None) if isinstance(answer, dict) else None
        )
        if not isinstance(organic, list):
            raise ToolError(ErrorKind.BACKEND_ERROR, f"{self.name} answered without a list of results.")
        hits = [hit for entry in organic if (hit := _hit(entry)) is not None]
        if organic and not hits:
            raise ToolError(ErrorKind.BACKEND_ERROR, f"{self.name} answered results without links.")
        return hits


def _hit(entry: Any) -> WebHit | None:
    if not isinstance(entry, dict):
        return None
    url = _text(entry.get("link")).strip()
    if not url or len(url) > _URL_CHARS:
        return None
    title, snippet = _text(entry.get("title")), _text(entry.get("snippet"))
    return WebHit(title=title[:_TITLE_CHARS], url=url, snippet=snippet[:_SNIPPET_CHARS])


def _text(value: Any) -> str:
    return encodable(value) if isinstance(value, str) else ""
