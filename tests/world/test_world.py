"""The whole world, with the very tools an agent gets."""

from __future__ import annotations

import asyncio
import io
from collections import Counter

import pytest
from PIL import Image

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.tools import CallKey, ImageBook, ToolExecutor, offline_tools
from opensearch_lightning.types import Action, Task
from opensearch_lightning.world import PictureKind, World


@pytest.fixture(scope="module")
def executor(world):
    return ToolExecutor(offline_tools(world, text_top_k=1))


class Agent:
    """Calls tools as a rollout does, one after the other."""

    def __init__(self, executor: ToolExecutor, task: Task) -> None:
        self._executor, self._task = executor, task
        self.images = ImageBook()
        for encoded in task.images:
            self.images.add(encoded)

    def call(self, name: str, arguments: dict) -> str:
        action = Action(kind="tool_call", name=name, arguments=arguments)
        key = CallKey(task_id=self._task.id, rollout=0, step=0)
        result = asyncio.run(self._executor.execute(action, self.images, key))
        assert result.error is None, result.text
        if result.image is not None and len(self.images) == 1:
            self.images.add(result.image)
        return result.text

    def find(self) -> list[str]:
        """What each of the anchor's tools says of the newest image."""
        image = f"img_{len(self.images)}"
        tools = self._task.metadata["find"]
        return [self.call(tool, {"url" if tool == "image_search" else "image": image}) for tool in tools]


def named(task: Task, text: str) -> bool:
    anchor = task.metadata["anchor"]
    return text == anchor or (f"1. {anchor} (" in text and "2. " not in text)


def test_every_task_can_be_solved_by_searching(world, executor, all_tasks):
    for task in all_tasks:
        agent = Agent(executor, task)
        title = task.metadata["anchor"]
        for row in (*task.metadata["relations"], task.metadata["attribute"]):
            text = agent.call("text_search", {"q": f"{row} of {title}"})
            head, _, title = text.rpartition(" is ")
            assert head.endswith(f"The {row} of {head.split('The ')[1].removeprefix(f'{row} of ')}")
            title = title.rstrip(".")
        assert title == task.answer


@pytest.mark.parametrize("kind", list(PictureKind))
def test_pictures_need_their_tool_and_no_more(kind, executor, all_tasks):
    shown = {task.images: task for task in all_tasks if task.metadata["picture"] == kind}
    assert len(shown) >= 3
    for task in list(shown.values())[:4]:
        agent = Agent(executor, task)
        repair = task.metadata["repair"]
        assert {named(task, text) for text in agent.find()} == {repair is None}
        if repair is not None:
            agent.call(repair["name"], repair["arguments"])
            assert len(agent.images) == 2
            assert all(named(task, text) for text in agent.find())


@pytest.mark.parametrize(
    ("kind", "find", "tool"),
    [
        ("emblem", ["image_search"], None),
        ("labelled", ["image_search", "layout_parsing"], None),
        ("sign", ["layout_parsing"], None),
        ("scene", ["image_search"], "crop"),
        ("blurred", ["image_search"], "sharpen"),
        ("small", ["layout_parsing"], "super_resolution"),
        ("skewed", ["image_search"], "perspective_correct"),
    ],
)
def test_metadata_says_how_to_find_the_anchor(kind, find, tool, all_tasks):
    tasks = [task.metadata for task in all_tasks if task.metadata["picture"] == kind]
    assert tasks
    assert all(meta["find"] == find for meta in tasks)
    assert {meta["repair"] and meta["repair"]["name"] for meta in tasks} == {tool}
    assert all((meta["box"] is not None) == (kind == "scene") for meta in tasks)
    assert all((meta["strength"] is not None) == (kind in ("blurred", "small", "skewed")) for meta in tasks)


def test_a_sign_is_no_picture_search_away(executor, all_tasks):
    signs = {task.images: task for task in all_tasks if task.metadata["picture"] in ("sign", "small")}
    for task in list(signs.values())[:6]:
        assert Agent(executor, task).call("image_search", {"url": "img_1"}) == "No results."


def test_image_search_finds_every_clean_emblem(world):
    assert len(world.image_index) == len(world.entities) == 40
    seen = 0
    for entity in world.entities.values():
        file = world.path / "images" / f"{entity.id}-emblem.png"
        if file.exists():
            seen += 1
            hits = world.image_index.search(Image.open(file))
            assert [(hit.title, hit.url) for hit in hits] == [(entity.title, f"miniwiki/{entity.id}")]
    assert seen > 34


def test_tasks_are_complete_and_their_splits_disjoint(world, all_tasks):
    assert {split: len(world.tasks(split)) for split in world.splits} == {"sft": 50, "rl": 20, "val": 10, "test": 20}
    assert len({task.id for task in all_tasks}) == 100
    paths = [tuple(task.metadata["path"]) for task in all_tasks]
    assert len(set(paths)) == 100
    for task in all_tasks:
        meta = task.metadata
        assert meta["hops"] == len(meta["relations"]) == len(meta["path"]) - 1
        assert meta["anchor"] == meta["path"][0]
        assert f"of the {meta['anchor_type']} in the picture?" in task.question
        assert world.entities[meta["anchor"]].type == meta["anchor_type"]


def test_pictures_are_small_and_come_in_the_shares_asked(world, all_tasks):
    for task in all_tasks:
        image = Image.open(io.BytesIO(task.images[0]))
        assert max(image.size) <= 192
        assert round(image.width / 32) * round(image.height / 32) <= 16
    for split, size in world.splits.items():
        kinds = Counter(task.metadata["picture"] for task in world.tasks(split))
        assert kinds == world.manifest["tasks"][split]
        for kind in set(PictureKind) - {"emblem"}:
            assert kinds[kind] <= round(0.08 * size)
    total = Counter(task.metadata["picture"] for task in all_tasks)
    assert all(total[kind] >= 6 for kind in PictureKind)


def test_texts_for_a_tokenizer_hold_training_but_no_held_out_questions(world):
    texts = list(world.corpus_texts())
    whole = "\n".join(texts)
    assert all(entity.title in whole for entity in world.entities.values())
    assert all(f"{task.question} {task.answer}" in texts for split in ("sft", "rl") for task in world.tasks(split))
    lines = set(texts)
    kept = [task for split in ("val", "test") for task in world.tasks(split)]
    training = {task.question for split in ("sft", "rl") for task in world.tasks(split)}
    assert not any(line.startswith(t.question) for t in kept if t.question not in training for line in lines)


def test_unknown_split(world):
    with pytest.raises(ConfigurationError, match=r"no split 'train' in the world at .*: it has sft, rl, val, test"):
        world.tasks("train")


def test_opening_again_gives_the_same(world):
    again = World.open(world.path)
    assert again.fingerprint == world.fingerprint
    assert again.tasks("val") == world.tasks("val")
    assert again.entities == world.entities
