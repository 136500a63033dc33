"""Tasks that ask the same question of the same images."""

from opensearch_lightning.types import Task


class Duplicates:
    """Remembers the tasks of a shard by question and image bytes."""

    def check(self, task: Task) -> None:
        """Remember ``task``.

        Raises:
            UnusableRow: ``DropReason.DUPLICATE``, naming the first task of the same question and images.
        """
        raise NotImplementedError
