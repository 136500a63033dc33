"""What a job of sharding is told, and what of it decides the bytes that come out."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensearch_lightning.data.shards import ShardKind
from opensearch_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """Settings of one job.

    Args:
        kind: what the rows are.
        processor: folder of the processor whose tokens are counted; ``None``: none are.
        max_pixels: largest picture that this processor shows the policy; ``None``: as its files say.
        render_tools: count a row's tool schemas with its system turn.
        max_length: longest row that training will take; the card says how many are longer.
        chunk_bytes: size of a chunk file.
        rows_per_block: most rows that one process takes at a time; a block ends with a chunk file.

    Raises:
        ConfigurationError: a number is not positive, or ``max_pixels`` comes without a processor.
    """

    kind: ShardKind
    processor: Path | None = None
    max_pixels: int | None = None
    render_tools: bool = True
    max_length: int | None = None
    chunk_bytes: int = 64 * 2**20
    rows_per_block: int = 256

    def __post_init__(self) -> None:
        for name in ("max_pixels", "max_length", "chunk_bytes", "rows_per_block"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} is {value}; set a number from 1")
        if self.max_pixels is not None and self.processor is None:
            raise ConfigurationError("max_pixels bounds what a processor makes of a picture; give the processor too")
        if self.processor is not None and self.kind != ShardKind.SFT:
            raise ConfigurationError("tokens are counted of SFT rows only; leave the processor out for RL tasks")

    def load_processor(self) -> Any:
        """The processor, with its pictures bounded; ``None`` without one.

        Raises:
            ConfigurationError: there is none in the folder, or the bound is below the pixels of one token.
        """
        if self.processor is None:
            return None
        # late: transformers takes seconds and hundreds of megabytes
        from opensearch_lightning.models import load_processor

        return load_processor(self.processor, max_pixels=self.max_pixels)

    def as_json(self, processor: Any) -> dict[str, Any]:
        """What the files are a function of, besides the sources; equal settings on two machines give equal mappings.

        Args:
            processor: the one loaded, which is told by its content rather than by its folder.
        """
        return {
            "kind": str(self.kind),
            "processor": processor_digest(processor) if processor is not None else None,
            "max_pixels": self.max_pixels,
            "render_tools": self.render_tools,
            "max_length": self.max_length,
            "chunk_bytes": self.chunk_bytes,
            "rows_per_block": self.rows_per_block,
        }


def processor_digest(processor: Any) -> str:
    """Digest of what a processor makes of texts and pictures."""
    parts = [processor.tokenizer.backend_tokenizer.to_str(), processor.image_processor.to_json_string()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """What differs between two JSON values, in words; objects, and lists of objects with a ``name``, are gone into."""
    before, now = _by_name(before), _by_name(now)
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        found = []
        for key in sorted({*before, *now}):
            found += differences(before.get(key), now.get(key), f"{name} {key}".strip())
        return found
    if before == now:
        return []
    return [f"{name}: {_shown(before)}, now {_shown(now)}"]


def _by_name(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "name" in part for part in value):
        return {part["name"]: {key: inner for key, inner in part.items() if key != "name"} for part in value}
    return value


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{value!r:.40}"
