"""The files beside the chunks of finished blocks: index, data card, lengths."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opensearch_lightning.data.drops import DropReport
from opensearch_lightning.data.lengths import lengths_file, write_lengths
from opensearch_lightning.data.samples import SampleSource
from opensearch_lightning.data.shard_writer import WrittenChunks, write_index
from opensearch_lightning.data.sharding.card import corpus_card, lengths_of
from opensearch_lightning.data.sharding.card_pages import card_page, lengths_figure
from opensearch_lightning.data.sharding.card_stats import CorpusStats
from opensearch_lightning.data.sharding.settings import ShardSettings
from opensearch_lightning.data.sharding.state import PartialShards
from opensearch_lightning.data.sharding.worker import WrittenBlock
from opensearch_lightning.data.shards import ShardReader
from opensearch_lightning.errors import DataError


def write_beside_chunks(
    partial: PartialShards,
    report: DropReport,
    *,
    names: Sequence[str],
    settings: ShardSettings,
    processor: Any,
    made_from: Mapping[str, Any],
) -> None:
    """Write all files beside the chunks; they are a function of the arguments.

    Args:
        partial: holds the finished blocks, all of them.
        report: what was kept and dropped.
        names: of the sources, in their order.
        settings: of the job.
        processor: whose tokens were counted; ``None``: none were.
        made_from: what the shards are a function of, as JSON.

    Raises:
        DataError: LitData describes the rows of two blocks differently.
    """
    files: list[Mapping[str, Any]] = []
    digests: list[str] = []
    config: Mapping[str, Any] = {}
    rows: Counter[str] = Counter()
    stats = {name: CorpusStats() for name in names}
    for block in partial.blocks():
        files += block.files
        digests += block.digests
        config = _joined(config, block)
        rows[names[block.source]] += len(block.digests)
        stats[names[block.source]].merge(block.stats)
    folder = partial.rows_folder
    runs = [[name, rows[name]] for name in names if rows[name]]
    chunks = WrittenChunks(files=files, config=config, digests=digests)
    write_index(folder, chunks, kind=settings.kind, sources=runs, made_from=made_from)
    _write_card(folder, settings, stats, report, made_from["settings"])
    reader = ShardReader(folder, kind=settings.kind)
    if processor is not None:
        source = SampleSource(reader, processor, render_tools=settings.render_tools)
        tokens = [length for name in names for length in stats[name].tokens]
        write_lengths(lengths_file(folder, source), tokens)


def _joined(config: Mapping[str, Any], block: WrittenBlock) -> Mapping[str, Any]:
    if not config or not block.config or config == block.config:
        return config or block.config
    raise DataError(f"LitData describes the rows of block {block.number} otherwise than those before: {block.config}.")


def _write_card(
    folder: Path, settings: ShardSettings, stats: Mapping[str, CorpusStats], report: DropReport, told: Mapping[str, Any]
) -> None:
    card = corpus_card(stats, report, kind=settings.kind, max_length=settings.max_length)
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    (folder / "README.md").write_text(card_page(card, told), encoding="utf-8")
    units = {name: lengths_of(part) for name, part in stats.items()}
    unit = next((unit for unit, lengths in units.values() if lengths), "characters")
    lengths = [length for _, part in units.values() for length in part]
    (folder / "lengths.svg").write_text(lengths_figure(lengths, unit), encoding="utf-8")
