"""FSDP2 for PyTorch Lightning's Trainer and Hugging Face models, with the same gradients as a single-process run."""

from lightning_fsdp2._cli_types import register_cli_types
from lightning_fsdp2._moved import keep_moved_paths
from lightning_fsdp2.checkpoint import consolidate_checkpoint, load_checkpoint, save_checkpoint, verify_checkpoint
from lightning_fsdp2.config import (
    CheckpointConfig,
    DDPConfig,
    DistributedConfig,
    Float8Config,
    FSDP2Config,
    MegatronFSDPConfig,
)
from lightning_fsdp2.data import ChatDataModule, TextDataModule
from lightning_fsdp2.export import export_hf
from lightning_fsdp2.managers import DDPManager, FSDP2Manager, MegatronFSDPManager
from lightning_fsdp2.mesh import create_device_mesh
from lightning_fsdp2.models import CausalLM, load_from_checkpoint
from lightning_fsdp2.parallel.data.gradients import clip_grad_norm_, defer_grad_sync
from lightning_fsdp2.parallel.loss.token_mean import apply_token_mean_, token_mean_loss
from lightning_fsdp2.strategies import DDPStrategy, FSDP2Strategy, MegatronFSDPStrategy
from lightning_fsdp2.strategies.registry import register_strategies

__version__ = "0.1.0"

keep_moved_paths()
register_cli_types()
register_strategies()

__all__ = [
    "CausalLM",
    "ChatDataModule",
    "CheckpointConfig",
    "DDPConfig",
    "DDPManager",
    "DDPStrategy",
    "DistributedConfig",
    "FSDP2Config",
    "FSDP2Manager",
    "FSDP2Strategy",
    "Float8Config",
    "MegatronFSDPConfig",
    "MegatronFSDPManager",
    "MegatronFSDPStrategy",
    "TextDataModule",
    "apply_token_mean_",
    "clip_grad_norm_",
    "consolidate_checkpoint",
    "create_device_mesh",
    "defer_grad_sync",
    "export_hf",
    "load_checkpoint",
    "load_from_checkpoint",
    "save_checkpoint",
    "token_mean_loss",
    "verify_checkpoint",
]
