"""Serper against a strict server that speaks its API, and one that misbehaves."""

import pickle

import pytest

from opensearch_lightning.errors import ConfigurationError, ToolError
from opensearch_lightning.tools import BackendPolicy
from opensearch_lightning.tools.online.serper import Serper
from opensearch_lightning.tools.secrets import MissingKeyError
from opensearch_lightning.types import ErrorKind
from tests.tools.online.servers import KEYS, SERPER_KEY, InTurn, SerperServer, patience

RESULTS = [
    {"title": "Velmora", "link": "https://a.example/velmora", "snippet": "A port.", "sitelinks": []},
    {"title": "Emblem", "link": "https://b.example/emblem", "snippet": "A stone tower.", "date": "2 days ago"},
]


@pytest.fixture
async def server(monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", SERPER_KEY)
    async with SerperServer(*RESULTS) as started:
        yield started


@pytest.fixture
async def make(server):
    made = []

    def build(**options):
        made.append(Serper(base_url=server.url, **options))
        return made[-1]

    yield build
    for engine in made:
        await engine.aclose()


async def search(engine, query="emblem of Velmora", language="en", limit=5):
    return await engine.search(query, language=language, limit=limit)


async def test_a_search(server, make):
    hits = await search(make(gl="de"), "Wappen von Velmora", "de", 2)
    assert [(hit.title, hit.url, hit.snippet) for hit in hits] == [
        ("Velmora", "https://a.example/velmora", "A port."),
        ("Emblem", "https://b.example/emblem", "A stone tower."),
    ]
    assert server.asked == [{"q": "Wappen von Velmora", "hl": "de", "num": 2, "gl": "de"}]


async def test_never_more_than_asked_for(server, make):
    server.faults[None] = {"organic": RESULTS * 4}
    assert len(await search(make(), limit=3)) == 3


@pytest.mark.parametrize("answer", [{"organic": []}, {"searchParameters": {"q": "x"}, "relatedSearches": []}])
async def test_no_hits_are_no_error(server, make, answer):
    server.faults[None] = answer
    assert await search(make()) == []


async def test_entries_that_are_none_are_left_out(server, make):
    server.results = [
        None,
        "text",
        {"title": "no link"},
        {"title": "bad link", "link": 7},
        {"link": " https://c.example/bare "},
        {"title": ["list"], "link": "https://d.example/", "snippet": {"a": 1}},
        {"title": "half a pair \ud83d", "link": "https://e.example/\ud83d", "snippet": "\udc00"},
        {"title": "far too long", "link": "https://f.example/" + "x" * 3000},
    ]
    hits = await search(make(), limit=10)
    assert [(hit.title, hit.url, hit.snippet) for hit in hits] == [
        ("", "https://c.example/bare", ""),
        ("", "https://d.example/", ""),
        ("half a pair ?", "https://e.example/?", "?"),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        "text",
        3,
        {"organic": None},
        {"organic": {"link": "x"}},
        {"organic": "x"},
        {"organic": 3},
        {"organic": [{"title": "x"}]},
    ],
)
async def test_answers_that_hold_no_results(server, make, answer):
    server.faults[None] = answer
    with pytest.raises(ToolError, match="without a list|without links") as caught:
        await search(make())
    assert caught.value.kind is ErrorKind.BACKEND_ERROR


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("silent", ErrorKind.TIMEOUT, "in time"),
        ("drip", ErrorKind.TIMEOUT, "in time"),
        ("busy", ErrorKind.RATE_LIMITED, "Too many"),
        ("broken", ErrorKind.BACKEND_ERROR, "status 500"),
        ("refuses", ErrorKind.BACKEND_ERROR, "SERPER_API_KEY"),
        ("half", ErrorKind.BACKEND_ERROR, "rightly"),
        ("html", ErrorKind.BACKEND_ERROR, "no JSON"),
        ("no json", ErrorKind.BACKEND_ERROR, "no JSON"),
        ("deep", ErrorKind.BACKEND_ERROR, "no JSON"),
        ("huge", ErrorKind.BACKEND_ERROR, "more than 2000000 bytes"),
        ("inward", ErrorKind.BACKEND_ERROR, "redirects"),
    ],
)
async def test_servers_that_misbehave(server, make, fault, kind, message):
    server.faults[None] = fault
    with pytest.raises(ToolError, match=message) as caught:
        await search(make(timeout_s=patience(fault)))
    assert caught.value.kind is kind
    assert caught.value.retry_after_s == (7.0 if fault == "busy" else None)
    assert not any(key in repr(caught.value) for key in KEYS)
    assert len(server.asked) == 1


async def test_its_own_policy_tries_again(server, make):
    server.faults[None] = InTurn(["broken", "busy a moment"])
    assert len(await search(make(policy=BackendPolicy(retries=2, backoff_s=0.01)))) == 2
    assert len(server.asked) == 3


async def test_a_key_that_is_sent_back_is_taken_out(server, make):
    server.results = [{"title": f"key {SERPER_KEY}", "link": "https://a.example/", "snippet": SERPER_KEY}]
    assert SERPER_KEY not in repr(await search(make()))


def test_keys_come_by_the_name_of_a_variable(monkeypatch):
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    with pytest.raises(MissingKeyError, match="SERPER_API_KEY"):
        Serper()
    with pytest.raises(ConfigurationError) as caught:
        Serper(api_key_env=SERPER_KEY)
    assert SERPER_KEY not in str(caught.value)
    monkeypatch.setenv("OTHER_KEY", SERPER_KEY)
    engine = Serper(api_key_env="OTHER_KEY")
    assert SERPER_KEY not in repr(engine) + repr(vars(engine))
    assert SERPER_KEY.encode() not in pickle.dumps(engine)
