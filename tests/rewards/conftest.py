"""A judging server on loopback, and judges that ask it."""

import pytest

from opensearch_lightning.rewards import ChatJudge, ChatModel
from opensearch_lightning.tools import BackendPolicy
from tests.rewards.judge_server import JUDGE_KEY, JudgeServer


@pytest.fixture
async def server(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", JUDGE_KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    async with JudgeServer({"reason": "same", "correct": True}) as started:
        yield started


@pytest.fixture
async def ask(server):
    """Makes a :class:`ChatJudge` of the server: its own options, and those of its model under ``model``."""
    made = []

    def build(*, model=None, **options):
        settings = {"base_url": server.base_url, "api_key_env": "JUDGE_KEY", "policy": BackendPolicy()}
        made.append(ChatJudge(ChatModel(**{"name": "small", **settings, **(model or {})}), **{"asks": 1, **options}))
        return made[-1]

    yield build
    for judge in made:
        await judge.aclose()
