"""Loggers, and what every logger is told about a run."""

from lightning_fsdp2.loggers.wandb import WandbLogger

__all__ = ["WandbLogger"]
