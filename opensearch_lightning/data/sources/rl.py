"""One RL record of any accepted form as a task."""

from typing import Any

from opensearch_lightning.data.sources.image_store import ImageStore
from opensearch_lightning.types import Task


def parse_rl(record: Any, *, name: str, images: ImageStore) -> Task:
    """Check one question and load its images.

    Raises:
        UnusableRow: with the reason.
    """
    raise NotImplementedError
