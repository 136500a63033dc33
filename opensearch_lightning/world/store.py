"""A world on disk, opened for use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from opensearch_lightning.errors import ConfigurationError, DataError
from opensearch_lightning.tools.image_index import ImageIndex
from opensearch_lightning.tools.text_index import TextIndex
from opensearch_lightning.types import Task
from opensearch_lightning.world.entities import Entity
from opensearch_lightning.world.reading import WorldPages, read_world_pages

FORMAT = 2
MANIFEST = "world.json"
PAGES = "pages.xml"
TEXT_INDEX = "text_index"
IMAGE_INDEX = "image_index"


class World:
    """A MiniWiki: its pages, the two search indexes over them, and its tasks.

    Indexes and pages are read when first asked for. Example::

        world = World.open("runs/world")
        executor = ToolExecutor(offline_tools(world))
        tasks = world.tasks("sft")
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: str | Path) -> World:
        """Open the directory that :func:`opensearch_lightning.world.build_world` wrote.

        Raises:
            DataError: there is no world, or one of another format.
        """
        path = Path(path)
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"no world at {path} ({error}): make one with `opensearch world {path}`") from error
        if not isinstance(manifest, dict):
            raise DataError(
                f"{path / MANIFEST} describes no world: it holds a JSON {type(manifest).__name__}, not an object; make "
                f"one with `opensearch world {path}`"
            )
        if manifest.get("format") != FORMAT:
            raise DataError(
                f"the world at {path} has format {manifest.get('format')}, this version reads {FORMAT}: build it again"
            )
        return cls(path, manifest)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over pages, tasks and pictures: equal for equal settings."""
        return str(self.manifest["fingerprint"])

    @property
    def splits(self) -> dict[str, int]:
        """Number of tasks in each split."""
        return dict(self.manifest["settings"]["splits"])

    @cached_property
    def text_index(self) -> TextIndex:
        """Index over the plain text of the pages."""
        return TextIndex.open(self.path / TEXT_INDEX)

    @cached_property
    def image_index(self) -> ImageIndex:
        """Index over the clean emblems, under their entities' titles."""
        return ImageIndex.open(self.path / IMAGE_INDEX)

    @property
    def entities(self) -> Mapping[str, Entity]:
        """Entities by title, as the pages state them."""
        return self._pages.entities

    def tasks(self, split: str) -> list[Task]:
        """The tasks of one split, in order.

        ``metadata`` holds ``path`` (titles ``v_0 … v_h``), ``relations``, ``attribute``, ``hops``, ``anchor``,
        ``anchor_type``, ``picture`` (kind), ``find`` (the tools that name the anchor, the usual one first), ``repair``
        (``None`` or the tool and arguments to apply to ``img_1`` first), ``box`` and ``strength`` (see
        :class:`opensearch_lightning.world.calibrate.Shown`).

        Raises:
            ConfigurationError: no such split.
        """
        if split not in self.splits:
            raise ConfigurationError(f"no split {split!r} in the world at {self.path}: it has {', '.join(self.splits)}")
        read = cache(lambda name: (self.path / name).read_bytes())
        lines = (self.path / "tasks" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        return [_task(json.loads(line), read) for line in lines]

    def corpus_texts(self) -> Iterator[str]:
        """Texts to train a tokenizer on: pages, lines as searches return them, and questions of the training splits.

        Held-out splits (``val``, ``test``) give nothing.
        """
        yield from self._page_texts()
        for split in self.splits:
            if split not in ("val", "test"):
                for task in self.tasks(split):
                    yield f"{task.question} {task.answer}"

    def _page_texts(self) -> Iterator[str]:
        for document in self._pages.documents:
            yield document.text
        for entity in self.entities.values():
            for row, value in (*entity.relations.items(), *entity.attributes.items()):
                yield f"{row} of {entity.title}"
                yield f"1. {entity.title} ({entity.url}): The {row} of {entity.title} is {value}."

    @cached_property
    def _pages(self) -> WorldPages:
        return read_world_pages(self.path / PAGES)


def _task(row: Mapping[str, Any], read: Callable[[str], bytes]) -> Task:
    return Task(
        id=row["id"],
        question=row["question"],
        answer=row["answer"],
        aliases=tuple(row["aliases"]),
        images=tuple(read(name) for name in row["images"]),
        metadata=row["metadata"],
    )
