"""Loggers, and what every logger is told of a run."""

from lightning_fsdp2.loggers.wandb import WandbLogger

__all__ = ["WandbLogger"]
