"""Loggers, and the description of a run that every logger receives."""

from lightning_fsdp2.loggers.wandb import WandbLogger

__all__ = ["WandbLogger"]
