"""Lightning callbacks that measure, protect and save training runs."""

from lightning_fsdp2.callbacks.expert_bias import ExpertBias
from lightning_fsdp2.callbacks.expert_load import ExpertLoad
from lightning_fsdp2.callbacks.exponential_moving_average import ExponentialMovingAverage
from lightning_fsdp2.callbacks.flight_recorder import FlightRecorder
from lightning_fsdp2.callbacks.garbage_collection import GarbageCollection
from lightning_fsdp2.callbacks.gradient_norm import GradientNorm
from lightning_fsdp2.callbacks.hugging_face_export import HuggingFaceExport
from lightning_fsdp2.callbacks.learning_rates import LearningRates
from lightning_fsdp2.callbacks.loss_over_ranks import LossOverRanks
from lightning_fsdp2.callbacks.memory_snapshot import MemorySnapshot
from lightning_fsdp2.callbacks.memory_usage import MemoryUsage
from lightning_fsdp2.callbacks.model_summary import ModelSummary
from lightning_fsdp2.callbacks.nan_guard import NaNGuard
from lightning_fsdp2.callbacks.preemption import Preemption
from lightning_fsdp2.callbacks.process_group_timeout import ProcessGroupTimeout
from lightning_fsdp2.callbacks.progress_bar import TrainingProgressBar
from lightning_fsdp2.callbacks.run_report import RunReport
from lightning_fsdp2.callbacks.step_profiler import StepProfiler
from lightning_fsdp2.callbacks.throughput import Throughput

__all__ = [
    "ExpertBias",
    "ExpertLoad",
    "ExponentialMovingAverage",
    "FlightRecorder",
    "GarbageCollection",
    "GradientNorm",
    "HuggingFaceExport",
    "LearningRates",
    "LossOverRanks",
    "MemorySnapshot",
    "MemoryUsage",
    "ModelSummary",
    "NaNGuard",
    "Preemption",
    "ProcessGroupTimeout",
    "RunReport",
    "StepProfiler",
    "Throughput",
    "TrainingProgressBar",
]
