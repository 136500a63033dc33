"""Tasks that ask the same question of the same images."""

from opensearch_lightning.data.digests import content_digest
from opensearch_lightning.data.drops import DropReason, UnusableRow
from opensearch_lightning.types import Task


class Duplicates:
    """Remembers tasks by question and image bytes; 32 bytes and an id each."""

    def __init__(self) -> None:
        self._first: dict[bytes, str] = {}

    def check(self, task: Task) -> None:
        """Remember ``task``.

        Raises:
            UnusableRow: ``DropReason.DUPLICATE``, naming the first task of the same question and images.
        """
        key = content_digest(task.question, *task.images)
        if key in self._first:
            raise UnusableRow(DropReason.DUPLICATE, f"it asks what {self._first[key]!r:.200} asks of the same images.")
        self._first[key] = task.id
