"""Sources, LitData shards and DataModules. LitData itself is imported when shards are first read or written."""

from opensearch_lightning.data.drops import DropReason, DropReport, UnusableRow
from opensearch_lightning.data.order import EpochOrder, LengthOrder
from opensearch_lightning.data.rl_module import SearchVLRLDataModule
from opensearch_lightning.data.rows import write_rl_shards, write_sft_shards
from opensearch_lightning.data.sft_module import SearchVLSFTDataModule
from opensearch_lightning.data.sft_row import SFTRow
from opensearch_lightning.data.shard_writer import write_shards
from opensearch_lightning.data.shards import ShardKind, ShardReader
from opensearch_lightning.data.sources import (
    ImageStore,
    Source,
    open_source,
    parse_rl,
    parse_sft,
    read_records,
    short_answer,
)

__all__ = [
    "DropReason",
    "DropReport",
    "EpochOrder",
    "ImageStore",
    "LengthOrder",
    "SFTRow",
    "SearchVLRLDataModule",
    "SearchVLSFTDataModule",
    "ShardKind",
    "ShardReader",
    "Source",
    "UnusableRow",
    "open_source",
    "parse_rl",
    "parse_sft",
    "read_records",
    "short_answer",
    "write_rl_shards",
    "write_sft_shards",
    "write_shards",
]
