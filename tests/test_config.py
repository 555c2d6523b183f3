import dataclasses
import re
from typing import Any, get_args

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor.parallel import ColwiseParallel

from lightning_fsdp2.config import (
    FLAGS_OF_A_RUN,
    CheckpointConfig,
    DDPConfig,
    DistributedConfig,
    Float8Config,
    FSDP2Config,
    MegatronFSDPConfig,
    dtype_from_str,
    spell_alike,
)

# the published contract, written out by hand
DEFAULTS = {
    FSDP2Config: {
        "sequence_parallel": False,
        "tp_plan": None,
        "patch_is_packed_sequence": False,
        "mp_policy": None,
        "offload_policy": None,
        "autocast_dtype": None,
        "activation_checkpointing": False,
        "activation_checkpointing_scope": "all",
        "defer_fsdp_grad_sync": True,
        "reshard_after_forward": None,
        "loss_parallel": False,
        "context_parallel_method": "auto",
        "context_parallel_inputs": {},
        "backend": None,
        "bind_device_id": False,
        "enable_async_tensor_parallel": False,
        "enable_compile": False,
        "enable_fsdp2_prefetch": True,
        "fsdp2_backward_prefetch_depth": 2,
        "fsdp2_forward_prefetch_depth": 1,
        "pp_schedule": "1f1b",
        "pp_microbatches": None,
        "pp_stages_per_rank": None,
        "pp_layers_per_stage": None,
        "float8": None,
    },
    Float8Config: {"recipe": "rowwise_with_gw_hp", "skip": None, "filter_small": False, "emulate": False},
    MegatronFSDPConfig: {
        "sequence_parallel": False,
        "tp_plan": None,
        "loss_parallel": False,
        "megatron_fsdp_unit_modules": None,
        "zero_dp_strategy": 3,
        "init_fsdp_with_meta_device": False,
        "grad_reduce_in_fp32": True,
        "preserve_fp32_weights": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "check_for_nan_in_grad": None,
        "report_nan_in_param_grad": False,
        "average_in_collective": False,
        "disable_bucketing": False,
        "calculate_per_token_loss": False,
        "keep_fp8_transpose_cache": False,
        "nccl_ub": False,
        "fsdp_double_buffer": False,
        "activation_checkpointing": False,
        "autocast_dtype": None,
        "backend": None,
        "bind_device_id": False,
    },
    DDPConfig: {
        "activation_checkpointing": False,
        "activation_checkpointing_scope": "all",
        "autocast_dtype": None,
        "find_unused_parameters": False,
        "static_graph": False,
        "gradient_as_bucket_view": False,
        "bucket_cap_mb": None,
        "broadcast_buffers": True,
        "backend": None,
        "bind_device_id": False,
    },
    CheckpointConfig: {
        "format": "sharded",
        "async_save": False,
        "verify": True,
        "save_at_end": True,
        "trust_checkpoint": False,
        "frozen_parameters": True,
        "weights_only": None,
    },
}


@pytest.mark.parametrize("config_class", DEFAULTS)
def test_defaults(config_class):
    assert config_class().to_dict() == DEFAULTS[config_class]


def test_distributed_config_is_the_union():
    assert set(get_args(DistributedConfig)) == {FSDP2Config, MegatronFSDPConfig, DDPConfig}


@pytest.mark.parametrize("config_class", DEFAULTS)
def test_frozen_and_keyword_only(config_class):
    with pytest.raises(dataclasses.FrozenInstanceError):
        config_class().backend = "gloo"
    with pytest.raises(TypeError, match="positional"):
        config_class(True)


def test_to_dict_is_shallow():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=False)
    plan = {"layers.*.q_proj": ColwiseParallel()}
    options = FSDP2Config(mp_policy=policy, offload_policy=offload, tp_plan=plan).to_dict()
    assert options["mp_policy"] is policy
    assert options["offload_policy"] is offload
    assert options["tp_plan"] is plan


@pytest.mark.parametrize(
    "config",
    [
        FSDP2Config(sequence_parallel=True, loss_parallel=True, mp_policy={"param_dtype": "bf16"}),
        MegatronFSDPConfig(zero_dp_strategy=1),
    ],
)
def test_to_dict_and_replace_make_an_equal_config(config):
    assert type(config)(**config.to_dict()) == config
    assert dataclasses.replace(config) == config


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        (["bfloat16", "bf16", "torch.bfloat16"], torch.bfloat16),
        (["float16", "fp16", "half", "torch.float16", "torch.half"], torch.float16),
        (["float32", "fp32", "float", "torch.float32"], torch.float32),
        (["float64", "torch.float64"], torch.float64),
        (["int64", "torch.int64"], torch.int64),
    ],
)
def test_dtype_from_str(names, dtype):
    assert {dtype_from_str(name) for name in names} == {dtype}


@pytest.mark.parametrize("name", ["bf17", "", "torch", "nn", "torch.torch.float32"])
def test_dtype_from_str_refuses(name):
    with pytest.raises(ValueError, match=f"^{name!r} is not the name of a torch dtype; use bfloat16"):
        dtype_from_str(name)


@pytest.mark.parametrize("config_class", [FSDP2Config, DDPConfig])
@pytest.mark.parametrize("value", ["bf16", "torch.bfloat16", torch.bfloat16])
def test_autocast_dtype(config_class, value):
    assert config_class(autocast_dtype=value).autocast_dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("given", "held"),
    [
        (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        ),
        (
            {"param_dtype": "bf16", "output_dtype": torch.float32, "cast_forward_inputs": False},
            MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32, False),
        ),
        (
            MixedPrecisionPolicy(param_dtype="bf16", reduce_dtype="torch.bfloat16"),
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        ),
        (MixedPrecisionPolicy(), MixedPrecisionPolicy()),
    ],
    ids=["fp32-reduce", "mapping", "strings", "nothing-set"],
)
def test_mp_policy(given, held):
    assert FSDP2Config(mp_policy=given).mp_policy == held


@pytest.mark.parametrize(
    ("given", "held"),
    [
        (None, None),
        (False, None),
        (True, CPUOffloadPolicy()),
        ({"pin_memory": False}, CPUOffloadPolicy(pin_memory=False)),
        (CPUOffloadPolicy(pin_memory=False), CPUOffloadPolicy(pin_memory=False)),
    ],
)
def test_offload_policy(given, held):
    assert FSDP2Config(offload_policy=given).offload_policy == held


@pytest.mark.parametrize(
    ("given", "held"),
    [
        (None, None),
        (False, None),
        (True, Float8Config()),
        ({"recipe": "rowwise", "skip": ["lm_head"]}, Float8Config(recipe="rowwise", skip=["lm_head"])),
        (Float8Config(emulate=True), Float8Config(emulate=True)),
    ],
)
def test_float8(given, held):
    assert FSDP2Config(float8=given).float8 == held


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": True},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing_scope": "vision"},
        {"activation_checkpointing_scope": ["language", "audio"]},
        {"reshard_after_forward": True},
        {"reshard_after_forward": False},
        {"reshard_after_forward": 1},
        {"reshard_after_forward": 8},
        {"context_parallel_method": "ulysses"},
        {"context_parallel_method": "allgather"},
        {"context_parallel_inputs": {"span_ids": -1, "table": None}},
        {"backend": "nccl"},
        {"backend": "gloo"},
        {"backend": "cpu:gloo,cuda:nccl"},
        {"backend": "cpu:gloo,cuda:nccl", "offload_policy": CPUOffloadPolicy()},
        {"fsdp2_backward_prefetch_depth": 0, "fsdp2_forward_prefetch_depth": 0},
        {"pp_schedule": "gpipe", "pp_microbatches": 1, "pp_stages_per_rank": 1},
        {"pp_schedule": "interleaved_1f1b", "pp_stages_per_rank": 2, "pp_layers_per_stage": [3, 4, 4, 3]},
        {"tp_plan": "hf"},
        {"tp_plan": {"layers.*.q_proj": "colwise"}},
        {"tp_plan": "my_package.my_plan"},
    ],
    ids=str,
)
def test_accepted_values_are_kept(options):
    config = FSDP2Config(**options)
    for name, value in options.items():
        held = getattr(config, name)
        assert type(held) is type(value)
        assert held == value


# config class, option, value, error, what the message says after "option=value"
ERRORS: list[tuple[Any, str, Any, type[Exception], str]] = [
    (FSDP2Config, "sequence_parallel", "false", TypeError, "must be a bool; use True or False."),
    (FSDP2Config, "enable_fsdp2_prefetch", None, TypeError, "must be a bool; use True or False."),
    (FSDP2Config, "tp_plan", 3, TypeError, 'must be None, "hf", a dict or an import path.'),
    (FSDP2Config, "autocast_dtype", "bf17", ValueError, "use bfloat16 (bf16)"),
    (
        FSDP2Config,
        "autocast_dtype",
        "fp16",
        ValueError,
        "needs a gradient scaler, which is not supported; use torch.bfl",
    ),
    (DDPConfig, "autocast_dtype", torch.float32, ValueError, "autocast_dtype=torch.float32 is not a dtype of autocast"),
    (FSDP2Config, "autocast_dtype", 16, TypeError, "must be a floating point dtype; use for example torch.bfloat16."),
    (FSDP2Config, "autocast_dtype", torch.int64, TypeError, "must be a floating point dtype"),
    (FSDP2Config, "mp_policy", "bf16", TypeError, "must be a MixedPrecisionPolicy, a mapping of its fields or None; "),
    (FSDP2Config, "offload_policy", "cpu", TypeError, "use None to keep everything on the device."),
    (FSDP2Config, "offload_policy", OffloadPolicy(), TypeError, "must be True, a CPUOffloadPolicy or a mapping"),
    (FSDP2Config, "activation_checkpointing", "ful", ValueError, "use False, True, 'full' or 'selective'."),
    (FSDP2Config, "activation_checkpointing", 1, ValueError, "use False, True, 'full' or 'selective'."),
    (DDPConfig, "activation_checkpointing", "ful", ValueError, "use False, True, 'full' or 'selective'."),
    (MegatronFSDPConfig, "activation_checkpointing", "half", ValueError, "use False, True, 'full' or 'selective'."),
    (FSDP2Config, "activation_checkpointing_scope", "text", ValueError, "use 'all', 'language', 'vision', 'audio' or"),
    (FSDP2Config, "activation_checkpointing_scope", ["all", "vision"], ValueError, "use 'all' alone, or leave it out"),
    (FSDP2Config, "activation_checkpointing_scope", [], ValueError, "use activation_checkpointing=False."),
    (DDPConfig, "activation_checkpointing_scope", 3, TypeError, "must be a word or a list of words; use 'all',"),
    (FSDP2Config, "reshard_after_forward", 0, ValueError, "must be a bool, None or an int >= 1; use False"),
    (FSDP2Config, "reshard_after_forward", 1.5, TypeError, "must be a bool, an int or None."),
    (FSDP2Config, "context_parallel_method", "ring", ValueError, "is unknown; use 'auto', 'allgather' or 'ulysses'."),
    (FSDP2Config, "context_parallel_inputs", ["spans"], TypeError, "must be a mapping of names to dims; use for exam"),
    (FSDP2Config, "backend", "ncl", ValueError, "has an unknown backend 'ncl'; use 'gloo', 'nccl'"),
    (
        MegatronFSDPConfig,
        "backend",
        "cpu:gloo,cuda:ncl",
        ValueError,
        "has an unknown backend 'ncl'; use 'gloo', 'nccl'",
    ),
    (DDPConfig, "backend", "gloo,nccl", ValueError, "must name each device type once; use for example cpu:gloo,"),
    (FSDP2Config, "backend", "cpu:gloo,cpu:mpi", ValueError, "must name each device type once"),
    (FSDP2Config, "backend", 1, TypeError, "must be a string; use 'nccl', 'gloo' or None."),
    (FSDP2Config, "fsdp2_backward_prefetch_depth", -1, ValueError, "must not be negative; use 0 to prefetch nothing."),
    (FSDP2Config, "fsdp2_forward_prefetch_depth", -2, ValueError, "must not be negative; use 0 to prefetch nothing."),
    (FSDP2Config, "fsdp2_forward_prefetch_depth", True, TypeError, "must be an int; use the number of layers"),
    (FSDP2Config, "pp_schedule", "zbv", ValueError, "is unknown; use '1f1b', 'interleaved_1f1b' or 'gpipe'."),
    (FSDP2Config, "pp_microbatches", 0, ValueError, "must be an int >= 1; use None for the default."),
    (FSDP2Config, "pp_microbatches", 4.0, TypeError, "must be an int or None."),
    (FSDP2Config, "pp_microbatches", True, TypeError, "must be an int or None."),
    (FSDP2Config, "pp_stages_per_rank", 0, ValueError, "must be an int >= 1; use None for the default."),
    (FSDP2Config, "pp_stages_per_rank", "2", TypeError, "must be an int or None."),
    (FSDP2Config, "pp_stages_per_rank", 2, ValueError, "with pp_schedule='1f1b': this schedule has one stage on each"),
    (FSDP2Config, "pp_layers_per_stage", [], ValueError, "must have an int >= 1 for each stage; use None to balance"),
    (FSDP2Config, "pp_layers_per_stage", [4, 0], ValueError, "must have an int >= 1 for each stage"),
    (FSDP2Config, "pp_layers_per_stage", [4, 4.0], TypeError, "must be a list of ints, one for each stage; use None"),
    (FSDP2Config, "pp_layers_per_stage", 4, TypeError, "must be a list of ints, one for each stage"),
    (FSDP2Config, "float8", "rowwise", TypeError, "must be True, a Float8Config or a mapping of its fields; use None"),
    (Float8Config, "recipe", "blockwise", ValueError, "use 'rowwise_with_gw_hp', 'rowwise' or 'tensorwise'."),
    (Float8Config, "skip", "lm_head", TypeError, "must be a list of names of layers; use None for the output head."),
    (Float8Config, "skip", [3], TypeError, "must be a list of names of layers"),
    (Float8Config, "emulate", None, TypeError, "must be a bool; use True or False."),
    (
        DDPConfig,
        "float8",
        True,
        ValueError,
        "is not an option of DDPConfig; use FSDP2Strategy, or leave the option out.",
    ),
    (MegatronFSDPConfig, "float8", False, ValueError, "is not an option of MegatronFSDPConfig; use FSDP2Strategy, or"),
    (FSDP2Config, "use_hf_tp_plan", True, TypeError, 'use tp_plan="hf"'),
    (FSDP2Config, "use_hf_tp_plan", False, TypeError, "tp_plan=None for our plan."),
    (MegatronFSDPConfig, "tp_plan", 3, TypeError, 'must be None, "hf", a dict or an import path.'),
    (
        MegatronFSDPConfig,
        "average_in_collective",
        True,
        ValueError,
        "fails in megatron-fsdp for models without Megatron",
    ),
    (MegatronFSDPConfig, "megatron_fsdp_unit_modules", "a.B", TypeError, "must be a list of import paths; use for"),
    (MegatronFSDPConfig, "zero_dp_strategy", 4, ValueError, "use 0, 1, 2 or 3"),
    (MegatronFSDPConfig, "zero_dp_strategy", -1, ValueError, "use 0, 1, 2 or 3"),
    (MegatronFSDPConfig, "zero_dp_strategy", True, TypeError, "use 0, 1, 2 or 3"),
    (MegatronFSDPConfig, "check_for_nan_in_grad", "yes", TypeError, "must be a bool or None; use True, False or None."),
    (DDPConfig, "bucket_cap_mb", 0, ValueError, "must be greater than 0; use None for torch's default."),
    (DDPConfig, "bucket_cap_mb", float("nan"), ValueError, "must be greater than 0; use None for torch's default."),
    (DDPConfig, "bucket_cap_mb", "25", TypeError, "must be a number of MiB; use None for torch's default."),
    (CheckpointConfig, "format", "dcp", ValueError, "is unknown; use 'sharded' or 'full'."),
    (CheckpointConfig, "async_save", 1, TypeError, "must be a bool; use True or False."),
    (CheckpointConfig, "weights_only", "no", TypeError, "must be a bool or None; use True, False or None."),
]


@pytest.mark.parametrize(("config_class", "option", "value", "error", "message"), ERRORS)
def test_error_names_option_value_rule_and_remedy(config_class, option, value, error, message):
    with pytest.raises(error, match=re.escape(message)) as raised:
        config_class(**{option: value})
    assert raised.type is error
    assert str(raised.value).startswith(f"{option}={value!r} ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mp_policy": {"_target_": "x", "param_dtype": "bf16"}}, "mp_policy has the key '_target_'; leave it out"),
        ({"offload_policy": {"_target_": "x"}}, "offload_policy has the key '_target_'; leave it out"),
        ({"tp_plan": {"q": {"_target_": "x"}}}, "the key '_target_'; use class_path and init_args."),
        ({"mp_policy": {"dtype": "bf16"}}, "mp_policy has an unknown key 'dtype'; did you mean 'param_dtype'?"),
        ({"mp_policy": {"x": "bf16"}}, "mp_policy has an unknown key 'x'; use 'param_dtype', 'reduce_dtype',"),
        (
            {"backend": "nccl", "offload_policy": True},
            "backend='nccl' has no collectives for CPU tensors",
        ),
        ({"offload_policy": {"pin": True}}, "offload_policy has an unknown key 'pin'; use 'pin_memory'."),
        (
            {"pp_schedule": "gpipe", "pp_stages_per_rank": 3},
            "pp_stages_per_rank=3 with pp_schedule='gpipe': this schedule has one stage on each rank; leave"
            " pp_stages_per_rank out, or use pp_schedule='interleaved_1f1b'.",
        ),
        (
            {"pp_schedule": "interleaved_1f1b", "pp_stages_per_rank": 1},
            "pp_stages_per_rank=1 with pp_schedule='interleaved_1f1b': only several stages on each rank can be"
            " interleaved; use an int >= 2, or pp_schedule='1f1b'.",
        ),
    ],
)
def test_errors_of_mappings_and_combinations(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        FSDP2Config(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mp_policy": {"param_dtype": 16}}, "mp_policy.param_dtype=16 must be a floating point dtype"),
        (
            {"context_parallel_inputs": {"x": 1.0}},
            "context_parallel_inputs['x']=1.0 must map an argument's name to the",
        ),
        ({"context_parallel_inputs": {"x": True}}, "context_parallel_inputs['x']=True must map an argument's name"),
        ({"tp_plan": {"q": 3}}, "tp_plan['q']=3 must map a module name to a style's name or a ParallelStyle."),
    ],
)
def test_type_errors_inside_mappings(options, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        FSDP2Config(**options)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "sequence_parallel=True and enable_compile=True"),
        ({"enable_compile": True}, "sequence_parallel=True"),
        ({"sequence_parallel": True}, "enable_compile=True"),
    ],
)
def test_async_tensor_parallel_turns_on_what_it_needs_with_one_warning(given, named):
    with pytest.warns(UserWarning, match=f"needs {named}, which is now turned on; set it") as record:
        config = FSDP2Config(enable_async_tensor_parallel=True, **given)
    assert config.sequence_parallel
    assert config.enable_compile
    assert len(record) == 1
    assert record[0].filename == __file__


def test_check_for_nan_turns_its_successor_on():
    with pytest.warns(UserWarning, match="report_nan_in_param_grad=True, which does the same, is turned on") as record:
        config = MegatronFSDPConfig(check_for_nan_in_grad=True)
    assert config.report_nan_in_param_grad
    assert len(record) == 1


@pytest.mark.parametrize(
    ("config_class", "options"),
    [
        (FSDP2Config, {"enable_async_tensor_parallel": True, "sequence_parallel": True, "enable_compile": True}),
        (MegatronFSDPConfig, {"check_for_nan_in_grad": True, "report_nan_in_param_grad": True}),
        (MegatronFSDPConfig, {"check_for_nan_in_grad": False}),
    ],
)
def test_explicit_options_do_not_warn(config_class, options, recwarn):
    config_class(**options)
    assert not recwarn


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ({}, 1),
        ({"pp_schedule": "gpipe"}, 1),
        ({"pp_schedule": "interleaved_1f1b"}, 2),
        ({"pp_schedule": "interleaved_1f1b", "pp_stages_per_rank": 3}, 3),
    ],
)
def test_the_schedule_chooses_the_number_of_stages(options, stages):
    config = FSDP2Config(**options)
    assert config.stages_per_rank == stages
    assert spell_alike(config) == spell_alike(FSDP2Config(**{**options, "pp_stages_per_rank": stages}))
    assert spell_alike(config).pp_stages_per_rank == stages


def test_only_the_schedule_and_the_micro_batches_may_change_between_runs():
    flags = {name for name in DEFAULTS[FSDP2Config] if name.startswith("pp_")}
    assert flags & {*FLAGS_OF_A_RUN} == {"pp_schedule", "pp_microbatches"}


@pytest.mark.parametrize("config_class", DEFAULTS)
def test_each_field_has_a_help_text(config_class):
    docstring_parser = pytest.importorskip("docstring_parser")
    documented = {
        parameter.arg_name
        for parameter in docstring_parser.parse_from_object(config_class).params
        if parameter.description
    }
    assert documented >= set(DEFAULTS[config_class])
