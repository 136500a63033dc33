"""Questions from walks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.graph import WalkRules
from opensearch_lightning.world.entities import generate_entities
from opensearch_lightning.world.pages import export_xml, write_pages
from opensearch_lightning.world.questions import QuestionMaker, names_in, question_text
from opensearch_lightning.world.reading import read_world_pages
from opensearch_lightning.world.schema import Numbers

RULES = WalkRules(hop_probabilities={2: 0.4, 3: 0.4, 4: 0.2}, hub_in_degree=24, relations_only=True)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    path = tmp_path_factory.mktemp("questions") / "pages.xml"
    made = generate_entities(np.random.default_rng(5), 60, hub_in_degree=24)
    export_xml(write_pages(np.random.default_rng(6), *made), path)
    return read_world_pages(path)


@pytest.fixture(scope="module")
def splits(pages):
    maker = QuestionMaker(pages.graph, RULES, pages.entities)
    return maker.splits(np.random.default_rng(7), {"sft": 300, "rl": 100, "val": 0, "test": 101})


def test_sizes_and_hops_are_exact(splits):
    assert {name: len(questions) for name, questions in splits.items()} == {
        "sft": 300,
        "rl": 100,
        "val": 0,
        "test": 101,
    }
    hops = Counter(len(question.relations) for questions in splits.values() for question in questions)
    assert hops == {2: 200, 3: 201, 4: 100}


def test_no_two_questions_share_a_path(splits):
    paths = [question.path for questions in splits.values() for question in questions]
    assert len(set(paths)) == len(paths) == 501
    assert all(len(set(path)) == len(path) for path in paths)


def test_following_the_relations_gives_the_answer(splits, pages):
    for questions in splits.values():
        for question in questions:
            title = question.path[0]
            for relation, after in zip(question.relations, question.path[1:], strict=True):
                title = pages.entities[title].relations[relation]
                assert title == after
            assert pages.entities[title].attributes[question.attribute] == question.answer


def test_paths_hold_neither_hubs_nor_lists_nor_disambiguation_pages(splits, pages):
    on_paths = {title for questions in splits.values() for question in questions for title in question.path}
    assert on_paths <= set(pages.entities)
    assert not any("(disambiguation)" in title or title.startswith("List of") for title in on_paths)
    assert not on_paths & {entity.country for entity in pages.entities.values()}
    # Things that share their name with others do stand on paths, under their full titles.
    assert any("(" in title for title in on_paths)


def test_questions_name_nothing_on_the_path(splits, pages):
    for questions in splits.values():
        for question in questions:
            words = set(question.text.lower().rstrip("?").split())
            for title in question.path:
                for name in pages.entities[title].names:
                    assert name.lower() not in question.text.lower()
            assert not set(question.answer.lower().split()) & words


def test_wording():
    assert question_text("person", ("employer", "founder"), "birth year") == (
        "What is the birth year of the founder of the employer of the person in the picture?"
    )


def test_names_are_found_as_whole_words():
    names = ["Ada Brun", "Old T. (place)", "Rus"]
    assert names_in("who is ada brun?", names) == ["Ada Brun"]
    assert names_in("is it Old T. (place)?", names) == ["Old T. (place)"]
    assert names_in("Rust is brown", names) == []


def test_units_have_aliases():
    metres = Numbers(low=2, high=2, unit="m", unit_aliases=("metres",))
    assert metres.draw(np.random.default_rng(0)) == "2 m"
    assert metres.aliases("2 m") == ("2 metres", "2")
    assert Numbers(low=1900, high=1999).aliases("1950") == ()


def test_too_many_tasks_are_refused_with_what_there_is(pages):
    maker = QuestionMaker(pages.graph, RULES, pages.entities)
    message = r"4000 tasks of 2 hops were asked, but this world of 60 pages has \d+ walks of 2 hops, of which \d+ could"
    with pytest.raises(ConfigurationError, match=message) as caught:
        maker.splits(np.random.default_rng(0), {"sft": 10_000})
    assert "ask for fewer tasks, or for some" in str(caught.value)


def test_anchors_are_stratified_and_have_enough_links(pages):
    maker = QuestionMaker(pages.graph, RULES, pages.entities, min_in_degree=6)
    questions = maker.splits(np.random.default_rng(7), {"sft": 150})["sft"]
    graph = pages.graph
    assert min(graph.in_degree[graph.node(question.path[0])] for question in questions) >= 6
    types = Counter(pages.entities[question.path[0]].type for question in questions)
    assert min(types.values()) > 10
