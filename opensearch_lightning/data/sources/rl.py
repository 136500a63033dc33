"""One RL record of any accepted form as a task."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from opensearch_lightning.data.digests import content_digest
from opensearch_lightning.data.drops import DropReason, UnusableRow
from opensearch_lightning.data.images import checked_shape
from opensearch_lightning.data.sft_row import PLACEHOLDER
from opensearch_lightning.data.sources.content import Content, Slot, read_content
from opensearch_lightning.data.sources.image_store import ImageStore
from opensearch_lightning.data.sources.short_answer import short_answer
from opensearch_lightning.data.sources.values import as_json, encodable, is_scalar, record_id, shown
from opensearch_lightning.types import Task

# Each in the order in which it is looked for.
_QUESTIONS = ("question", "query", "problem", "prompt", "messages")
_ANSWERS = ("short_answer", "ground_truth", "gt_answer", "reward_model", "answer", "answers", "solution")
_ALIASES = ("candidate_answers", "aliases", "answer_aliases", "alternative_gt_answers")
_IMAGES = ("images", "image", "image_path", "img_path", "query_image", "image_urls", "image_url")
_GROUND_TRUTH = "ground_truth"
_USERS = ("user", "human")
_AROUND = re.compile(rf"[ \t]*{re.escape(PLACEHOLDER)}[ \t]*")


def parse_rl(record: Any, *, name: str, images: ImageStore) -> Task:
    r"""Check one question and load its images.

    Accepted are the columns of Search-VL-RL-8K (``question``, ``answer``, ``images``, ``dataset``), those that veRL
    reads (``prompt`` as a list of messages, ``images``, ``reward_model`` with ``ground_truth`` and
    ``candidate_answers``), and others of the same kind. Of an answer that is a report the short answer is taken
    (:func:`~opensearch_lightning.data.short_answer`); the report stays in ``metadata["report"]``, beside all other
    columns that hold a text, a number or a truth value. Placeholders are taken out of the question.

    Args:
        record: the raw record.
        name: of the record, for its id: a record that brings none gets the file's stem and a digest of its content, so
            that rows of the same question have distinct ids, and exact repetitions one.
        images: where its images are found.

    Raises:
        UnusableRow: with the reason.
    """
    if not isinstance(record, Mapping):
        raise UnusableRow(DropReason.BAD_RECORD, f"a row is an object, got {type(record).__name__}.")
    asked = _question(record)
    answer, report, aliases = _answers(record)
    sources = _images(record, asked)
    question = _AROUND.sub(" ", asked.text).strip()
    if not question:
        raise UnusableRow(DropReason.NO_QUESTION, "the question is empty.")
    encoded = tuple(checked_shape(images.load(source)) for source in sources)
    stem = re.split(r"[.\[]", name, maxsplit=1)[0] or "row"
    return Task(
        id=record_id(record) or f"{stem}-{content_digest(question, answer, *encoded).hex()[:16]}",
        question=question,
        answer=answer,
        aliases=aliases,
        images=encoded,
        metadata=_metadata(record, report),
    )


def _question(record: Mapping[str, Any]) -> Content:
    found = next((record[key] for key in _QUESTIONS if record.get(key)), None)
    if found is None:
        raise UnusableRow(DropReason.NO_QUESTION, f"there is no question; name its column one of {_QUESTIONS}.")
    if isinstance(found, list | tuple):
        turns = [turn for turn in found if isinstance(turn, Mapping)]
        asked = [turn for turn in turns if (turn.get("role") or turn.get("from")) in _USERS]
        if len(asked) != 1 or len(turns) != len(found):
            raise UnusableRow(DropReason.NO_QUESTION, f"a prompt has one user message, got {shown(found)}.")
        found = asked[0].get("content") if asked[0].get("content") is not None else asked[0].get("value")
    content = read_content(found, takes_images=True)
    encodable("question", content.text)
    return content


def _answers(record: Mapping[str, Any]) -> tuple[str, str | None, tuple[str, ...]]:
    """The short answer, the report that it was taken from, and other spellings."""
    rule = record.get("reward_model")
    rule = rule if isinstance(rule, Mapping) else {}
    columns: dict[str, Any] = {**record, "reward_model": rule.get(_GROUND_TRUTH)}
    given = next((texts for key in _ANSWERS if (texts := _texts(columns.get(key)))), None)
    if given is None:
        raise UnusableRow(DropReason.NO_ANSWER, f"there is no answer; name its column one of {_ANSWERS}.")
    full = encodable("answer", given[0]).strip()
    answer = short_answer(full)
    if answer is None:
        raise UnusableRow(
            DropReason.NO_SHORT_ANSWER, f"the answer is a report of {len(full)} characters that marks no short answer."
        )
    others = [*given[1:], *(text for part in (record, rule) for key in _ALIASES for text in _texts(part.get(key)))]
    stripped = dict.fromkeys(encodable("alias", other).strip() for other in others)
    return answer, full if full != answer else None, tuple(other for other in stripped if other not in ("", answer))


def _texts(value: Any) -> list[str]:
    """The texts of a value: one, a number, a list of them, or the JSON of a list of texts and numbers."""
    if isinstance(value, str):
        return [text for text in (_listed(value) or [value]) if text.strip()]
    if isinstance(value, list | tuple):
        return [text for inner in value if not isinstance(inner, list | tuple) for text in _texts(inner)]
    if _is_text_or_number(value):
        return [str(value)]
    return []


def _listed(text: str) -> list[str] | None:
    if not text.lstrip().startswith("["):
        return None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    # numbers alone are an answer, such as an interval
    if not isinstance(values, list) or not any(isinstance(value, str) for value in values):
        return None
    return [str(value) for value in values] if all(map(_is_text_or_number, values)) else None


def _is_text_or_number(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool) and is_scalar(value)


def _images(record: Mapping[str, Any], asked: Content) -> Sequence[Any]:
    """The images that the question's parts hold, or those of the row's column."""
    held = [slot for slot in asked.slots if slot.value is not None]
    column: Any = next((record[key] for key in _IMAGES if _is_given(record.get(key))), [])
    listed = _as_list(column)
    if held:
        if len(held) < len(asked.slots) or listed:
            raise UnusableRow(DropReason.IMAGE_COUNT, "a question has images in its parts and in a column.")
        return [slot.value for slot in held]
    if asked.slots and len(asked.slots) != len(listed):
        raise UnusableRow(DropReason.IMAGE_COUNT, f"{len(asked.slots)} placeholders for {len(listed)} images.")
    if not listed and (unread := _unread(record)):
        raise UnusableRow(
            DropReason.MISSING_IMAGE,
            f"the row has no image but {unread}; name the column of its images one of {_IMAGES}.",
        )
    return _sorted(listed, asked.slots)


def _sorted(listed: Sequence[Any], slots: Sequence[Slot]) -> Sequence[Any]:
    indices = [slot.index for slot in slots if slot.index is not None]
    if not indices:
        return listed
    if sorted(indices) != list(range(len(listed))):
        raise UnusableRow(DropReason.IMAGE_COUNT, f"image parts {indices[:8]} for {len(listed)} images.")
    return [listed[index] for index in indices]


def _as_list(column: Any) -> Sequence[Any]:
    if isinstance(column, str) and (listed := _listed(column)) is not None:
        return listed
    # Numbers are the bytes of one image.
    if isinstance(column, list | tuple) and not all(isinstance(value, int) for value in column[:1]):
        return column
    return [column] if _is_given(column) else []


def _is_given(value: Any) -> bool:
    return value is not None and not (isinstance(value, str | bytes | list | tuple | Mapping) and not value)


def _unread(record: Mapping[str, Any]) -> str:
    """Columns that seem to be about an image, where none was found."""
    about = [key for key in record if isinstance(key, str) and re.search("image|img|picture", key.lower())]
    return ", ".join(shown(key) for key in about if _is_given(record[key]))


def _metadata(record: Mapping[str, Any], report: str | None) -> dict[str, Any]:
    used = {*_QUESTIONS, *_ANSWERS, *_ALIASES, *_IMAGES}
    metadata = {
        key: value
        for key, value in record.items()
        if isinstance(key, str) and is_scalar(key) and key not in used and is_scalar(value)
    }
    brought = record.get("metadata")
    if isinstance(brought, Mapping) and (text := as_json(dict(brought))) is not None:
        metadata = {**metadata, **json.loads(text)}
    return metadata if report is None else {**metadata, "report": report}
