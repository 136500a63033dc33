"""SFT rows as token sequences: rendered when needed, their tokens kept."""

from functools import cached_property
from typing import Any

from opensearch_lightning.chat import TokenizedSample
from opensearch_lightning.data.digests import json_digest
from opensearch_lightning.data.renderers import RowRenderers
from opensearch_lightning.data.rows import sft_row
from opensearch_lightning.data.shards import ShardReader
from opensearch_lightning.types import ImageInput


class SampleSource:
    """Renders the rows of SFT shards.

    Tokens are kept in memory up to ``cached_tokens``; the renderers keep images by content. Each set of tools among
    the rows has its own renderer.

    Args:
        reader: the rows.
        processor: a processor of Qwen3-VL.
        render_tools: put a row's tool schemas into its system turn, as the chat template does.
        cached_tokens: how many tokens to keep, 16 bytes each.
    """

    def __init__(
        self, reader: ShardReader, processor: Any, *, render_tools: bool = True, cached_tokens: int = 64 * 2**20
    ) -> None:
        self.reader = reader
        """The rows as they were written."""
        self._processor = processor
        self._render_tools = render_tools
        self._room = cached_tokens
        self._renderers = RowRenderers(processor, render_tools=render_tools)
        self._samples: dict[int, TokenizedSample] = {}
        self.renderer = self._renderers.without_tools
        """The renderer of rows without tools; all share its tokenizer and its kept images."""

    def __len__(self) -> int:
        return len(self.reader)

    def sample(self, index: int) -> TokenizedSample:
        """Row ``index`` as tokens and images.

        Raises:
            RenderError: an image cannot be used.
        """
        record, encoded = self.reader[index]
        renderer = self._renderers.for_tools(record["tools"])
        kept = self._samples.get(index)
        if kept is not None:
            images = tuple(renderer.encode_image(image, f"img_{i}") for i, image in enumerate(encoded, start=1))
            return TokenizedSample(token_ids=kept.token_ids, step_ids=kept.step_ids, images=images)
        row = sft_row(record, encoded)
        sample = renderer.conversation(row.system, row.turns())
        self._keep(index, sample)
        return sample

    def length(self, index: int) -> int:
        """Tokens of row ``index``, image tokens counted; found without making the patches of its images.

        Raises:
            RenderError: as :meth:`sample`.
        """
        return self._renderers.length(sft_row(*self.reader[index]))

    def name(self, index: int) -> str:
        """Id of row ``index``."""
        return str(self.reader[index][0]["id"])

    @cached_property
    def digest(self) -> str:
        """Digest of all that the tokens are a function of: rows, processor, tools."""
        parts = [
            self.reader.digest,
            self._processor.tokenizer.backend_tokenizer.to_str(),
            self._processor.image_processor.to_json_string(),
            str(self._render_tools),
        ]
        return json_digest(parts)

    def _keep(self, index: int, sample: TokenizedSample) -> None:
        if len(sample.token_ids) <= self._room:
            no_images: tuple[ImageInput, ...] = ()
            self._samples[index] = TokenizedSample(
                token_ids=sample.token_ids, step_ids=sample.step_ids, images=no_images
            )
            self._room -= len(sample.token_ids)
