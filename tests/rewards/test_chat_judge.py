"""Asking a model: what is sent, what is read, what fails, what is kept, counted and limited."""

import asyncio
import pickle
import sqlite3
import threading
import traceback
from dataclasses import replace

import pytest

from opensearch_lightning.errors import ConfigurationError, JudgeError, JudgeUnavailable
from opensearch_lightning.rewards import (
    ChatAccuracyJudge,
    ChatJudge,
    ChatModel,
    FailureLimit,
    JudgeFailure,
    TokenPrice,
)
from opensearch_lightning.tools import BackendPolicy, MissingKeyError, ResultCache
from opensearch_lightning.tools.threads import LoopThread
from tests.rewards.judge_server import JUDGE_KEY, JudgeServer
from tests.rewards.steps import TASK
from tests.tools.online.servers import InTurn, patience

RIGHT, WRONG = {"reason": "same", "correct": True}, {"reason": "another", "correct": False}


async def verdict(chat, response="Ada Quist"):
    return await ChatAccuracyJudge(chat).judge(TASK.question, response, TASK)


async def test_what_is_sent(server, ask):
    assert await verdict(ask()) is True
    body = server.asked[0]
    assert {name: body[name] for name in body if name not in ("messages", "response_format")} == {
        "model": "small",
        "temperature": 0.0,
        "max_tokens": 1024,
    }
    named = body["response_format"]["json_schema"]
    assert named["name"] == "accuracy"
    assert list(named["schema"]["properties"]) == named["schema"]["required"] == ["reason", "correct"]


async def test_what_is_none_is_not_sent_and_more_can_be(server, ask):
    own = {"temperature": None, "max_tokens": None, "extra_body": {"max_completion_tokens": 50}}
    await verdict(ask(model=own))
    assert set(server.asked[0]) == {"model", "messages", "response_format", "max_completion_tokens"}


@pytest.mark.parametrize(("answer_format", "sent"), [("json_object", {"type": "json_object"}), ("text", None)])
async def test_servers_without_structured_output(server, ask, answer_format, sent):
    assert await verdict(ask(model={"answer_format": answer_format})) is True
    assert server.asked[0].get("response_format") == sent


@pytest.mark.parametrize(
    "answer",
    [
        "correct: yes\nreasoning: same year",
        "<think>Is {this} right? correct: no</think>\ncorrect: yes",
        '<think>Hm.</think>```json\n{"correct": true}\n```',
        "Yes.",
    ],
)
async def test_a_plain_answer_where_that_was_asked_for(server, ask, answer):
    server.answer = answer
    assert await verdict(ask(model={"answer_format": "text"})) is True


CHOICE = {"finish_reason": "stop", "message": {"content": '{"reason": "", "correct": true}'}}
UNREADABLE = [
    ("correct: yes", JudgeFailure.UNREADABLE, "it wrote 'correct: yes'"),
    ('{"reason": "", "correct": true} I am sure.', JudgeFailure.UNREADABLE, "it wrote"),
    ('```json\n{"correct": true}\n```', JudgeFailure.UNREADABLE, "it wrote"),
    ('{"correct": true, "correct": false}', JudgeFailure.UNREADABLE, "it wrote"),
    ('{"correct": "yes"}', JudgeFailure.UNREADABLE, "it wrote"),
    ('{"correct": 1}', JudgeFailure.UNREADABLE, "it wrote"),
    ('{"correct": true, "sure": NaN}', JudgeFailure.UNREADABLE, "it wrote"),
    ('{"reason": "', JudgeFailure.UNREADABLE, "it wrote"),
    ('{"correct":' + "[" * 100_000, JudgeFailure.UNREADABLE, "it wrote"),
    (f"the key is {JUDGE_KEY}", JudgeFailure.UNREADABLE, r"the key is \*\*\*"),
    ("[]", JudgeFailure.UNREADABLE, "it wrote"),
    (" ", JudgeFailure.UNREADABLE, "wrote nothing"),
    ({**CHOICE, "message": {"content": None}}, JudgeFailure.UNREADABLE, "wrote nothing"),
    ({**CHOICE, "message": {"content": [{"text": "x"}]}}, JudgeFailure.UNREADABLE, "wrote nothing"),
    ({**CHOICE, "finish_reason": "tool_calls"}, JudgeFailure.UNREADABLE, "ended with 'tool_calls'"),
    ({**CHOICE, "finish_reason": "length"}, JudgeFailure.CUT, "raise max_tokens"),
    ({**CHOICE, "finish_reason": "content_filter"}, JudgeFailure.REFUSED, "refused"),
    ({"finish_reason": "stop", "message": {"content": None, "refusal": "No."}}, JudgeFailure.REFUSED, "refused"),
]


@pytest.mark.parametrize(("answer", "kind", "message"), UNREADABLE)
async def test_an_answer_that_cannot_be_read_is_asked_for_again(server, ask, answer, kind, message):
    answers = [answer, answer, RIGHT]
    server.answer = lambda _: answers.pop(0) if len(answers) > 1 else answers[0]
    chat = ask(asks=3)
    assert await verdict(chat) is True
    counted = chat.drain()
    assert (counted.calls, counted.requests, counted.unreadable, counted.failures) == (1, 3, 2, {})

    server.answer = answer
    with pytest.raises(JudgeError, match=message) as caught:
        await verdict(ask(asks=2))
    assert f"judge small (accuracy/1) gave no judgement ({kind}: " in str(caught.value)
    assert JUDGE_KEY not in str(caught.value)
    assert len(server.asked) == 5


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("silent", JudgeFailure.TIMEOUT),
        ("drip", JudgeFailure.TIMEOUT),
        ("busy", JudgeFailure.RATE_LIMITED),
        ("away", JudgeFailure.RATE_LIMITED),
        ("broken", JudgeFailure.BACKEND_ERROR),
        ("refuses", JudgeFailure.BACKEND_ERROR),
        ("half", JudgeFailure.BACKEND_ERROR),
        ("html", JudgeFailure.BACKEND_ERROR),
        ("deep", JudgeFailure.BACKEND_ERROR),
        ("huge", JudgeFailure.BACKEND_ERROR),
        ("inward", JudgeFailure.BACKEND_ERROR),
        ([], JudgeFailure.BACKEND_ERROR),
        ({"choices": []}, JudgeFailure.BACKEND_ERROR),
        ({"choices": [{"message": None}]}, JudgeFailure.BACKEND_ERROR),
        ({"choices": [7]}, JudgeFailure.BACKEND_ERROR),
    ],
)
async def test_servers_that_misbehave(server, ask, caplog, fault, kind):
    caplog.set_level("DEBUG")
    server.faults[None] = fault
    chat = ask(model={"timeout_s": patience(fault)}, asks=3)
    with pytest.raises(JudgeError) as caught:
        await verdict(chat)
    assert chat.drain().failures == {kind: 1}
    # That is for the policy's retries to mend, of which there are none here.
    assert len(server.asked) == 1
    assert JUDGE_KEY not in "".join(traceback.format_exception(caught.value)) + caplog.text


async def test_a_server_that_is_not_there(ask):
    chat = ask(model={"base_url": "http://127.0.0.1:1/v1"})
    with pytest.raises(JudgeError, match="unreachable: small cannot be reached"):
        await verdict(chat)
    assert chat.drain().failures == {JudgeFailure.UNREACHABLE: 1}


async def test_a_failing_server_is_tried_again(server, ask):
    server.faults[None] = InTurn(["busy a moment", "broken", "half"])
    chat = ask(model={"policy": BackendPolicy(retries=3, backoff_s=0.01)})
    assert await verdict(chat) is True
    counted = chat.drain()
    assert (counted.requests, counted.retries, counted.unreadable, counted.failures) == (4, 3, 0, {})


async def test_a_silent_try_leaves_time_for_the_next(server, ask):
    server.faults[None] = InTurn(["silent"])
    assert await verdict(ask(model={"timeout_s": 1.0, "policy": BackendPolicy(retries=1, backoff_s=0.01)})) is True
    assert len(server.asked) == 2


async def test_a_wait_that_the_server_asks_for_is_not_cut_short(server, ask):
    server.faults[None] = "busy"  # for 7 seconds, when there are 3
    with pytest.raises(JudgeError, match="rate_limited"):
        await verdict(ask(model={"policy": BackendPolicy(retries=5, backoff_s=0.01, timeout_s=3)}))
    assert len(server.asked) == 1


async def test_requests_at_once_are_limited(server, ask):
    server.answers_after_s = 0.1
    chat = ask(model={"policy": BackendPolicy(max_concurrency=2)})
    assert all(await asyncio.gather(*(verdict(chat, f"response {i}") for i in range(8))))
    assert len(server.asked) == 8
    assert server.most_open == 2


async def test_judges_that_share_a_model_share_its_limits(server, ask):
    server.answers_after_s = 0.05
    one = ask(model={"policy": BackendPolicy(max_concurrency=1)})
    other = ChatJudge(one.model)
    await asyncio.gather(*(verdict(chat, f"response {i}") for chat in (one, other) for i in range(3)))
    assert len(server.asked) == 6
    assert server.most_open == 1


async def test_an_equal_question_is_asked_once(server, ask, tmp_path):
    path = tmp_path / "judgements.sqlite"
    server.answer = lambda record: RIGHT if record["response"] == "Ada Quist" else WRONG
    first = ask(cache=ResultCache(path))
    assert [await verdict(first), await verdict(first), await verdict(first, "Bo")] == [True, True, False]
    assert len(server.asked) == 2
    assert (first.drain().cache_hits, first.drain().cache_hits) == (1, 0)
    await first.aclose()

    again = ask(cache=ResultCache(path))
    server.faults[None] = "broken"
    assert [await verdict(again), await verdict(again, "Bo")] == [True, False]
    counted = again.drain()
    assert (counted.calls, counted.cache_hits, counted.requests, counted.latency_p50_s) == (2, 2, 0, None)


async def test_what_the_cache_goes_by(server, ask, tmp_path, monkeypatch):
    cache = ResultCache(tmp_path / "judgements.sqlite")
    for changed in ({}, {}, {"name": "large"}, {"temperature": 0.5}, {"answer_format": "text"}):
        await verdict(ask(model=changed, cache=cache))
    assert len(server.asked) == 4
    chat = ask(cache=cache)
    await ChatAccuracyJudge(chat).judge("Another question?", "Ada Quist", TASK)
    await ChatAccuracyJudge(chat).judge(TASK.question, "Ada Quist", replace(TASK, aliases=("A. Q.",)))
    assert len(server.asked) == 6
    from opensearch_lightning.rewards import chat_accuracy

    monkeypatch.setattr(chat_accuracy, "ACCURACY", replace(chat_accuracy.ACCURACY, version="accuracy/999"))
    await verdict(ask(cache=cache))
    assert len(server.asked) == 7


async def test_failures_are_not_kept(server, ask, tmp_path):
    chat = ask(cache=ResultCache(tmp_path / "judgements.sqlite"))
    for fault, answer in (("broken", RIGHT), (None, "prose")):
        server.faults, server.answer = {None: fault}, answer
        with pytest.raises(JudgeError):
            await verdict(chat)
    server.answer = WRONG
    assert await verdict(chat) is False
    assert len(server.asked) == 3


async def test_what_is_kept_and_no_longer_read_is_asked_for_anew(server, ask, tmp_path):
    path = tmp_path / "judgements.sqlite"
    chat = ask(cache=ResultCache(path))
    await verdict(chat)
    await chat.aclose()
    with sqlite3.connect(path) as file:
        file.execute("UPDATE results SET text = 'prose'")
    file.close()
    assert await verdict(ask(cache=ResultCache(path))) is True
    assert len(server.asked) == 2


@pytest.mark.parametrize("answer", [RIGHT, "prose"])
async def test_equal_questions_at_the_same_time_are_one(server, ask, answer):
    server.answer = answer
    chat = ask()
    outcomes = await asyncio.gather(*(verdict(chat) for _ in range(5)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [bool if answer is RIGHT else JudgeError] * 5
    counted = chat.drain()
    assert (counted.calls, counted.requests, sum(counted.failures.values())) == (5, 1, 0 if answer is RIGHT else 1)
    assert counted.cache_hits == (4 if answer is RIGHT else 0)


async def test_tokens_and_cost(server, ask):
    server.usage = (1_000_000, 200)
    answers = ["prose", RIGHT, WRONG]
    server.answer = lambda _: answers.pop(0)
    chat = ask(model={"price": TokenPrice(input=2.5, output=10)}, asks=2)
    await verdict(chat)
    await verdict(chat, "Bo")
    counted = chat.drain()
    # The unreadable answer was paid for as well.
    assert (counted.input_tokens, counted.output_tokens) == (3_000_000, 600)
    assert counted.cost == pytest.approx(3 * 2.5 + 3 * 200 * 10 / 1e6)
    assert 0 < counted.latency_p50_s <= counted.latency_p95_s
    assert chat.drain().cost == 0


async def test_a_server_that_does_not_tell_its_tokens(server, ask, caplog):
    server.usage = None
    chat = ask(model={"price": TokenPrice(input=1, output=1)})
    await verdict(chat)
    await verdict(chat, "Bo")
    assert [record.message for record in caplog.records] == ["small does not tell its tokens: its cost is not counted"]
    assert chat.drain().input_tokens == 0
    free = ask()
    await verdict(free)
    assert free.drain().cost is None


async def test_too_many_failures_end_the_run(server, ask):
    chat = ask(failures=FailureLimit(0.5, window=4, least=3))
    server.answer = lambda record: RIGHT if record["response"].startswith("good") else "prose"
    await verdict(chat, "good")
    for response in ("bad 1", "good 2", "bad 3"):
        if response.startswith("good"):
            await verdict(chat, response)
            continue
        with pytest.raises(JudgeError):
            await verdict(chat, response)
    # Two of four; the first of them leaves the window, and the third failure is too much.
    with pytest.raises(JudgeUnavailable) as caught:
        await verdict(chat, "bad 4")
    assert str(caught.value) == (
        "judge small (accuracy/1) failed on 3 of its last 4 judgements, more than max_failed=0.5 allows; the last: "
        f"unreadable: it wrote 'prose'; check that {server.base_url} answers, the model's name, its key and "
        "answer_format=json_schema, then go on from the last checkpoint"
    )
    assert not isinstance(caught.value, JudgeError)


async def test_few_failures_of_few_judgements_are_borne(server, ask):
    chat = ask()
    server.faults[None] = "broken"
    for i in range(15):
        with pytest.raises(JudgeError):
            await verdict(chat, f"response {i}")
    with pytest.raises(JudgeUnavailable, match="16 of its last 16"):
        await verdict(chat, "response 15")


async def test_kept_judgements_do_not_hide_a_judge_that_is_down(server, ask, tmp_path):
    chat = ask(cache=ResultCache(), failures=FailureLimit(0.5, window=8, least=4))
    await verdict(chat)
    server.faults[None] = "broken"
    for i in range(3):
        for _ in range(10):
            assert await verdict(chat) is True
        with pytest.raises(JudgeUnavailable if i == 2 else JudgeError):
            await verdict(chat, f"response {i}")


@pytest.mark.parametrize(
    ("share", "options", "message"),
    [
        (1.5, {}, "max_failed is 1.5"),
        (float("nan"), {}, "max_failed is nan"),
        (0.5, {"least": 0}, "least is 0"),
        (0.5, {"window": 8}, "least is 16, window 8"),
    ],
)
def test_limits_of_failure_that_cannot_be(share, options, message):
    with pytest.raises(ConfigurationError, match=message):
        FailureLimit(share, **options)


@pytest.fixture
def serving(monkeypatch):
    """A server on a loop of its own, so that the tests' loops may come and go."""
    monkeypatch.setenv("JUDGE_KEY", JUDGE_KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    thread, server = LoopThread(), JudgeServer(RIGHT)
    asyncio.run(thread.run(server.__aenter__()))
    yield server
    asyncio.run(thread.run(server.__aexit__()))
    thread.stop()


def test_it_works_from_one_loop_after_another_and_from_two_at_once(serving):
    chat = ChatJudge(ChatModel("small", base_url=serving.base_url, api_key_env="JUDGE_KEY"))
    assert [asyncio.run(verdict(chat, f"response {i}")) for i in range(3)] == [True] * 3
    found = []
    threads = [
        threading.Thread(target=lambda i=i: found.append(asyncio.run(verdict(chat, f"other {i}")))) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
    assert len(serving.asked) == 7
    asyncio.run(chat.aclose())


async def test_it_closes_cleanly_and_works_again(server, ask):
    chat = ask(cache=ResultCache())
    for i in range(2):
        assert await verdict(chat, f"response {i}") is True
        assert server.connections == 1
        await chat.aclose()
        await server.all_gone()
        assert not [thread for thread in threading.enumerate() if thread.name == "tool-loop"]


async def test_cancelling_closes_the_request_and_counts_as_nothing(server, ask):
    server.faults[None] = "silent"
    chat = ask(failures=FailureLimit(0.0, window=1, least=1))
    task = asyncio.create_task(verdict(chat))
    async with asyncio.timeout(10):
        await server.busy.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await server.all_closed()
    server.faults.clear()
    assert await verdict(chat) is True
    assert chat.drain().failures == {}


def test_a_key_that_is_missing_is_named(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(MissingKeyError, match="JUDGE_KEY is not set"):
        ChatModel("small", api_key_env="JUDGE_KEY")


def test_keys_are_not_shown(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", JUDGE_KEY)
    model = ChatModel("small", api_key_env="JUDGE_KEY")
    assert JUDGE_KEY not in repr(vars(model))
    assert JUDGE_KEY.encode() not in pickle.dumps(vars(model)["_key"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "model is empty"),
        ({"base_url": "localhost:8000"}, "address of small"),
        ({"answer_format": "xml"}, "answer_format of small is 'xml': set one of json_schema, json_object, text"),
        ({"max_tokens": 0}, "max_tokens of small is 0"),
        ({"timeout_s": 0}, "timeout_s of small is 0"),
    ],
)
def test_settings_that_cannot_be(options, message):
    with pytest.raises(ConfigurationError, match=message):
        ChatModel(**{"name": "small", "api_key_env": None, **options})


@pytest.mark.parametrize("asks", [0, 1.5, True])
def test_it_asks_at_least_once(asks):
    with pytest.raises(ConfigurationError, match="asks of a judge"):
        ChatJudge(ChatModel("small", api_key_env=None), asks=asks)


@pytest.mark.parametrize("price", [(-1, 0), (0, float("inf")), (float("nan"), 0)])
def test_prices_that_cannot_be(price):
    with pytest.raises(ConfigurationError, match="prices of a million tokens"):
        TokenPrice(input=price[0], output=price[1])
