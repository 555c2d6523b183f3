import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import RowwiseParallel

import lightning_fsdp2.startup.cli_types
from lightning_fsdp2.config import (
    CheckpointConfig,
    DDPConfig,
    Float8Config,
    FSDP2Config,
    MegatronFSDPConfig,
    dtype_from_str,
)
from lightning_fsdp2.startup.cli_types import register_cli_types

CONFIGS = {FSDP2Config: "FSDP2StandIn", MegatronFSDPConfig: "MegatronStandIn", DDPConfig: "DDPStandIn"}


class _StandIn(SingleDeviceStrategy):
    """Has the options of a strategy of ours, and nothing else of it."""

    def __init__(self, config: Any, checkpoint: CheckpointConfig | None) -> None:
        super().__init__(device="cpu")
        self.config = config
        self.checkpoint = checkpoint


class FSDP2StandIn(_StandIn):
    def __init__(self, config: FSDP2Config | None = None, checkpoint: CheckpointConfig | None = None) -> None:
        super().__init__(config, checkpoint)


class MegatronStandIn(_StandIn):
    def __init__(self, config: MegatronFSDPConfig | None = None, checkpoint: CheckpointConfig | None = None) -> None:
        super().__init__(config, checkpoint)


class DDPStandIn(_StandIn):
    def __init__(self, config: DDPConfig | None = None, checkpoint: CheckpointConfig | None = None) -> None:
        super().__init__(config, checkpoint)


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")


def parse(*args: str) -> _StandIn:
    """The strategy that a user's own LightningCLI makes of ``args``."""
    trainer = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    cli = LightningCLI(
        BoringModel,
        trainer_defaults=trainer,
        save_config_callback=None,
        auto_configure_optimizers=False,
        parser_kwargs={"exit_on_error": False},
        args=list(args),
        run=False,
    )
    return cli.trainer.strategy


def class_path(config_class: type) -> str:
    return f"{__name__}.{CONFIGS[config_class]}"


def write_yaml(folder: Path, config_class: type, config: dict[str, Any], **init_args: Any) -> str:
    strategy = {"class_path": class_path(config_class), "init_args": {"config": config, **init_args}}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    return f"--config={path}"


YAML_CASES = {
    "fsdp2": (
        FSDP2Config,
        {
            "mp_policy": {"param_dtype": "bf16", "cast_forward_inputs": False},
            "offload_policy": {"pin_memory": False},
            "autocast_dtype": "torch.bfloat16",
            "activation_checkpointing": "selective",
            "activation_checkpointing_scope": ["language", "vision"],
            "reshard_after_forward": 1,
            "context_parallel_method": "ulysses",
            "backend": "cpu:gloo,cuda:nccl",
            "bind_device_id": True,
            "float8": {"recipe": "tensorwise", "skip": ["model.layers.0.mlp.down_proj"], "filter_small": True},
            "fsdp2_backward_prefetch_depth": 0,
        },
        FSDP2Config(
            mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, None, False),
            offload_policy=CPUOffloadPolicy(pin_memory=False),
            autocast_dtype=torch.bfloat16,
            activation_checkpointing="selective",
            activation_checkpointing_scope=["language", "vision"],
            reshard_after_forward=1,
            context_parallel_method="ulysses",
            backend="cpu:gloo,cuda:nccl",
            bind_device_id=True,
            float8=Float8Config(recipe="tensorwise", skip=["model.layers.0.mlp.down_proj"], filter_small=True),
            fsdp2_backward_prefetch_depth=0,
        ),
    ),
    "fsdp2-short": (
        FSDP2Config,
        {"offload_policy": True, "activation_checkpointing": True, "reshard_after_forward": False, "float8": True},
        FSDP2Config(offload_policy=True, activation_checkpointing=True, reshard_after_forward=False, float8=True),
    ),
    "fsdp2-plan": (
        FSDP2Config,
        {"tp_plan": {"layers.*.q_proj": "colwise", "lm_head": "rowwise"}},
        FSDP2Config(tp_plan={"layers.*.q_proj": "colwise", "lm_head": "rowwise"}),
    ),
    "fsdp2-defaults": (FSDP2Config, {}, FSDP2Config()),
    "megatron": (
        MegatronFSDPConfig,
        {"zero_dp_strategy": 2, "megatron_fsdp_unit_modules": ["a.B", "c.D"], "check_for_nan_in_grad": False},
        MegatronFSDPConfig(zero_dp_strategy=2, megatron_fsdp_unit_modules=["a.B", "c.D"], check_for_nan_in_grad=False),
    ),
    "ddp": (
        DDPConfig,
        {"autocast_dtype": "bf16", "bucket_cap_mb": 10, "activation_checkpointing_scope": "language"},
        DDPConfig(autocast_dtype=torch.bfloat16, bucket_cap_mb=10.0, activation_checkpointing_scope="language"),
    ),
}


@pytest.mark.parametrize(
    ("config_class", "options", "expected"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if name in ("fsdp2-plan", "fsdp2-defaults") else ())
        for name, case in YAML_CASES.items()
    ],
)
def test_yaml_and_printed_config_make_the_same_object(config_class, options, expected, tmp_path, capsys):
    from_yaml = write_yaml(tmp_path, config_class, options)
    assert parse(from_yaml).config == expected

    with pytest.raises(SystemExit):
        parse(from_yaml, "--print_config")
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert parse(f"--config={printed}").config == expected


def test_printed_dtypes_are_short_names(tmp_path, capsys):
    options = {"autocast_dtype": "torch.half", "mp_policy": {"param_dtype": "bf16"}}
    with pytest.raises(SystemExit):
        parse(write_yaml(tmp_path, FSDP2Config, options), "--print_config")
    printed = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]["init_args"]["config"]["init_args"]
    assert printed["autocast_dtype"] == "float16"
    assert printed["mp_policy"]["param_dtype"] == "bfloat16"


def test_plan_of_style_objects_from_yaml(tmp_path):
    style = {
        "class_path": "torch.distributed.tensor.parallel.RowwiseParallel",
        "init_args": {"use_local_output": False},
    }
    plan = parse(write_yaml(tmp_path, FSDP2Config, {"tp_plan": {"o_proj": style}})).config.tp_plan
    assert isinstance(plan["o_proj"], RowwiseParallel)
    assert not plan["o_proj"].use_local_output


@pytest.mark.parametrize(
    ("config_class", "flag", "expected"),
    [
        (FSDP2Config, "config.mp_policy.param_dtype=bf16", FSDP2Config(mp_policy={"param_dtype": "bf16"})),
        (FSDP2Config, "init_args.config.sequence_parallel=true", FSDP2Config(sequence_parallel=True)),
        (FSDP2Config, "config.offload_policy.pin_memory=false", FSDP2Config(offload_policy={"pin_memory": False})),
        (FSDP2Config, "config.reshard_after_forward=4", FSDP2Config(reshard_after_forward=4)),
        (FSDP2Config, "config.reshard_after_forward=true", FSDP2Config(reshard_after_forward=True)),
        (MegatronFSDPConfig, "init_args.config.nccl_ub=true", MegatronFSDPConfig(nccl_ub=True)),
        (DDPConfig, "config.autocast_dtype=torch.bfloat16", DDPConfig(autocast_dtype="bf16")),
    ],
)
def test_flags(config_class, flag, expected):
    assert parse(f"--trainer.strategy={class_path(config_class)}", f"--trainer.strategy.{flag}").config == expected


def test_flag_overrides_yaml(tmp_path):
    from_yaml = write_yaml(tmp_path, FSDP2Config, {"sequence_parallel": True, "fsdp2_forward_prefetch_depth": 3})
    config = parse(from_yaml, "--trainer.strategy.init_args.config.fsdp2_forward_prefetch_depth=4").config
    assert config == FSDP2Config(sequence_parallel=True, fsdp2_forward_prefetch_depth=4)


def test_checkpoint_config(tmp_path):
    strategy = parse(write_yaml(tmp_path, FSDP2Config, {}, checkpoint={"format": "full", "weights_only": True}))
    assert strategy.checkpoint == CheckpointConfig(format="full", weights_only=True)


@pytest.mark.parametrize("config_class", CONFIGS)
def test_unknown_key_is_named(config_class, tmp_path):
    with pytest.raises(Exception, match="Option 'sequence_paralel' is not accepted"):
        parse(write_yaml(tmp_path, config_class, {"sequence_paralel": True}))


@pytest.mark.parametrize(
    ("config_class", "options", "message"),
    [
        (FSDP2Config, {"autocast_dtype": "bf17"}, "'bf17' is not the name of a torch dtype"),
        (FSDP2Config, {"use_hf_tp_plan": True}, 'use tp_plan="hf"'),
        (FSDP2Config, {"mp_policy": {"_target_": "x"}}, "Option '_target_' is not accepted"),
        (MegatronFSDPConfig, {"average_in_collective": True}, "fails in megatron-fsdp"),
        (MegatronFSDPConfig, {"zero_dp_strategy": 4}, "zero_dp_strategy=4 is unknown; use 0, 1, 2 or 3"),
    ],
)
def test_wrong_values_in_yaml(config_class, options, message, tmp_path):
    with pytest.raises(Exception, match=message):
        parse(write_yaml(tmp_path, config_class, options))


def test_registering_again_changes_nothing():
    register_cli_types(dtype_from_str)
    register_cli_types(dtype_from_str)
    parser = ArgumentParser()
    parser.add_argument("--dtype", type=torch.dtype)
    parsed = parser.parse_args(["--dtype=bf16"])
    assert parsed.dtype is torch.bfloat16
    assert parser.dump(parsed) == "dtype: bfloat16\n"


def test_without_jsonargparse(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonargparse.typing", None)
    importlib.reload(lightning_fsdp2.startup.cli_types).register_cli_types(dtype_from_str)
