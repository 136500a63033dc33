"""Callbacks that fill, mask, log and keep what the modules train on."""

from opensearch_lightning.callbacks.advantage_logging import ClampedAdvantageLogging
from opensearch_lightning.callbacks.curves import ToolUseCurves
from opensearch_lightning.callbacks.fatal_masking import FatalStepMasking
from opensearch_lightning.callbacks.graceful_interrupt import GracefulInterrupt, TrainingInterrupted
from opensearch_lightning.callbacks.judge_logging import JudgeLogging
from opensearch_lightning.callbacks.last_checkpoint import LastCheckpoint
from opensearch_lightning.callbacks.progress import RolloutProgressBar
from opensearch_lightning.callbacks.rollout import RolloutGeneration
from opensearch_lightning.callbacks.throughput import ThroughputLogging
from opensearch_lightning.callbacks.timing import StepTiming
from opensearch_lightning.callbacks.tool_execution import ToolExecution
from opensearch_lightning.callbacks.trajectory_log import TrajectoryLog

__all__ = [
    "ClampedAdvantageLogging",
    "FatalStepMasking",
    "GracefulInterrupt",
    "JudgeLogging",
    "LastCheckpoint",
    "RolloutGeneration",
    "RolloutProgressBar",
    "StepTiming",
    "ThroughputLogging",
    "ToolExecution",
    "ToolUseCurves",
    "TrainingInterrupted",
    "TrajectoryLog",
]
