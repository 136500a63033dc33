"""Readers against a strict server that speaks Jina Reader's API, servers of pages, and servers that misbehave."""

import pytest

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.tools import BackendPolicy
from opensearch_lightning.tools.online.page_readers import DirectReader, JinaReader
from opensearch_lightning.types import ErrorKind
from tests.tools.online.servers import JINA_KEY, KEYS, JinaServer, PageServer, patience

PAGE = "https://pages.example/velmora"
ARTICLE = "<p>Velmora is a port on the coast. Its emblem is a stone tower with two windows and a blue door.</p>" * 3


@pytest.fixture
async def jina(monkeypatch):
    monkeypatch.setenv("JINA_API_KEY", JINA_KEY)
    async with JinaServer(pages={PAGE: "# Velmora\n\nA port."}) as started:
        yield started


@pytest.fixture
async def make(jina):
    made = []

    def build(**options):
        made.append(JinaReader(base_url=jina.url, **{"resolve_names": False, **options}))
        return made[-1]

    yield build
    for reader in made:
        await reader.aclose()


async def test_a_page_by_jina(jina, make):
    page = await make().read(PAGE)
    assert (page.title, page.text) == (f"Title of {PAGE}", "# Velmora\n\nA port.")
    assert jina.asked == [PAGE]


async def test_jina_without_a_key(jina, make, monkeypatch):
    monkeypatch.delenv("JINA_API_KEY")
    jina.key = None
    assert (await make(api_key_env=None).read(PAGE)).text
    with pytest.raises(ConfigurationError, match="JINA_API_KEY"):
        make()


@pytest.mark.parametrize(
    "url",
    [
        "https://pages.example/a?q=1&r=2#part",
        "https://pages.example/a b/ü?x=é 北京",
        "https://pages.example/a%20b?u=https%3A%2F%2Fother.example%2F%3Fa%26b",
        "https://pages.example/a+b%2Bc/../d//e?x#/route?y=1",
        "http://pages.example:8080/%E9%FF",
        "https://bücher.example/",
        "http://93.184.215.14/",
        "http://[2606:2800:21f:cb07:6820:80da:af6b:8b2c]/",
    ],
)
async def test_every_url_arrives_as_it_is(jina, make, url):
    jina.pages[url] = "here"
    assert (await make().read(url)).text == "here"
    assert jina.asked == [url]


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://pages.example/",
        "pages.example",
        "http:///x",
        "http://user:word@pages.example/",
        "http://user@pages.example/",
        "http://127.0.0.1/",
        "http://127.1/",
        "http://2130706433/",
        "http://0x7f.1/",
        "http://0177.0.0.1/",
        "http://127.0.0.1./",
        "http://127。0。0。1/",
        "http://①②⑦.0.0.1/",
        "http://%31%32%37.0.0.1/",
        "http://127.0.0.1\\.pages.example/",
        "http://[::1]/",
        "http://[::ffff:169.254.169.254]/",
        "http://[fe80::1%25eth0]/",
        "http://169.254.169.254/latest/meta-data",
        "http://10.0.0.1/",
        "http://100.64.0.1/",
        "http://localhost/",
        "http://LOCALHOST./",
        "http://x.localhost/",
        "http://intranet/",
        "http://printer.local/",
        "http://metadata.google.internal/",
        "http://a..b.example/",
        "http://\ud83d.example/",
        "http://pages.example/\ud83d",
        "http://" + "x" * 70 + ".example/",
    ],
)
async def test_what_is_not_public_is_not_sent_even_without_looking_up(jina, make, url):
    with pytest.raises(ToolError) as caught:
        await make().read(url)
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    caught.value.message.encode()
    assert jina.asked == jina.refused == []


async def test_names_are_looked_up(jina, make, monkeypatch):
    table = {
        "inward.example": ["127.0.0.1"],
        "mixed.example": ["93.184.215.14", "10.0.0.7"],
        "pages.example": ["1.1.1.1"],
    }

    def getaddrinfo(host, port, *_, **__):
        if host not in table:
            raise OSError("unknown")
        return [(2, 1, 6, "", (address, port)) for address in table[host]]

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    reader = make(resolve_names=True)
    for host, kind in (
        ("inward", ErrorKind.INVALID_ARGUMENT),
        ("mixed", ErrorKind.INVALID_ARGUMENT),
        ("nowhere", ErrorKind.UNREACHABLE),
    ):
        with pytest.raises(ToolError) as caught:
            await reader.read(f"http://{host}.example/")
        assert caught.value.kind is kind
    assert jina.asked == []
    assert (await reader.read(PAGE)).text


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("silent", ErrorKind.TIMEOUT, "in time"),
        ("drip", ErrorKind.TIMEOUT, "in time"),
        ("busy", ErrorKind.RATE_LIMITED, "Too many"),
        ("broken", ErrorKind.BACKEND_ERROR, "status 500"),
        ("refuses", ErrorKind.BACKEND_ERROR, "JINA_API_KEY"),
        ("half", ErrorKind.BACKEND_ERROR, "rightly"),
        ("html", ErrorKind.BACKEND_ERROR, "no JSON"),
        ("no json", ErrorKind.BACKEND_ERROR, "no JSON"),
        ("huge", ErrorKind.BACKEND_ERROR, "more than 5000000 bytes"),
        ("inward", ErrorKind.BACKEND_ERROR, "redirects"),
        ([1], ErrorKind.BACKEND_ERROR, "without a page"),
        ({"code": 200}, ErrorKind.BACKEND_ERROR, "without a page"),
        ({"code": 200, "data": "text"}, ErrorKind.BACKEND_ERROR, "without a page"),
        ({"code": 451, "data": {"content": "x"}}, ErrorKind.BACKEND_ERROR, "without a page"),
        ({"code": 200, "data": {"content": " \n"}}, ErrorKind.BACKEND_ERROR, "no text"),
        ({"code": 200, "data": {"content": None}}, ErrorKind.BACKEND_ERROR, "no text"),
        (
            {"code": 200, "data": {"content": "Oops", "warning": "Target URL returned error 404: Not Found"}},
            ErrorKind.BACKEND_ERROR,
            "itself answered with an error",
        ),
    ],
)
async def test_jina_misbehaves(jina, make, fault, kind, message):
    jina.faults[None] = fault
    with pytest.raises(ToolError, match=message) as caught:
        await make(timeout_s=patience(fault)).read(PAGE)
    assert caught.value.kind is kind
    assert not any(key in repr(caught.value) for key in KEYS)


async def test_a_title_of_another_kind_is_none_and_a_key_is_taken_out(jina, make):
    jina.pages[PAGE] = {"title": 7, "content": f"The key is {JINA_KEY}.", "warning": "This page may be cached"}
    page = await make().read(PAGE)
    assert (page.title, page.text) == ("", "The key is ***.")


@pytest.mark.parametrize(
    ("timeout_s", "policy_s", "asked"), [(15, None, "14"), (0.5, None, "1"), (15, 9.5, "8"), (600, None, "180")]
)
async def test_jina_is_asked_for_less_time_than_is_left(jina, make, timeout_s, policy_s, asked):
    headers = []
    understand = jina._understand
    jina._understand = lambda request: headers.append(request.headers["X-Timeout"]) or understand(request)
    policy = None if policy_s is None else BackendPolicy(timeout_s=policy_s)
    await make(timeout_s=timeout_s, policy=policy).read(PAGE)
    assert headers == [asked]


@pytest.fixture
async def pages():
    async with PageServer() as started:
        yield started


@pytest.fixture
async def read(pages):
    made = []

    async def fetch(content_type, body, **options):
        pages.pages["page"] = (content_type, body)
        made.append(DirectReader(allowed=lambda address: str(address) == "127.0.0.1", **options))
        return await made[-1].read(f"{pages.url}/page")

    yield fetch
    for reader in made:
        await reader.aclose()


async def test_html_becomes_text(read):
    source = f"<html><head><title>Velmora &amp; coast</title></head><body><nav>Home</nav>{ARTICLE}<script>x()</script>"
    page = await read("text/html; charset=utf-8", source.encode())
    assert page.title == "Velmora & coast"
    assert "Its emblem is a stone tower" in page.text
    assert "x()" not in page.text and "<p>" not in page.text


async def test_a_short_page_is_read_too(read):
    page = await read("text/html", b"<html><body><p>Short.</p></body></html>")
    assert page.text == "Short."


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/json", "application/ld+json; charset=utf-8", "text/markdown"]
)
async def test_texts_come_as_they_are(read, content_type):
    text = '{"a": "<p>ü</p>"}\n'
    page = await read(content_type, text.encode())
    assert (page.title, page.text) == ("", text)


@pytest.mark.parametrize(
    ("content_type", "body", "text"),
    [
        ("text/plain; charset=iso-8859-1", "naïve – café".encode("cp1252"), "naïve – café"),
        ("text/plain; charset=windows-1251", "Велмора".encode("cp1251"), "Велмора"),
        ("text/plain; charset=Shift_JIS", "東京".encode("shift_jis"), "東京"),
        ("text/plain; charset=gb2312", "北京镕".encode("gb18030"), "北京镕"),
        ("text/plain; charset=utf-16", "\ufeffwide".encode("utf-16-le"), "wide"),
        ("text/plain", "\ufeffmarked".encode(), "marked"),
        ("text/plain", "café".encode("cp1252"), "café"),
        ("text/plain; charset=nonsense", "café".encode(), "café"),
        ("text/plain; charset=punycode", "café".encode(), "café"),
        ("text/plain; charset=utf-8", b"broken \xff here", "broken \ufffd here"),
    ],
)
async def test_charsets(read, content_type, body, text):
    assert (await read(content_type, body)).text == text


async def test_html_says_its_charset_itself(read):
    source = f'<html><head><meta http-equiv="x" content="text/html; charset=windows-1251"></head><body>{ARTICLE}'
    page = await read("text/html", source.replace("Velmora", "Велмора").encode("cp1251"))
    assert "Велмора is a port" in page.text
    page = await read("text/html; charset=utf-8", source.replace("Velmora", "Велмора").encode())
    assert "Велмора is a port" in page.text


@pytest.mark.parametrize(
    ("content_type", "body", "message"),
    [
        ("application/pdf", b"%PDF-1.7", "'application/pdf', which is not read"),
        ("image/png", b"\x89PNG", "not read"),
        ("application/octet-stream", b"hello", "not read"),
        ("text/html", b"", "no text"),
        ("text/html", b"<html><body><script>1</script></body></html>", "no text"),
        ("text/plain", b" \n ", "no text"),
        ("text/html", b"<div>" * 100_000, "no text|could not be turned"),
        ("text/plain", b"x" * 2000, "larger than 1000 bytes"),
    ],
)
async def test_pages_that_are_not_read(read, content_type, body, message):
    limit = {"max_bytes": 1000} if len(body) == 2000 else {}
    with pytest.raises(ToolError, match=message) as caught:
        await read(content_type, body, **limit)
    assert caught.value.kind is ErrorKind.BACKEND_ERROR


async def test_only_the_beginning_of_long_html_is_parsed(read):
    source = f"<html><body>{ARTICLE}" + "<p>The end of the page is far away.</p>" * 100
    page = await read("text/html", source.encode(), max_html_chars=len(ARTICLE) + 20)
    assert "stone tower" in page.text and "far away" not in page.text


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("silent", ErrorKind.TIMEOUT),
        ("drip", ErrorKind.TIMEOUT),
        ("busy", ErrorKind.RATE_LIMITED),
        ("half", ErrorKind.BACKEND_ERROR),
        ("inward", ErrorKind.INVALID_ARGUMENT),
    ],
)
async def test_hosts_that_misbehave(pages, read, fault, kind):
    pages.faults[None] = fault
    with pytest.raises(ToolError) as caught:
        await read("text/plain", b"x", timeout_s=patience(fault))
    assert caught.value.kind is kind


async def test_this_machine_is_not_contacted(pages):
    reader = DirectReader()
    for host in ("127.0.0.1", "localhost"):
        with pytest.raises(ToolError) as caught:
            await reader.read(f"http://{host}:{pages.port}/page")
        assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    await reader.aclose()
    assert pages.asked == []


def test_limits_that_cannot_be():
    with pytest.raises(ConfigurationError, match="max_html_chars is 0"):
        DirectReader(max_html_chars=0)
