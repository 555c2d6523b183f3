"""Export of LoRA: what peft itself would have written, and what its ``merge_and_unload`` gives."""

import itertools
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.cover import Matrix
from helpers.lora import (
    FAMILIES,
    LORA,
    assert_equal_tensors,
    fit,
    get_logits,
    make_module,
    make_plain,
    save_base,
)
from helpers.mesh_runs import whole_of_stages
from helpers.models import LLAMA, make_causal_lm
from helpers.ranks import run_ranks
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightning_fsdp2 import CheckpointConfig, FSDP2Config, FSDP2Strategy, export_hf, save_checkpoint
from lightning_fsdp2.callbacks import HuggingFaceExport
from lightning_fsdp2.cli.commands import export

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "kept-head": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "biases": ("gpt2", {"target_modules": ["c_attn"], "bias": "all", "fan_in_fan_out": True}),
    "patterns": (
        "llama",
        {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 3}},
    ),
    "some-layers": ("llama", {"target_modules": ["v_proj"], "layers_to_transform": [1]}),
    "experts-beside": ("mixtral", {"target_modules": ["q_proj", "o_proj"]}),
}
CASES = {name: (name, fields) for name, fields in FAMILIES.items()} | OTHERS


MESHES: dict[str, dict[str, Any]] = {
    "tp2+sp": {"tp_size": 2, "config": FSDP2Config(sequence_parallel=True)},
    "pp2": {"pp_size": 2},
}

CELLS = {
    f"{case}-{whole}-{mesh}": (case, whole, mesh)
    for case, whole, mesh in itertools.product(CASES, ("whole", "adapters"), MESHES)
}
MATRIX = Matrix(
    "exported adapters",
    {name: {"case": case, "checkpoint": whole, "mesh": mesh} for name, (case, whole, mesh) in CELLS.items()},
)


@pytest.mark.guarantees("lora-gradients-and-exports")
@pytest.mark.parametrize(("case", "saved", "mesh"), MATRIX.list_parameters(CELLS))
def test_round_trip_with_peft_live_and_from_a_checkpoint(case: str, saved: str, mesh: str, tmp_path: Path) -> None:
    family, fields = CASES[case]
    base = save_base(tmp_path / "base", family)

    def run() -> dict[str, torch.Tensor]:
        module = make_module(base, family, lora={**LORA, **fields})
        checkpoint = CheckpointConfig(frozen_parameters=saved == "whole")
        callback = HuggingFaceExport(dirpath=tmp_path / "callback")
        trainer = fit(module, FSDP2Strategy(checkpoint=checkpoint, **MESHES[mesh]), callbacks=[callback], steps=1)
        trainer.save_checkpoint(tmp_path / "run.ckpt")
        export_hf(module, tmp_path / "live")
        export_hf(module, tmp_path / "live-merged", merge=True, max_shard_size="20KB")
        return whole_of_stages(module.model.state_dict(), trainer)

    weights = run_ranks(run, 2)[0]

    def read_again() -> None:
        export_hf(tmp_path / "run.ckpt", tmp_path / "offline")
        export_hf(tmp_path / "run.ckpt", tmp_path / "offline-merged", merge=True, max_shard_size="20KB")
        exported = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("callback", "live")]
        assert_equal_tensors(*exported)
        for name in ("live", "offline"):
            adapted: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / name)
            assert_equal_tensors(adapted.state_dict(), weights)
            assert json.loads((tmp_path / name / "adapter_config.json").read_text())["base_model_name_or_path"] == base
            logits = get_logits(adapted)
            merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-merged")
            torch.testing.assert_close(get_logits(merged), logits, rtol=1e-4, atol=1e-5)
            # to the bit: it is peft's arithmetic
            assert_equal_tensors(merged.state_dict(), adapted.merge_and_unload().state_dict())

    run_ranks(read_again, 1, group=False)


def test_the_files_are_those_of_save_pretrained(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen3")
    model = make_plain(base, "qwen3")
    model.save_pretrained(tmp_path / "peft")
    export_hf(model, tmp_path / "ours")
    tensors = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "peft")]
    assert_equal_tensors(*tensors)
    ours, theirs = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "peft"))
    for config in (ours, theirs):
        config["target_modules"] = sorted(config["target_modules"])
    assert ours == theirs


@pytest.mark.slow
def test_the_command_and_a_dtype(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    model = make_plain(base)
    save_checkpoint(tmp_path / "run.ckpt", model)
    export(str(tmp_path / "run.ckpt"), str(tmp_path / "adapter"), dtype="bfloat16")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    export(str(tmp_path / "run.ckpt"), str(tmp_path / "merged"), dtype="bfloat16", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.bfloat16
    expected: Any = model.merge_and_unload()  # added up in float32, then rounded
    assert_equal_tensors(merged.state_dict(), expected.bfloat16().state_dict())


@pytest.mark.slow
def test_the_callback_merges(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")

    def run() -> None:
        callback = HuggingFaceExport(dirpath=tmp_path / "out", merge=True)
        fit(make_module(base), FSDP2Strategy(), callbacks=[callback])

    run_ranks(run, 2)
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert (tmp_path / "out" / "config.json").exists()


def test_a_merged_export_leaves_the_weights_of_the_model_alone(tmp_path: Path) -> None:
    model = make_plain(save_base(tmp_path / "base"))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export_hf(model, tmp_path / "merged", merge=True)
    assert_equal_tensors(model.state_dict(), weights)


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"merge=True\): the LlamaForCausalLM has no adapter; leave merge out"):
        export_hf(make_causal_lm(LLAMA), tmp_path / "out", merge=True)
    tied: Any = make_causal_lm({**LLAMA, "tie_word_embeddings": True})
    model = get_peft_model(tied, LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match=r"changes lm_head\.weight or model\.embed_tokens\.weight, which are tied"):
        export_hf(model, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()
    callback = HuggingFaceExport(dirpath=tmp_path / "out", merge=True)
    with pytest.raises(ValueError, match=r"has no adapter"):
        callback.on_fit_start(pl.Trainer(logger=False), make_causal_lm(LLAMA))  # type: ignore[arg-type]
