"""One SFT record of any accepted form as a row."""

from typing import Any

from opensearch_lightning.data.sharegpt import SFTRow
from opensearch_lightning.data.sources.image_store import ImageStore


def parse_sft(record: Any, *, name: str, images: ImageStore) -> SFTRow:
    """Check one conversation and load its images.

    Raises:
        UnusableRow: with the reason.
    """
    raise NotImplementedError
