"""Keras callbacks for `fit`."""

from tfparallel.callbacks.checkpoint import Checkpoint
from tfparallel.callbacks.chief_only import ChiefOnly
from tfparallel.callbacks.nan import NaNGuard
from tfparallel.callbacks.preemption import Preemption
from tfparallel.callbacks.step_measures import SentBytes, StepTime
from tfparallel.callbacks.warmup import LearningRateWarmup

__all__ = [
    "Checkpoint",
    "ChiefOnly",
    "LearningRateWarmup",
    "NaNGuard",
    "Preemption",
    "SentBytes",
    "StepTime",
]
