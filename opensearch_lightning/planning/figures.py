"""What a configuration does not say: figures of the data, and how much of a machine a program gets. One set for all."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensearch_lightning.errors import ConfigurationError, DataError


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """How much of a machine's figures a run gets.

    Attributes:
        mfu: model FLOPs per second of training, scoring and prefill, over the peak.
        network: share of the links' bandwidth that collectives reach; 1 makes their times lower bounds.
        decoding: share of the memory's bandwidth that decoding reaches.
        reserve: bytes of a GPU for the context of CUDA, buffers of NCCL and fragmentation.
        tool_seconds: of one tool call, with its turn in the queue.
        tensor_parallel: GPUs of one server (Table 5).
        max_sequences: rollouts that a server decodes at once (256 over 8 servers, Table 5).
    """

    mfu: float = 0.35
    network: float = 1.0
    decoding: float = 0.6
    reserve: float = 4e9
    tool_seconds: float = 3.0
    tensor_parallel: int = 4
    max_sequences: int = 32

    def __post_init__(self) -> None:
        for name in ("mfu", "network", "decoding"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ConfigurationError(f"{name} is {value}; it is a share of a machine's figure, above 0 and up to 1")
        _check_positive(self, ("tensor_parallel", "max_sequences"))


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Trajectories, as they are trained on.

    The defaults are the recipe's 36,592 rows of 6.3 tool turns (Table 4's data). Their tokens are assumed: a prompt of
    4,500 (system prompt and schemas take more than 4,000), 250 sampled and 800 observed in each tool turn, 400 for the
    answer.

    Attributes:
        rows: trajectories for fine-tuning.
        mean_tokens: of a trajectory, image tokens counted.
        sampled_tokens: of them, those that the policy wrote.
        prompt_tokens: those before the first turn, which the rollouts of a task share.
        tool_turns: of a trajectory.
        images_per_row: its images, those that tools made counted.
        image_pixels: of one image (Table 4's maximum).
        lengths: tokens of every row, where they were measured.
        origin: where rows and tokens are from, in words.
    """

    rows: int = 36_592
    mean_tokens: float = 11_500
    sampled_tokens: float = 2_000
    prompt_tokens: float = 4_500
    tool_turns: float = 6.3
    images_per_row: float = 3
    image_pixels: int = 262_144
    lengths: Sequence[int] | None = None
    origin: str = "assumed; the recipe gives 36,592 rows and 6.3 tool turns"

    def __post_init__(self) -> None:
        _check_positive(self, ("rows", "mean_tokens", "sampled_tokens", "prompt_tokens", "image_pixels"))
        for name in ("tool_turns", "images_per_row"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; give a number of 0 or more")
        if self.sampled_tokens > self.mean_tokens:
            raise ConfigurationError(
                f"a trajectory of {self.mean_tokens:,.0f} tokens cannot hold {self.sampled_tokens:,.0f} sampled ones; "
                "raise --mean-tokens or lower --sampled-tokens"
            )

    def row_lengths(self) -> Sequence[int]:
        """Tokens of rows that stand for all: those measured, or so many of the mean that parts of images count."""
        return self.lengths if self.lengths is not None else [round(self.mean_tokens)] * 100

    def prompt_of(self, length: float) -> float:
        """Prompt tokens of a trajectory of ``length``."""
        return min(self.prompt_tokens, length - self.sampled_tokens)

    def patches_of_image(self, patch: int) -> int:
        """Patches of one image."""
        return max(1, self.image_pixels // patch**2)


def read_figures(config: Mapping[str, Any], given: Mapping[str, float | None]) -> Figures:
    """Figures of the data that a configuration names, else the recipe's.

    A folder of shards tells them by the lengths that ``opensearch shard``, ``measure`` or training left there
    (``lengths-*.json``), and by its card. Pictures count as large as the processor lets them be.

    Args:
        config: a composed configuration.
        given: values of the command line by the name of the attribute; they go first.

    Raises:
        ConfigurationError: a value that cannot be.
        DataError: a file of lengths or a card that cannot be read.
    """
    own = {name: value for name, value in given.items() if value is not None}
    found = _found(config.get("data") or {})
    limit = ((config.get("model") or {}).get("processor") or {}).get("max_pixels")
    if limit is not None:
        found["image_pixels"] = min(limit, found.get("image_pixels", limit))
    if "mean_tokens" in own or "rows" in own:
        # lengths of other rows than those asked for
        found.pop("lengths", None)
    values = {**found, **own}
    scale = min(1.0, float(values.get("mean_tokens", Figures.mean_tokens)) / Figures.mean_tokens)
    # prompt and answers take the same part of shorter trajectories, where only their length is known
    shares = {"sampled_tokens": scale * Figures.sampled_tokens, "prompt_tokens": scale * Figures.prompt_tokens}
    return Figures(**{**shares, **values})


def _found(data: Mapping[str, Any]) -> dict[str, Any]:
    """What the folders of shards tell, where all of them tell it."""
    folders = _folders(data.get("shards"))
    if not folders:
        return {}
    cards = [card for folder in folders if (card := _read_card(folder / "card.json"))]
    figures = _of_cards(cards) if len(cards) == len(folders) else {}
    measured = _measured(folders, data)
    lengths = _usable(measured, data)
    if lengths:
        figures |= {"rows": len(lengths), "mean_tokens": sum(lengths) / len(lengths), "lengths": lengths}
    if not figures:
        return {}
    what = "lengths measured" if lengths else "the card"
    assumed = "" if "mean_tokens" in figures else ", which counts no tokens: those are assumed"
    left_out = _left_out(len(measured), len(lengths), data)
    return {**figures, "origin": f"{what} of {', '.join(map(str, folders))}{assumed}{left_out}"}


def _of_cards(cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = sum(card["rows"] for card in cards)
    known = rows - sum(card["lengths"].get("not_renderable", 0) for card in cards)
    if known <= 0:
        return {}
    pictures = [card["images"] for card in cards if card["images"]["number"]]
    images = sum(some["number"] for some in pictures)
    figures = {
        "rows": known,
        "tool_turns": sum(card.get("tool_turns", 0) for card in cards) / rows,
        "images_per_row": images / rows,
    }
    if images:
        # a card holds quantiles alone; the median stands for all
        figures["image_pixels"] = round(sum(some["pixels"]["median"] * some["number"] for some in pictures) / images)
    if all(card["lengths"]["unit"] == "tokens" for card in cards):
        figures["mean_tokens"] = sum(card["lengths"]["sum"] for card in cards) / known
    return figures


def _measured(folders: Sequence[Path], data: Mapping[str, Any]) -> list[int]:
    """Lengths of all rows, if all folders were measured."""
    kept_at = data.get("lengths_dir")
    lengths: list[int] = []
    for folder in folders:
        measured = _newest(folder, folder) or (_newest(Path(kept_at), folder) if kept_at else [])
        if not measured:
            return []
        lengths += measured
    return lengths


def _usable(lengths: Sequence[int], data: Mapping[str, Any]) -> list[int]:
    """Lengths of the rows that training takes; one that is cut counts as ``max_length``, which it has at most."""
    limit: int = data.get("max_length") or sys.maxsize
    if data.get("too_long") == "cut":
        return [min(length, limit) for length in lengths if length > 0]
    return [length for length in lengths if 0 < length <= limit]


def _newest(kept_at: Path, folder: Path) -> list[int]:
    """The newest lengths of ``kept_at`` that are as many as ``folder`` says it has rows; none: empty."""
    meta = folder / "shards.json"
    rows = _read_json(meta, "write the shards again")["rows"] if meta.is_file() else None
    for file in sorted(kept_at.glob("lengths-*.json"), key=lambda file: file.stat().st_mtime, reverse=True):
        lengths = _read_lengths(file)
        if rows is None or len(lengths) == rows:
            return lengths
    return []


def _left_out(measured: int, usable: int, data: Mapping[str, Any]) -> str:
    """What the limit on lengths costs, in words; nothing where all rows are used."""
    dropped, accepted = measured - usable, data.get("max_dropped")
    if not dropped or not usable:
        return ""
    limit = data.get("max_length")
    told = f"; {dropped:,} of {measured:,} rows are left out: longer than max_length={limit}, or unusable"
    if accepted is None or dropped <= accepted * measured:
        return told
    return f"{told}. Training ends at once, as data.max_dropped={accepted} accepts fewer"


def _folders(shards: Any) -> list[Path]:
    listed = [shards] if isinstance(shards, str) else list(shards or ())
    return [Path(folder) for folder in listed if "://" not in str(folder)]


def _read_card(file: Path) -> Mapping[str, Any] | None:
    """The card of trajectories; one of tasks, which says nothing of their rollouts, counts as none."""
    if not file.is_file():
        return None
    found = _read_json(file)
    try:
        if found["kind"] != "sft":
            return None
        total: Mapping[str, Any] = found["total"]
        images = total["images"]
        _ = total["rows"], total["lengths"]["unit"], total["lengths"]["sum"]
        _ = images["number"] and images["pixels"]["median"]
    except (KeyError, TypeError) as error:
        raise DataError(f"{file} is no card of shards ({error!r} is not in it); write the shards again") from error
    return total


def _read_lengths(file: Path) -> list[int]:
    found = _read_json(file)
    if not isinstance(found, list) or not all(isinstance(length, int) for length in found):
        raise DataError(f"{file} holds no list of lengths; remove it, and they are measured again")
    return found


def _read_json(file: Path, remedy: str = "remove it to plan without") -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({type(error).__name__}); {remedy}") from error


def _check_positive(record: Any, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(record, name)
        if not 0 < value < math.inf:
            raise ConfigurationError(f"{name} is {value}; give a number above 0")
