"""Builds a world: pages, their export, what the export says, tasks from walks over it, pictures, two indexes."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4
from zlib import crc32

import numpy as np
from PIL import Image

from opensearch_lightning.errors import ConfigurationError, DataError
from opensearch_lightning.graph.walk import WalkRules
from opensearch_lightning.paths import check_folder, put_in_place
from opensearch_lightning.tools.image_index import ImageIndex
from opensearch_lightning.tools.text_index import TextIndex
from opensearch_lightning.world.calibrate import PictureMaker, Shown
from opensearch_lightning.world.entities import Entity, generate_entities
from opensearch_lightning.world.pages import export_xml, write_pages
from opensearch_lightning.world.pictures import PictureKind, draw_emblem
from opensearch_lightning.world.questions import Question, QuestionMaker
from opensearch_lightning.world.reading import read_world_pages
from opensearch_lightning.world.settings import WorldSettings
from opensearch_lightning.world.store import FORMAT, IMAGE_INDEX, MANIFEST, PAGES, TEXT_INDEX, World

# For each task of a kind, this many times its share of the anchors get a picture of it: making one is dear.
_ANCHORS_PER_SHARE = 3.0
_ALIKE = 0.6

K = TypeVar("K")
V = TypeVar("V")


def build_world(
    out_dir: str | Path,
    *,
    pages: int = 150,
    seed: int = 0,
    splits: Mapping[str, int] | None = None,
    hop_probabilities: Mapping[int, float] | None = None,
    pictures: Mapping[str, float] | None = None,
    hub_in_degree: int = 24,
    min_in_degree: int = 1,
    workers: int = 2,
    force: bool = False,
) -> World:
    """Build a world in ``out_dir``, complete or not at all, and open it.

    Args:
        out_dir: new directory; with ``force`` a world already there is replaced when the new one is complete.
        pages: see :class:`~opensearch_lightning.world.settings.WorldSettings`, also for the other settings.
        seed: of every random choice.
        splits: name → number of tasks.
        hop_probabilities: hops → share.
        pictures: picture kind → share.
        hub_in_degree: no walk passes through pages with more links to them.
        min_in_degree: of an anchor.
        workers: threads that draw and check pictures; the result does not depend on it.
        force: replace a world already there.

    Raises:
        ConfigurationError: settings that cannot work, say, more tasks than the world has walks, or a place that
            cannot be written.
        DataError: ``out_dir`` exists already.
    """
    if workers < 1:
        raise ConfigurationError(f"workers={workers}: set 1 thread or more")
    given = {"splits": splits, "hop_probabilities": hop_probabilities, "pictures": pictures}
    settings = WorldSettings(
        pages=pages,
        seed=seed,
        hub_in_degree=hub_in_degree,
        min_in_degree=min_in_degree,
        **{name: dict(value) for name, value in given.items() if value is not None},  # type: ignore[arg-type]
    )
    out = Path(out_dir)
    _check_free(out, force)
    check_folder("out", out.parent)
    partial = out.with_name(f".{out.name}.{uuid4().hex}")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigurationError(f"out={out} cannot be written ({error.strerror}): choose another directory") from error
    try:
        _Builder(settings, partial, workers).build()
        put_in_place(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return World.open(out)


class _Builder:
    def __init__(self, settings: WorldSettings, path: Path, workers: int) -> None:
        self._settings = settings
        self._path = path
        self._workers = workers

    def build(self) -> None:
        settings, path = self._settings, self._path
        rules = WalkRules(
            hop_probabilities=settings.hop_probabilities, hub_in_degree=settings.hub_in_degree, relations_only=True
        )
        made, countries = generate_entities(self._rng("entities"), settings.pages, hub_in_degree=settings.hub_in_degree)
        export_xml(write_pages(self._rng("pages"), made, countries), path / PAGES)
        world = read_world_pages(path / PAGES)
        maker = QuestionMaker(world.graph, rules, world.entities, min_in_degree=settings.min_in_degree)
        questions = maker.splits(self._rng("questions"), settings.splits)
        TextIndex.build(path / TEXT_INDEX, world.documents)
        emblems = self._draw_emblems(list(world.entities.values()))
        index = ImageIndex.build(
            path / IMAGE_INDEX, ((e.id, e.title, e.url, emblems[e.title]) for e in world.entities.values())
        )
        asked_about = {question.path[0] for group in questions.values() for question in group}
        anchors = [entity for entity in world.entities.values() if entity.title in asked_about]
        shown = self._make_pictures(anchors, emblems, index)
        tasks = {split: self._tasks(split, group, world.entities, shown) for split, group in questions.items()}
        self._write(tasks, shown, world.entities, len(world.documents))

    def _rng(self, *key: str | int) -> np.random.Generator:
        """A stream for one purpose, so that no choice depends on how many others came before it."""
        return np.random.default_rng([self._settings.seed, *(crc32(str(part).encode()) for part in key)])

    def _draw_emblems(self, entities: Sequence[Entity]) -> dict[str, Image.Image]:
        """One emblem for each entity, none like another."""
        drawn = self._parallel(lambda entity: draw_emblem(self._rng("emblem", entity.id, 0)), entities)
        looks = np.zeros((len(entities), 3 * 8 * 8))
        emblems: dict[str, Image.Image] = {}
        for number, (entity, emblem) in enumerate(zip(entities, drawn, strict=True)):
            attempt = 0
            while float((looks[:number] @ _look(emblem)).max(initial=0.0)) > _ALIKE:
                attempt += 1
                emblem = draw_emblem(self._rng("emblem", entity.id, attempt))
            looks[number] = _look(emblem)
            emblems[entity.title] = emblem
        return emblems

    def _make_pictures(
        self, anchors: Sequence[Entity], emblems: Mapping[str, Image.Image], index: ImageIndex
    ) -> dict[tuple[str, PictureKind], Shown]:
        """Pictures by anchor and kind. Every anchor has its emblem; of the other kinds a share of the anchors."""
        from opensearch_lightning.tools.ocr import LayoutReader

        reader = LayoutReader(engines=self._workers)
        maker = PictureMaker(index, lambda image: reader.read(image).formatted_text)
        shares = {PictureKind(kind): share for kind, share in self._settings.pictures.items()}
        wanted = [
            (entity, kind)
            for entity in anchors
            for kind in PictureKind
            if kind is PictureKind.EMBLEM
            or self._rng("offer", kind, entity.id).random() < _ANCHORS_PER_SHARE * shares.get(kind, 0.0)
        ]

        def make(wish: tuple[Entity, PictureKind]) -> Shown | None:
            entity, kind = wish
            return maker.make(self._rng("picture", kind, entity.id), kind, entity, emblems[entity.title])

        made = zip(wanted, self._parallel(make, wanted), strict=True)
        shown = {(entity.title, kind): picture for (entity, kind), picture in made if picture is not None}
        lost = [entity.title for entity in anchors if (entity.title, PictureKind.EMBLEM) not in shown]
        if lost:
            raise DataError(f"image search does not find the emblems of {lost}: choose another seed")
        return shown

    def _tasks(
        self,
        split: str,
        questions: Sequence[Question],
        entities: Mapping[str, Entity],
        shown: Mapping[tuple[str, PictureKind], Shown],
    ) -> list[dict[str, Any]]:
        kinds = self._choose_kinds(split, questions, shown)
        return [
            _row(f"{split}-{number:05d}", question, entities[question.path[0]], shown[question.path[0], kind])
            for number, (question, kind) in enumerate(zip(questions, kinds, strict=True))
        ]

    def _choose_kinds(
        self, split: str, questions: Sequence[Question], shown: Mapping[tuple[str, PictureKind], Shown]
    ) -> list[PictureKind]:
        """A kind for each task: each kind gets its share of the split as far as anchors offer it, the rest emblems."""
        kinds = [PictureKind.EMBLEM] * len(questions)
        free = [int(i) for i in self._rng("kinds", split).permutation(len(questions))]
        for name, share in sorted(self._settings.pictures.items(), key=lambda item: item[1]):
            kind = PictureKind(name)
            if kind is PictureKind.EMBLEM:
                continue
            fit = [i for i in free if (questions[i].path[0], kind) in shown][: round(share * len(questions))]
            for i in fit:
                kinds[i] = kind
            free = [i for i in free if kinds[i] is PictureKind.EMBLEM]
        return kinds

    def _write(
        self,
        tasks: Mapping[str, Sequence[Mapping[str, Any]]],
        shown: Mapping[tuple[str, PictureKind], Shown],
        entities: Mapping[str, Entity],
        n_documents: int,
    ) -> None:
        folder = self._path / "images"
        folder.mkdir()
        for (title, kind), picture in shown.items():
            picture.image.save(self._path / _picture_name(entities[title], kind), "PNG")
        (self._path / "tasks").mkdir()
        for split, rows in tasks.items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (self._path / "tasks" / f"{split}.jsonl").write_text(lines, encoding="utf-8", newline="\n")
        manifest = {
            "format": FORMAT,
            "settings": asdict(self._settings),
            "documents": n_documents,
            "pictures": dict(Counter(str(kind) for _, kind in shown)),
            "tasks": {
                split: dict(Counter(row["metadata"]["picture"] for row in rows)) for split, rows in tasks.items()
            },
            "fingerprint": _fingerprint(self._path),
        }
        (self._path / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")

    def _parallel(self, work: Callable[[K], V], items: Iterable[K]) -> list[V]:
        # Threads: the time goes to OpenCV and the text recogniser, which run without Python's lock.
        with ThreadPoolExecutor(self._workers) as pool:
            return list(pool.map(work, items))


def _picture_name(entity: Entity, kind: PictureKind) -> str:
    return f"images/{entity.id}-{kind}.png"


def _row(task_id: str, question: Question, anchor: Entity, shown: Shown) -> dict[str, Any]:
    repair = None
    if shown.repair is not None:
        name, arguments = shown.repair
        repair = {"name": name, "arguments": {"image": "img_1", **arguments}}
    return {
        "id": task_id,
        "question": question.text,
        "answer": question.answer,
        "aliases": list(question.aliases),
        "images": [_picture_name(anchor, shown.kind)],
        "metadata": {
            "path": list(question.path),
            "relations": list(question.relations),
            "attribute": question.attribute,
            "hops": len(question.relations),
            "anchor": anchor.title,
            "anchor_type": anchor.type,
            "picture": str(shown.kind),
            "find": list(shown.find),
            "repair": repair,
            "box": list(shown.box) if shown.box is not None else None,
            "strength": shown.strength,
        },
    }


def _look(emblem: Image.Image) -> np.ndarray:
    """The emblem seen from afar: 8 x 8 colours less their mean, as a vector of norm 1."""
    small = np.asarray(emblem.resize((8, 8), Image.Resampling.BOX), np.float64).reshape(-1, 3)
    vector = (small - small.mean(axis=0)).ravel()
    return vector / np.linalg.norm(vector)


def _fingerprint(path: Path) -> str:
    digest = hashlib.sha256()
    for file in (path / PAGES, *sorted((path / "tasks").iterdir()), *sorted((path / "images").iterdir())):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _check_free(out: Path, force: bool) -> None:
    if not out.exists():
        return
    if not force:
        raise DataError(f"{out} exists already: choose another directory, or replace the world there with --force")
    if not (out / MANIFEST).is_file():
        raise DataError(f"{out} is no world, so it is not replaced: remove it yourself or choose another directory")
