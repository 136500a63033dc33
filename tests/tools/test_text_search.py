import time

import pytest

from opensearch_lightning.errors import ConfigurationError, DataError
from opensearch_lightning.tools import Document, ExtractiveSummarizer, ImageBook, TextIndex
from opensearch_lightning.tools.analysis import query_words, words
from opensearch_lightning.tools.local import search_text
from opensearch_lightning.tools.summary import sentences

PAGES = [
    Document(id="a", title="Lindal", url="wiki/Lindal", text="Lindal is a port. Its mayor is Ada Quill. It has a zoo."),
    Document(id="b", title="Torvik", url="wiki/Torvik", text="Torvik is a city near Lindal. Its mayor is Bo Renn."),
    Document(id="c", title="Café Ünal", url="wiki/Cafe", text="A coffee house. It opened in 1932."),
    Document(id="d", title="北京大学", url="wiki/PKU", text="北京大学是一所大学。它成立于1898年。"),
    Document(id="e", title="Log", url="wiki/Log", text='The page says: "Error executing tool". It lists crashes.'),
]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return TextIndex.build(tmp_path_factory.mktemp("index") / "text", PAGES)


def titles(hits):
    return [hit.title for hit in hits]


def test_title_counts_more_than_text(index):
    assert titles(index.search("Lindal")) == ["Lindal", "Torvik"]
    assert titles(index.search("mayor of Torvik"))[0] == "Torvik"


def test_hit_carries_the_whole_page(index):
    hit = index.search("zoo")[0]
    assert (hit.id, hit.title, hit.url, hit.text) == ("a", "Lindal", "wiki/Lindal", PAGES[0].text)
    assert hit.score > 0


def test_word_forms_accents_and_chinese(index):
    assert titles(index.search("ports")) == ["Lindal"]
    assert titles(index.search("cafe unal")) == ["Café Ünal"]
    assert titles(index.search("大学")) == ["北京大学"]


def test_query_is_text_not_syntax(index):
    for query in ['title:(Lindal "', "AND OR NOT", "+-*?", "", "   ", "zoo AND", "x" * 5000]:
        index.search(query)
    assert titles(index.search('zoo AND (mayor: "')) == ["Lindal", "Torvik"]
    assert index.search("+-*?") == []
    assert index.search("unheardof") == []


def test_top_k_and_stop_words(index):
    assert len(index.search("mayor", top_k=1)) == 1
    assert query_words("What is the capital of Lindal?") == words("capital Lindal")
    assert query_words("the who") == ["the", "who"]


def test_index_survives_reopening_and_refuses_bad_paths(index, tmp_path):
    path = tmp_path / "text"
    TextIndex.build(path, PAGES)
    again = TextIndex.open(path)
    assert len(again) == len(PAGES)
    assert again.search("mayor") == index.search("mayor")
    with pytest.raises(DataError, match="already exists"):
        TextIndex.build(path, PAGES)
    with pytest.raises(DataError, match=r"build one with TextIndex\.build"):
        TextIndex.open(tmp_path / "nowhere")


def test_failed_build_leaves_nothing(tmp_path):
    def broken():
        yield PAGES[0]
        raise RuntimeError("source broke")

    with pytest.raises(RuntimeError):
        TextIndex.build(tmp_path / "text", broken())
    assert list(tmp_path.iterdir()) == []


def test_summary_is_the_sentence_about_the_query():
    summarizer = ExtractiveSummarizer()
    text = PAGES[0].text
    assert summarizer.summarize("mayor of Lindal", "Lindal", text) == "Its mayor is Ada Quill."
    assert summarizer.summarize("Lindal zoos", "Lindal", text) == "It has a zoo."
    assert summarizer.summarize("Lindal", "Lindal", text) == "Lindal is a port."
    assert summarizer.summarize("unheardof", "Lindal", text) == "Lindal is a port."
    assert summarizer.summarize("x", "Empty", "") == ""


def test_longer_summary_keeps_page_order_and_only_what_is_relevant():
    summarizer = ExtractiveSummarizer(max_sentences=2)
    assert summarizer.summarize("zoo mayor", "Lindal", PAGES[0].text) == "Its mayor is Ada Quill. It has a zoo."
    assert summarizer.summarize("zoo", "Other", PAGES[0].text) == "It has a zoo."
    assert ExtractiveSummarizer(max_chars=10).summarize("mayor", "", PAGES[0].text) == "Its may..."
    with pytest.raises(ConfigurationError, match="max_sentences is 5"):
        ExtractiveSummarizer(max_sentences=5)


def test_sentences():
    assert sentences("Dr. Ada met J. Renn. It was 3.5 m high! Why?\nNew line") == [
        "Dr. Ada met J. Renn.",
        "It was 3.5 m high!",
        "Why?",
        "New line",
    ]
    assert sentences("第一句。第二句。") == ["第一句。", "第二句。"]


def test_tool_text(index):
    def search(query, top_k=2):
        return search_text(index, ExtractiveSummarizer(), {"q": query, "hl": "en", "top_k": top_k}, ImageBook())

    output = search("mayor")
    assert output.hits == 2
    assert output.text.splitlines() == [
        "1. Torvik (wiki/Torvik): Its mayor is Bo Renn.",
        "2. Lindal (wiki/Lindal): Its mayor is Ada Quill.",
    ]
    nothing = search("unheardof")
    assert (nothing.text, nothing.hits) == ("No results.", 0)
    assert "Error executing" in search("page crashes says", top_k=1).text


def test_speed(tmp_path):
    pages = [
        Document(id=str(i), title=f"Town {i}", url=f"t/{i}", text=f"Town {i} is a city. Its mayor is Person{i}. " * 5)
        for i in range(2000)
    ]
    index, summarizer = TextIndex.build(tmp_path / "text", pages), ExtractiveSummarizer()

    def timed(query):
        before = time.perf_counter()
        search_text(index, summarizer, {"q": query, "hl": "en", "top_k": 5}, ImageBook())
        return time.perf_counter() - before

    # Generous to a busy machine; a quadratic or unindexed search takes far longer.
    assert min(timed(f"mayor of Town {i}") for i in range(20)) < 0.01
