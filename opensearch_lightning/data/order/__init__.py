"""The order of rows, batches and packs: functions of the seed and a number, so that training resumes by a number."""

from opensearch_lightning.data.order.epochs import EpochOrder, LengthOrder
from opensearch_lightning.data.order.plans import BatchPackPlan, FullPackPlan, PaddedPlan, Plan

__all__ = ["BatchPackPlan", "EpochOrder", "FullPackPlan", "LengthOrder", "PaddedPlan", "Plan"]
