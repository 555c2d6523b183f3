"""The recipes of ``configs/`` at toy size.

What a toy run changes of a file stands in ``EVERYWHERE`` and ``RECIPES``; all else is as in the file.
"""

import json
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.expert_parallel import QWEN3_30B_A3B
from helpers.async_on_cpu import fuse_on_cpu
from helpers.compiler import needs_compiler
from helpers.cuda_on_cpu import cuda_on_cpu
from helpers.models import make_causal_lm
from lightning_fsdp2.data import build_byte_tokenizer

CONFIGS = Path(__file__).parents[2] / "configs"

VOCABULARY = {"vocab_size": 257, "bos_token_id": None, "eos_token_id": 256}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **VOCABULARY,
}
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

EVERYWHERE: dict[str, Any] = {
    "trainer.accelerator": "cpu",
    "trainer.num_nodes": 1,
    "trainer.max_steps": 2,
    "trainer.max_epochs": None,
    "trainer.log_every_n_steps": 1,
    "data.init_args.tokenizer": "model",
    "data.init_args.sequence_length": 96,
    "data.init_args.batch_size": 1,
    "data.init_args.global_batch_size": 4,
}
"""Of every recipe. The test's folder has a tiny ``model`` with a tokenizer, ``text`` and ``chats``."""


@dataclass(frozen=True)
class Recipe:
    """A file of ``configs/``."""

    parameters: int
    """As published for the architecture."""

    gpus: int
    ranks: int = 2
    """On which a toy run takes place."""

    changes: dict[str, Any] = field(default_factory=dict)
    """What a toy run changes in this file; sizes of the model's config are updated, not replaced."""

    architecture: dict[str, Any] = field(default_factory=dict)
    """Of the model that it starts from, as published; in a toy run it stands in for that, at its sizes."""

    context: Any = nullcontext
    """What stands in for hardware."""

    marks: tuple[Any, ...] = ()
    """Marks of a test that compiles its layers."""


PRETRAINED = {"model.init_args.pretrained": "model"}
LLAMA_8B = 8_030_261_248
LLAMA_70B = 70_553_706_496
QWEN3_30B = 30_532_122_624

QWEN3: dict[str, Any] = {
    **QWEN3_30B_A3B,
    "intermediate_size": 6144,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1.0e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1.0e-6,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}

TINY_QWEN3_MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
TINY_DEEPSEEK_V3 = {
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}

RECIPES = {
    "pretrain_llama3_8b_fsdp2": Recipe(LLAMA_8B, gpus=8, marks=(needs_compiler,)),
    "hsdp_multi_node": Recipe(
        LLAMA_8B,
        gpus=32,
        ranks=4,
        changes={"trainer.strategy.init_args.dp_replicate_size": 2},
        marks=(needs_compiler,),
    ),
    "llama3_70b_fsdp2_tp8_sp_async": Recipe(
        LLAMA_70B,
        gpus=64,
        ranks=4,
        changes={"trainer.strategy.init_args.tp_size": 2},
        context=fuse_on_cpu,
        marks=(needs_compiler,),
    ),
    "llama3_405b_fsdp2_pp16_tp8": Recipe(
        405_853_388_800,
        gpus=1024,
        ranks=4,
        changes={
            "trainer.strategy.init_args.pp_size": 2,
            "trainer.strategy.init_args.config": {"pp_microbatches": 4},
            "trainer.strategy.init_args.tp_size": 2,
            "model.init_args.config": {"num_hidden_layers": 4},
            "data.init_args.batch_size": 4,
        },
    ),
    "long_context_llama3_8b_cp8": Recipe(
        LLAMA_8B, gpus=8, ranks=4, changes={**PRETRAINED, "trainer.strategy.init_args.cp_size": 2}
    ),
    "qwen3_30b_a3b_fsdp2": Recipe(
        QWEN3_30B,
        gpus=32,
        changes={"model.init_args.config": TINY_QWEN3_MOE},
        architecture=QWEN3,
    ),
    "qwen3_30b_a3b_fsdp2_ep8": Recipe(
        QWEN3_30B,
        gpus=8,
        changes={"trainer.strategy.init_args.ep_size": 2, "model.init_args.config": TINY_QWEN3_MOE},
        architecture=QWEN3,
    ),
    "deepseek_v3_fsdp2_tp2_sp_ep64": Recipe(
        671_026_404_352,
        gpus=256,
        ranks=4,
        changes={"trainer.strategy.init_args.ep_size": 4, "model.init_args.config": TINY_DEEPSEEK_V3},
        architecture=DEEPSEEK_V3,
    ),
    "sft_llama3_8b": Recipe(LLAMA_8B, gpus=8, changes=PRETRAINED),
    "lora_llama3_70b_tp2": Recipe(LLAMA_70B, gpus=8, ranks=4, changes=PRETRAINED),
    "ddp_small": Recipe(134_515_008, gpus=8),
    "megatron_fsdp_8b": Recipe(LLAMA_8B, gpus=8, context=cuda_on_cpu),
    "megatron_fsdp_70b_tp8": Recipe(
        LLAMA_70B,
        gpus=64,
        ranks=4,
        changes={"trainer.strategy.init_args.tp_size": 2},
        context=cuda_on_cpu,
    ),
}


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())


def get(config: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        config = config[part]
    return config


def change(config: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    parent = get(config, section)
    parent[name] = {**parent[name], **value} if isinstance(value, dict) else value


def get_callback(config: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [callback for callback in config["trainer"]["callbacks"] if callback["class_path"].endswith(f".{name}")]
    return found["init_args"]


def make_toy(name: str) -> dict[str, Any]:
    """The config of a recipe with the changes of the tables."""
    recipe, config = RECIPES[name], read(name)
    if recipe.architecture:
        del config["model"]["init_args"]["pretrained"]
        config["model"]["init_args"]["config"] = dict(recipe.architecture)
    kind = "chats" if config["data"]["class_path"].endswith("ChatDataModule") else "text"
    paths = {"data.init_args.path": f"{kind}/train", "data.init_args.validation_path": f"{kind}/validation"}
    for key, value in {**EVERYWHERE, **paths, "trainer.devices": recipe.ranks, **recipe.changes}.items():
        change(config, key, value)
    if "config" in config["model"]["init_args"]:
        change(config, "model.init_args.config", SIZES)
        for key, value in recipe.changes.get("model.init_args.config", {}).items():
            change(config, f"model.init_args.config.{key}", value)
    get_callback(config, "ModelCheckpoint")["every_n_train_steps"] = 2
    return config


def write_inputs(folder: Path) -> None:
    """A tiny model with a tokenizer and a template, texts and conversations."""
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    make_causal_lm({"model_type": "llama", **SIZES}).save_pretrained(folder / "model")
    for split, count in (("train", 24), ("validation", 8)):
        text, chats = folder / "text" / split, folder / "chats" / split
        text.mkdir(parents=True)
        (text / "text.txt").write_text("\n".join(f"{split}: {number} and {number**3}" for number in range(99)))
        chats.mkdir(parents=True)
        rows = [
            [{"role": "user", "content": f"{number} + 1"}, {"role": "assistant", "content": str(number + 1)}]
            for number in range(count)
        ]
        (chats / "chats.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))


def get_bytes_per_value(
    strategy: str, precision: str | None, checkpointing: str | bool, architecture: dict[str, Any]
) -> float:
    """Of activations, per token, hidden value and layer, by the formulas of ``configs/README.md``."""
    is_bfloat16 = precision == "bf16-mixed"
    if checkpointing == "full":
        return 2 if is_bfloat16 and strategy == "FSDP2Strategy" else 4  # autocast leaves what layers hand on in float32
    kv = architecture["num_key_value_heads"] / architecture["num_attention_heads"]
    intermediate = architecture["intermediate_size"] / architecture["hidden_size"]
    return 30 + 4 * kv + 8 * intermediate if is_bfloat16 else 32 + 8 * kv + 16 * intermediate
