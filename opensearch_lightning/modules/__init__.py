"""LightningModules: agentic supervised fine-tuning and fatal-aware GRPO."""

from opensearch_lightning.modules.grpo import AdvantageRecord, FatalAwareGRPO
from opensearch_lightning.modules.optim import MuonAdamW, adamw, muon_adamw, warmup_schedule
from opensearch_lightning.modules.sft import AgenticSFT

__all__ = [
    "AdvantageRecord",
    "AgenticSFT",
    "FatalAwareGRPO",
    "MuonAdamW",
    "adamw",
    "muon_adamw",
    "warmup_schedule",
]
