"""What `describe` says of ranks that do not exist is what ranks that do exist hold."""

import io
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.cuda_on_cpu import cuda_on_cpu
from helpers.models import LLAMA, make_causal_lm
from helpers.ranks import RankError, run_ranks
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_fsdp2 import (
    CausalLM,
    DDPStrategy,
    FSDP2Config,
    FSDP2Manager,
    FSDP2Strategy,
    MegatronFSDPConfig,
    MegatronFSDPManager,
    MegatronFSDPStrategy,
    create_device_mesh,
)
from lightning_fsdp2.plan.sharding_table import write_tables
from lightning_fsdp2.plan.simulation.sharding import Description, describe

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
PARAMETERS_8B = 8_030_261_248
NORMS_8B = 65 * 4096
TIMES = "\N{MULTIPLICATION SIGN}"


def make_trainer(strategy: Any, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        logger=False,
        plugins=[LightningEnvironment()],
        **options,
    )


def run_describe(
    strategy: Any, world_size: int, module: Any = None, *, precision: str = "32-true", num_nodes: int = 1
) -> Description:
    def run() -> Description:
        trainer = make_trainer(strategy, num_nodes=num_nodes, precision=precision)
        with torch.device("meta"):
            model = module() if module else CausalLM(config=LLAMA_8B)
        description = describe(trainer, model, world_size=world_size)
        assert not dist.is_initialized()
        assert all(parameter.is_meta for parameter in model.parameters())
        return description

    return run_ranks(run, 1, group=False)[0]


def get_table(description: Description) -> list[str]:
    output = io.StringIO()
    write_tables(description, output)
    return [line.rstrip() for line in output.getvalue().splitlines()]


@pytest.mark.guarantees("described-shards")
@pytest.mark.parametrize(
    ("sizes", "flags"),
    [({}, {}), ({"tp_size": 2}, {"sequence_parallel": True, "activation_checkpointing": "full"})],
    ids=["dp2", "tp2-sp"],
)
def test_shards_are_those_of_two_real_ranks(sizes: dict[str, int], flags: dict[str, Any]) -> None:
    config = FSDP2Config(**flags)

    def run() -> dict[str, tuple[int, ...]]:
        mesh = create_device_mesh(config, device_type="cpu", **sizes)
        model = FSDP2Manager(config, mesh).parallelize(make_causal_lm(LLAMA))
        return {f"model.{name}": tuple(p.to_local().shape) for name, p in model.named_parameters()}

    held = run_ranks(run, 2)[0]
    description = run_describe(FSDP2Strategy(config=config, **sizes), 2, lambda: CausalLM(config=LLAMA))
    assert {p.name: p.shard_shape for unit in description.units for p in unit.parameters} == held


def test_an_8b_model_on_512_ranks() -> None:
    strategy = FSDP2Strategy(tp_size=8, dp_replicate_size="auto", config=FSDP2Config(sequence_parallel=True))
    description = run_describe(strategy, 512, precision="bf16-mixed", num_nodes=4)
    assert description.mesh == {"dp_replicate": 4, "dp_shard": 16, "context_parallel": 1, "tensor_parallel": 8}
    shard = 4 * ((PARAMETERS_8B - NORMS_8B) // 128 + NORMS_8B // 16)  # norms are whole on tensor parallel ranks
    assert description.totals == {
        "ranks": 512,
        "parameters": PARAMETERS_8B,
        "trained_parameters": PARAMETERS_8B,
        "weight_bytes": shard,
        "gradient_bytes": shard,
        # in float32, where norms are whole
        "accumulated_gradient_bytes": 4 * ((PARAMETERS_8B - NORMS_8B) // 8 + NORMS_8B),
        "largest_gathered_bytes": 2 * (128256 * 4096 // 8 + 4096),  # of the head and its norm, in bfloat16
    }
    reducing = FSDP2Strategy(config=FSDP2Config(defer_fsdp_grad_sync=False))
    assert run_describe(reducing, 8).totals["accumulated_gradient_bytes"] == 0
    assert run_describe(FSDP2Strategy(), 1, Mixture).totals["accumulated_gradient_bytes"] == 0  # reduces each time
    assert description.precision == {
        "weights": "float32",
        "gathered": "bfloat16",
        "compute": "bfloat16",
        "reduction": "float32",
    }
    embedding, *layers, head = description.units
    assert embedding.modules == ["model.model.embed_tokens"]
    assert [layer.modules for layer in layers] == [[f"model.model.layers.{index}"] for index in range(32)]
    assert head.modules == ["model.model.norm", "model.lm_head"]
    assert [unit.reshard_after_forward for unit in description.units] == [True] * 32 + [False] * 2
    placements = {parameter.name.split(".", 4)[-1]: parameter.placements for parameter in layers[0].parameters}
    assert placements["mlp.down_proj.weight"] == {
        "dp_replicate": "whole",
        "dp_shard_cp": "dim 0",
        "tensor_parallel": "dim 1",
    }
    assert placements["input_layernorm.weight"]["tensor_parallel"] == "whole"


@pytest.mark.parametrize(("flag", "expected"), [(None, {False}), (True, {True}), (2, {2})])
def test_units_of_a_pipeline_stay_gathered_unless_the_config_says_otherwise(flag: Any, expected: set[Any]) -> None:
    trainer = make_trainer(FSDP2Strategy(pp_size=2, config=FSDP2Config(reshard_after_forward=flag)))
    config = {**LLAMA, "num_hidden_layers": 4, "vocab_size": 128}
    units = describe(trainer, CausalLM(config=config), world_size=8).units
    assert {unit.reshard_after_forward for unit in units if "layers" in unit.modules[0]} == expected


def test_each_pipeline_rank_holds_its_own_layers() -> None:
    trainer = make_trainer(FSDP2Strategy(pp_size=2, config=FSDP2Config(pp_layers_per_stage=[1, 3])))
    config = {**LLAMA, "num_hidden_layers": 4, "vocab_size": 128, "tie_word_embeddings": True}
    described = describe(trainer, CausalLM(config=config), world_size=4)
    assert described.mesh["pipeline_parallel"] == 2
    layers = [[name for name in unit.modules if "layers" in name] for unit in described.units]
    places = {
        name[0].rpartition(".")[2]: unit.pipeline_rank
        for name, unit in zip(layers, described.units, strict=True)
        if name
    }
    assert places == {"0": 0, "1": 1, "2": 1, "3": 1}
    # both ends hold the tied embedding, which is one parameter
    whole = sum(parameter.numel() for parameter in make_causal_lm(config).parameters())
    assert described.totals["parameters"] == whole
    held = [sum(unit.shard_bytes for unit in described.units if unit.pipeline_rank == place) for place in range(2)]
    assert described.totals["weight_bytes"] == max(held)
    assert sum(held) == 2 * (whole + config["vocab_size"] * config["hidden_size"])  # of 4 bytes, on two ranks each
    table = "\n".join(get_table(described))
    assert "Pipeline rank" in table
    assert "layers.1-3" in table


def test_layers_in_float8_are_described() -> None:
    strategy = FSDP2Strategy(tp_size=8, config=FSDP2Config(sequence_parallel=True, float8=True, enable_compile=True))
    description = run_describe(strategy, 16, precision="bf16-mixed")
    assert description.float8 is not None
    assert len(description.float8.converted) == 32 * 7
    assert description.to_dict()["float8"]["left_out"] == {"lm_head": "output head"}
    # of [4096, 4096], [1024, 4096] and [14336, 4096], eight ranks have 512, 128 and 1792 rows or columns
    assert len(description.float8.small) == 32 * 7
    text = " ".join(" ".join(get_table(description)).split())
    assert "224 linear layers multiply in float8 (rowwise_with_gw_hp), but not lm_head (output head)." in text


def test_flags_that_need_cuda_can_be_described() -> None:
    flags = {"sequence_parallel": True, "enable_compile": True, "enable_async_tensor_parallel": True}
    description = run_describe(FSDP2Strategy(tp_size=2, cp_size=2, config=FSDP2Config(**flags)), 8)
    assert description.mesh["context_parallel"] == 2
    assert description.totals["parameters"] == PARAMETERS_8B


def test_ddp_holds_the_whole_model_on_every_rank() -> None:
    description = run_describe(DDPStrategy(), 4, precision="bf16-mixed")
    assert description.totals["weight_bytes"] == 4 * PARAMETERS_8B
    assert {
        placement for unit in description.units for p in unit.parameters for placement in p.placements.values()
    } == {"whole"}
    assert description.totals["largest_gathered_bytes"] == 0
    assert not any("Gathered" in line for line in get_table(description))


def test_megatron_fsdp_steps_float32_weights() -> None:
    description = run_describe(MegatronFSDPStrategy(), 8, precision="bf16-true")
    assert description.precision == {
        "weights": "float32",
        "gathered": "bfloat16",
        "compute": "bfloat16",
        "reduction": "float32",
    }
    assert description.totals["weight_bytes"] == 4 * PARAMETERS_8B // 8
    assert len(description.units) == 33
    assert "buffers on CUDA" in description.notes[0]


def test_a_mistake_in_an_unused_plan_is_refused_as_in_a_fit() -> None:
    for strategy, config in ((FSDP2Strategy, FSDP2Config), (MegatronFSDPStrategy, MegatronFSDPConfig)):
        with pytest.raises(RankError, match="colwize"):
            run_describe(strategy(config=config(tp_plan={"layers.0": "colwize"})), 2, Mixture)


@pytest.mark.parametrize(
    ("ranks", "zero_dp_strategy"), [(2, 3), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((4, 3), (4, 0)))]
)
def test_tensor_parallel_shards_under_megatron_fsdp_are_those_of_real_ranks(ranks: int, zero_dp_strategy: int) -> None:
    config = MegatronFSDPConfig(zero_dp_strategy=zero_dp_strategy, sequence_parallel=True)

    def run() -> dict[str, tuple[tuple[int, ...], str]]:
        with cuda_on_cpu():
            mesh = create_device_mesh(config, device_type="cpu", tp_size=2)
            model = make_causal_lm(LLAMA)
            MegatronFSDPManager(config, mesh).parallelize(model)
            return {
                f"model.{n}": (tuple(p.to_local().shape), str(p.placements[1])) for n, p in model.named_parameters()
            }

    held = run_ranks(run, ranks)[::2]  # of the first tensor parallel rank
    strategy = MegatronFSDPStrategy(tp_size=2, config=config)
    description = run_describe(strategy, ranks, lambda: CausalLM(config=LLAMA))
    described = {p.name: p for unit in description.units for p in unit.parameters}
    assert [rank.keys() for rank in held] == [described.keys()] * len(held)
    shards = len(held) if zero_dp_strategy == 3 else 1
    for name, parameter in described.items():
        rows = sum(rank[name][0][0] for rank in held[:shards])
        # Megatron-FSDP cuts buffers and not parameters, so only the sum over the ranks must agree
        assert 0 <= parameter.shard_shape[0] * shards - rows < shards
        assert {rank[name][0][1:] for rank in held} == {parameter.shard_shape[1:]}
        tensor_parallel = {"S(0)": "dim 0", "S(1)": "dim 1", "R": "whole"}[held[0][name][1]]
        data_parallel = {"dp_shard_cp": "whole" if zero_dp_strategy == 0 else "dim 0"} if len(held) > 1 else {}
        assert parameter.placements == {**data_parallel, "tensor_parallel": tensor_parallel}
        assert list(parameter.placements)[-1] == "tensor_parallel"
    bytes_held = [4 * sum(math.prod(shape) for shape, _ in rank.values()) for rank in held]
    assert description.totals["weight_bytes"] == pytest.approx(bytes_held[0], rel=0.02)
    assert sum(bytes_held) <= description.totals["weight_bytes"] * len(held) <= sum(bytes_held) * 1.02
    embedding = 51 * 32  # the first rank has the larger part of 101 rows
    gathered = {3: 4 * (2 * embedding + 32), 0: 0}[zero_dp_strategy]
    assert description.units[0].gathered_bytes == gathered


def test_megatron_fsdp_with_tensor_parallelism_on_256_ranks() -> None:
    strategy = MegatronFSDPStrategy(tp_size=8, config=MegatronFSDPConfig(sequence_parallel=True))
    description = run_describe(strategy, 256, precision="bf16-true")
    shard = 4 * ((PARAMETERS_8B - NORMS_8B) // 256 + NORMS_8B // 32)  # norms are whole on tensor parallel ranks
    assert description.totals["weight_bytes"] == shard
    assert description.totals["largest_gathered_bytes"] == 2 * (2 * 128256 * 4096 // 8 + 4096)  # of the root
    assert [list(p.placements) for p in description.units[0].parameters] == [["dp_shard_cp", "tensor_parallel"]] * 3
    assert "buffers on CUDA" in description.notes[0]


class ShardsItself(LightningModule):
    def configure_model(self) -> None:
        self.layer = fully_shard(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("strategy", "module", "error"),
    [
        (FSDP2Strategy(tp_size=3), None, "tp_size=3 = 3 does not divide the world size 4"),
        (FSDP2Strategy(tp_size=4), lambda: CausalLM(config=LLAMA), "tp_size=4 does not divide num_key_value_heads=2"),
        ("auto", None, "describe supports the strategies of lightning_fsdp2, not SingleDeviceStrategy"),
        (FSDP2Strategy(), ShardsItself, "ShardsItself shards itself in `configure_model`"),
        (MegatronFSDPStrategy(config=MegatronFSDPConfig(zero_dp_strategy=1)), None, "supports zero_dp_strategy 0 and"),
        (
            MegatronFSDPStrategy(tp_size=4),
            lambda: CausalLM(config=LLAMA),
            "tp_size=4 does not divide num_key_value_heads=2",
        ),
    ],
    ids=["sizes", "heads", "strategy", "own-sharding", "zero-1", "heads-of-megatron"],
)
def test_what_cannot_be_described_says_so(strategy: str | Strategy, module: Any, error: str) -> None:
    with pytest.raises(RankError, match=error):
        run_describe(strategy, 4, module)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)

    def forward(self) -> None: ...


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self) -> None: ...


class Mixture(LightningModule):
    def configure_model(self) -> None:
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)


def test_equal_layers_and_experts_are_one_line() -> None:
    description = run_describe(FSDP2Strategy(), 2, Mixture)
    lines = get_table(description)
    assert sum(line.startswith("layers.0-2 ") for line in lines) == 1
    [row] = [line for line in lines if "experts" in line]
    assert row.split() == [
        *["experts.0-3.up.weight", "4", TIMES, "256", "B"],
        *["16", TIMES, "8"],
        "dim",
        "0",
    ]
    assert not any("float32" in line for line in lines if "experts" in line)  # the summary says it of all
    other = replace(description, precision={**description.precision, "weights": "bfloat16"})
    assert all("float32" in line for line in get_table(other) if "experts" in line)
    [frozen] = [line for line in lines if line.startswith(" weight")]
    assert frozen.split()[-1] == "yes"


def test_names_are_those_within_the_model_and_adapters_of_one_line() -> None:
    module = partial(CausalLM, config=LLAMA_8B, lora={"r": 8, "target_modules": ["q_proj", "down_proj"]})
    lines = get_table(run_describe(FSDP2Strategy(tp_size=2), 4, module))
    assert "names       within model.base_model.model" in lines
    names = [line.split()[0] for line in lines if line.startswith(" ") and len(line.split()) > 5]
    assert {"self_attn.q_proj.base_layer.weight", "mlp.down_proj.lora_A.default.weight"} <= {*names}


@pytest.mark.guarantees("described-shards")
def test_tables_fit_100_columns() -> None:
    strategy = FSDP2Strategy(tp_size=2, cp_size=2, dp_replicate_size=2, config=FSDP2Config(offload_policy=True))
    lines = get_table(run_describe(strategy, 16, precision="bf16-mixed"))
    assert max(map(len, lines)) <= 100
    units = next(index for index, line in enumerate(lines) if line.startswith("Unit "))
    layers = f"model.layers.0-31 32 {TIMES} 218.11 M 32 {TIMES} 208.0 MiB 32 {TIMES} 104.0 MiB resharded, 31 kept"
    assert " ".join(lines[units + 3].split()) == layers
    assert sum("q_proj" in line for line in lines) == 1
    assert lines[-3:] == [
        "The 2 ranks of dp_replicate hold the same shards.",
        "",
        "Weights, gradients and optimizer states are in host memory between uses.",
    ]
