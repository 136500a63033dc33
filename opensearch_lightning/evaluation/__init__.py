"""Held-out evaluation of a policy by rollouts."""

from opensearch_lightning.evaluation.pass_at_1 import PassAt1, pass_at_1, roll_out

__all__ = ["PassAt1", "pass_at_1", "roll_out"]
