"""Where rows come from: record files, release folders, and the images that rows name or hold."""

from opensearch_lightning.data.sources.files import read_records
from opensearch_lightning.data.sources.image_store import ImageStore
from opensearch_lightning.data.sources.rl import parse_rl
from opensearch_lightning.data.sources.sft import parse_sft
from opensearch_lightning.data.sources.short_answer import short_answer
from opensearch_lightning.data.sources.source import Source, open_source

__all__ = [
    "ImageStore",
    "Source",
    "open_source",
    "parse_rl",
    "parse_sft",
    "read_records",
    "short_answer",
]
