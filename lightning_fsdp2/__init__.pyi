"""Names that ``lightning_fsdp2`` imports when they are first used."""

from .checkpoint import consolidate_checkpoint, load_checkpoint, save_checkpoint, verify_checkpoint
from .config import (
    CheckpointConfig,
    DDPConfig,
    DistributedConfig,
    Float8Config,
    FSDP2Config,
    MegatronFSDPConfig,
)
from .data import ChatDataModule, TextDataModule
from .export import export_hf
from .managers import DDPManager, FSDP2Manager, MegatronFSDPManager
from .mesh import create_device_mesh
from .models import CausalLM, load_from_checkpoint
from .parallel.data.gradients import clip_grad_norm_, defer_grad_sync
from .parallel.loss.token_mean import apply_token_mean_, token_mean_loss
from .strategies import DDPStrategy, FSDP2Strategy, MegatronFSDPStrategy

__version__: str

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
