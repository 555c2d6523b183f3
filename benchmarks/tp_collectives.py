"""Count the traffic of a layer under tensor and sequence parallelism, per family, and compare it with the minimum.

The collectives of one layer are half of the difference between a model of four layers and a model of two. Forward and
backward are counted separately. Bytes are the bytes that a rank sends in a ring of all ranks. An all-gather or a
reduce-scatter sends (n - 1) / n of the whole tensor, and an all-reduce twice as much. Tensors of at most an eighth of
the hidden states, such as those of norms, biases and routing weights, have a separate column.

A dense layer has two regions, attention and MLP. Its minimum is two all-reduces of the hidden states in forward and two
in backward. With sequence parallelism, it is two all-gathers and two reduce-scatters in each direction.

    torchrun --standalone --nproc-per-node 2 benchmarks/tp_collectives.py
"""
# ruff: noqa: T201

import argparse
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.tensor.apply import apply_tensor_parallel

BATCH, LENGTH, WIDTH = 2, 32, 64
HIDDEN_STATES = BATCH * LENGTH * WIDTH
"""Number of elements of the hidden states, over all ranks."""

SHARED: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": WIDTH, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SHARED,
    "qwen3": {**SHARED, "head_dim": 8},
    "gemma3_text": {**SHARED, "head_dim": 8},
    "olmo2": SHARED,
    "phi3": SHARED,
    "stablelm": SHARED,
    "gpt_neox": SHARED,
    "gpt2": {"vocab_size": 128, "n_embd": WIDTH, "n_head": 8, "n_positions": LENGTH},
    "opt": {**SHARED, "ffn_dim": 4 * WIDTH, "word_embed_proj_dim": WIDTH},
    "mixtral": {**SHARED, "num_local_experts": 4},
    "qwen3_moe": {**SHARED, **EXPERTS, "head_dim": 8, "num_experts": 4},
    "gpt_oss": {**SHARED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}
DENSE = tuple(family for family in FAMILIES if "moe" not in family and family not in ("mixtral", "gpt_oss"))
KINDS = {
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
}
RING_PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}


@dataclass
class Traffic:
    """Collectives of forward or of backward, by kind. Collectives of small tensors have the kind ``small``."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)


class TrafficCounter(TorchDispatchMode):
    """Dispatch mode that counts the functional collectives, which tensor parallelism calls."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if namespace == "_c10d_functional" and name in KINDS:
            self._add(KINDS[name], max(args[0], result, key=Tensor.numel))
        return result

    def _add(self, kind: str, whole: Tensor) -> None:
        ranks = dist.get_world_size()
        key = "small" if whole.numel() <= HIDDEN_STATES // 8 else kind
        self.traffic.calls[key] += 1
        self.traffic.bytes[key] += RING_PASSES[kind] * whole.numel() * whole.element_size() * (ranks - 1) // ranks


def main() -> None:
    """Count the traffic of every family, and print a table."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print_heading()
    for family in arguments.families or FAMILIES:
        for sequence_parallel in (False, True):
            per_layer = count_layer(family, sequence_parallel)
            if dist.get_rank() == 0:
                print_rows(family, sequence_parallel, per_layer)
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, help="default: all")
    return parser.parse_args()


def count_layer(family: str, sequence_parallel: bool) -> dict[str, Traffic]:
    """Count the traffic of one layer, in forward and backward."""
    short, long = (count_step(make_model(family, layers), sequence_parallel) for layers in (2, 4))
    result = {}
    for direction in short:
        result[direction] = traffic = Traffic()
        for key in long[direction].calls:
            traffic.calls[key] = (long[direction].calls[key] - short[direction].calls[key]) // 2
            traffic.bytes[key] = (long[direction].bytes[key] - short[direction].bytes[key]) // 2
    return result


def make_model(family: str, layers: int) -> nn.Module:
    """Make a random model without dropout."""
    name = "n_layer" if family == "gpt2" else "num_hidden_layers"
    config = AutoConfig.for_model(family, **FAMILIES[family], **{name: layers})
    for field_name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "hidden_dropout", "attention_dropout"):
        if hasattr(config, field_name):
            setattr(config, field_name, 0.0)
    return AutoModelForCausalLM.from_config(config)


def count_step(model: nn.Module, sequence_parallel: bool) -> dict[str, Traffic]:
    """Count the traffic of a whole model, in forward and backward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor_parallel",))
    apply_tensor_parallel(find_structure(model), mesh, sequence_parallel=sequence_parallel)
    tokens = torch.randint(3, 128, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    with TrafficCounter() as forward:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    with TrafficCounter() as backward:
        loss.backward()
    return {"forward": forward.traffic, "backward": backward.traffic}


def print_heading() -> None:
    """Print versions, sizes and the head of the table."""
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {dist.get_world_size()} ranks,")
    print(f"{BATCH} x {LENGTH} tokens of width {WIDTH} in float32; per layer:\n")
    columns = ("family", "layout", "direction", *(f"{kind}s" for kind in RING_PASSES), "KiB sent", "min. KiB", "small")
    print("| " + " | ".join(columns) + " |")
    print("|---|---|---|--:|--:|--:|--:|--:|--:|")


def print_rows(family: str, sequence_parallel: bool, per_layer: dict[str, Traffic]) -> None:
    """Print one row for each direction."""
    # two regions, each with two passes around the ring
    least = 4 * HIDDEN_STATES * 4 * (dist.get_world_size() - 1) // dist.get_world_size()
    for direction, traffic in per_layer.items():
        sent = sum(size for key, size in traffic.bytes.items() if key != "small")
        cells = [
            family,
            "tp+sp" if sequence_parallel else "tp",
            direction,
            *(traffic.calls[kind] for kind in RING_PASSES),
            f"{sent / 1024:.0f}",
            f"{least / 1024:.0f}" if family in DENSE else f"{least / 1024:.0f} (dense)",
            f"{traffic.calls['small']} ({traffic.bytes['small'] / 1024:.1f} KiB)",
        ]
        print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()
