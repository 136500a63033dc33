"""What ranks that read rows together train on."""

from __future__ import annotations

import lightning as L

from opensearch_lightning.models import SequenceParallel
from opensearch_lightning.types import RolloutBatch


def joined_rollouts(batch: RolloutBatch, parallel: SequenceParallel, trainer: L.Trainer) -> RolloutBatch:
    """The tasks and groups of all ranks of ``parallel``, in the order of the ranks.

    Each rank has rolled out tasks of its own, and holds those of all behind this. Waits for every rank of the training.
    """
    # rollouts end at different times: wait with the patience of the strategy's process group, not the new groups'
    trainer.strategy.barrier()
    shares = parallel.gather(batch)
    return RolloutBatch(
        tasks=[task for share in shares for task in share.tasks],
        groups=[group for share in shares for group in share.groups],
        split=batch.split,
    )
