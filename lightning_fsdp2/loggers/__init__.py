"""Loggers, and the description of a run that is logged to every logger."""

from lightning_fsdp2.loggers.wandb import WandbLogger

__all__ = ["WandbLogger"]
