"""What users may write for the strategies in short."""

from typing import Any

STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp2": {"class_path": "lightning_fsdp2.FSDP2Strategy"},
    "fsdp2_offload": {
        "class_path": "lightning_fsdp2.FSDP2Strategy",
        "init_args": {"config": {"offload_policy": True}},
    },
    "lightning_fsdp2_ddp": {"class_path": "lightning_fsdp2.DDPStrategy"},
    "megatron_fsdp": {"class_path": "lightning_fsdp2.MegatronFSDPStrategy"},
}
"""The command line writes them out, so that they take options; Lightning's registry has them too."""
