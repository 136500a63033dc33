import pytest

from opensearch_lightning.rewards import LexicalQueryJudge, QueryQuality, searches
from opensearch_lightning.types import ErrorKind, Step
from tests.rewards.steps import TASK, answer, call


def text(query: str, shown: str = "", *, error: ErrorKind | None = None, hits: int | None = None) -> Step:
    return call("text_search", arguments={"q": query}, text=shown, error=error, hits=hits)


def image(name: str = "img_1", *, hits: int = 1, error: ErrorKind | None = None) -> Step:
    return call("image_search", arguments={"url": name}, text="1. Velmora (wiki)", hits=hits, error=error)


def quality(*steps: Step) -> QueryQuality:
    found = LexicalQueryJudge().quality(TASK, steps)
    assert found is not None
    return found


async def test_no_search_scores_nothing() -> None:
    steps = [call("crop", arguments={"image": "img_1"}), answer()]
    assert LexicalQueryJudge().quality(TASK, steps) is None
    assert await LexicalQueryJudge().score(TASK, steps) == 0.0


async def test_score_is_the_mean_of_four() -> None:
    steps = [text("mayor Velmora", "1. Velmora (wiki): The mayor of Velmora is Ada Quist.\n2. Tarn: no.", hits=2)]
    # relevance: both words are the question's; first query; one of two lines holds the query; text search alone.
    expected = QueryQuality(relevance=1.0, progression=1.0, signal=0.5, complementarity=0.5)
    assert quality(*steps) == expected
    assert await LexicalQueryJudge().score(TASK, steps) == pytest.approx(3 / 4)


def test_relevance_is_the_share_of_known_words() -> None:
    # question: mayor velmora; the first observation adds tarn, the failed one adds nothing.
    steps = [text("Velmora harbour", "1. Tarn"), text("Tarn", error=ErrorKind.TIMEOUT), text("castle mayor Tarn")]
    assert quality(*steps).relevance == pytest.approx((1 / 2 + 1 + 2 / 3) / 3)


def test_words_of_an_error_message_are_not_known() -> None:
    steps = [text("mayor", "Error: timeout.", error=ErrorKind.TIMEOUT), text("timeout error")]
    assert quality(*steps).relevance == pytest.approx((1 + 0) / 2)


def test_repeating_a_query_is_no_progress() -> None:
    assert quality(text("mayor Velmora"), text("Velmora MAYOR")).progression == 0.5
    # {mayor, velmora} and {mayor, tarn}: Jaccard 1/3
    assert quality(text("mayor Velmora"), text("mayor Tarn")).progression == pytest.approx((1 + 2 / 3) / 2)
    assert quality(image(), image()).progression == 0.5
    assert quality(image("img_1"), image("img_2")).progression == 1.0
    assert quality(image("velmora"), text("Velmora")).progression == 1.0


def test_signal_counts_what_came_back() -> None:
    hit, noise = "1. Velmora (wiki): mayor of Velmora", "2. Unrelated: page"
    assert quality(text("mayor Velmora", f"{hit}\n\n{noise}\n{noise}", hits=3)).signal == pytest.approx(1 / 3)
    assert quality(text("mayor Velmora", "No results.", hits=0)).signal == 0.0
    assert quality(text("mayor Velmora", hit, hits=1), image(hits=0)).signal == 0.5
    # half of the query's words make a line a signal, fewer do not
    assert quality(text("mayor Velmora", "Velmora: a town\nTarn: a river")).signal == 0.5
    assert quality(text("mayor Velmora castle", "Velmora: a town")).signal == 0.0
    # infrastructure errors are left out of the mean, the policy's own are not
    assert quality(text("mayor Velmora", hit), text("x", error=ErrorKind.TIMEOUT)).signal == 1.0
    assert quality(text("mayor Velmora", hit), text("x", error=ErrorKind.INVALID_ARGUMENT)).signal == 0.5
    assert quality(text("x", error=ErrorKind.TIMEOUT)).signal == 0.0


def test_both_kinds_of_search_complement_each_other() -> None:
    assert quality(text("mayor")).complementarity == 0.5
    assert quality(image()).complementarity == 0.5
    assert quality(text("mayor"), image()).complementarity == 1.0
    assert quality(text("mayor"), image(error=ErrorKind.UNKNOWN_IMAGE)).complementarity == 0.5
    assert quality(text("mayor"), image(error=ErrorKind.TIMEOUT)).complementarity == 1.0


def test_empty_and_ill_typed_queries_score_low() -> None:
    steps = [call("text_search", arguments={}, error=ErrorKind.INVALID_ARGUMENT)]
    assert quality(*steps) == QueryQuality(relevance=0.0, progression=1.0, signal=0.0, complementarity=0.0)
    assert quality(text("the of", "The of.")).relevance == 0.0


def test_aliases_and_chinese_are_read() -> None:
    step = call("web_search", tool=None, arguments={"query": "Velmora 市长"})
    (search,) = searches(TASK.question, [step])
    assert search.kind == "text"
    assert search.query == "Velmora 市长"
    assert search.words == {"velmora", "市", "长"}
    assert quality(image(error=ErrorKind.UNKNOWN_IMAGE)).relevance == 0.0


@pytest.mark.parametrize("argument", ["url", "image", "image_id", "image_url", "img"])
def test_every_name_of_the_image_argument_is_read(argument: str) -> None:
    (search,) = searches(TASK.question, [call("image_search", arguments={argument: "img_2", "top_k": 3})])
    assert search.words == {"img_2"}
