import pytest

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.tools import mcp_tools
from opensearch_lightning.tools.base_url import base_url, proxy_of
from opensearch_lightning.tools.online import ChatSummarizer, HttpUploader
from opensearch_lightning.tools.online.service import Service

WRONG = {
    "http://[::1": "is no URL",
    "http://localhost:99999": "is no URL",
    "ftp://user:hunter2@host": "holds a user name",
    "https://host/path?api_key=hunter2": "holds a user name, a query",
    "https://hunter2@host": "holds a user name",
    "https://host/#hunter2": "a fragment",
    "localhost:8080": "set one such as",
    "": "set one such as",
}
MADE = {
    "service": lambda url: Service("probe", url),
    "chat": lambda url: ChatSummarizer(model="m", base_url=url),
    "upload": lambda url: HttpUploader(url),
    "mcp": lambda url: mcp_tools(url=url) if url else base_url("an MCP server", url),
}


@pytest.mark.parametrize("client", MADE)
@pytest.mark.parametrize("url", WRONG)
def test_addresses_that_cannot_be_are_refused_without_their_secrets(client, url):
    with pytest.raises(ConfigurationError, match=WRONG[url]) as caught:
        MADE[client](url)
    assert "hunter2" not in str(caught.value)


def test_slashes_at_the_end_are_left_out():
    assert base_url("x", "https://host:8443/v1//") == "https://host:8443/v1"


def test_the_proxy_of_the_environment(monkeypatch):
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert proxy_of("https://google.serper.dev") is None
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert proxy_of("https://google.serper.dev") == "http://proxy.example:3128"
    assert proxy_of("http://google.serper.dev") is None
    assert proxy_of("https://inside.example") is None
    for own in ("https://localhost:1", "https://127.0.0.1:1", "https://[::1]:1"):
        assert proxy_of(own) is None
