"""Checkpoints that leave frozen weights to the pretrained model: small, and loaded wherever that model is."""

import json
import math
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.cuda_on_cpu import cuda_on_cpu
from helpers.lora import assert_equal_tensors, fit, get_weights, make_module, save_base
from helpers.mesh_runs import whole_of_stages
from helpers.models import LLAMA
from helpers.ranks import run_ranks
from peft import PeftModel
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from lightning_fsdp2 import (
    CausalLM,
    CheckpointConfig,
    DDPStrategy,
    FSDP2Config,
    FSDP2Strategy,
    MegatronFSDPStrategy,
    consolidate_checkpoint,
    export_hf,
    load_checkpoint,
    load_from_checkpoint,
    verify_checkpoint,
)
from lightning_fsdp2.models import from_pretrained
from lightning_fsdp2.models.lora import add_lora
from lightning_fsdp2.weights import pretrained
from lightning_fsdp2.weights.pretrained import get_folder_fingerprint

SMALL = CheckpointConfig(frozen_parameters=False)
STEPS = 4


def make_strategy(name: str, **options: Any) -> Any:
    checkpoint = CheckpointConfig(frozen_parameters=False, **options)
    if name == "dp":
        return FSDP2Strategy(checkpoint=checkpoint)
    if name == "tp-sp":
        return FSDP2Strategy(tp_size=2, config=FSDP2Config(sequence_parallel=True), checkpoint=checkpoint)
    if name == "pp":
        return FSDP2Strategy(pp_size=2, checkpoint=checkpoint)
    kinds = {"ddp": DDPStrategy, "megatron": MegatronFSDPStrategy}
    return kinds[name](checkpoint=checkpoint)


def train(name: str, base: str, path: Path, *, steps: int, ckpt_path: Path | None = None, **options: Any) -> Any:
    """Train on, save to ``path``, and return the weights; every data parallel rank has the same batches."""

    def run() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module = make_module(base)
        trainer = fit(module, make_strategy(name, **options), steps=steps, alike=True, ckpt_path=ckpt_path)
        trainer.save_checkpoint(path)
        return whole_of_stages(module.model.state_dict(), trainer)

    def run_on_shim() -> dict[str, torch.Tensor]:
        with cuda_on_cpu():
            return run()

    return run_ranks(run_on_shim if name == "megatron" else run, 2)[0]


def list_keys(path: Path) -> set[str]:
    return set(FileSystemReader(path).read_metadata().state_dict_metadata)


def get_size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.distcp"))


Saved = Callable[[str], tuple[Path, dict[str, torch.Tensor], str]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Train on a mesh and save, only once each; return the folder, the weights and the base."""

    @cache
    def save(mesh: str) -> tuple[Path, dict[str, torch.Tensor], str]:
        folder = tmp_path_factory.mktemp(mesh)
        base = save_base(folder / "base")
        return folder, train(mesh, base, folder / "small.ckpt", steps=2), base

    return save


each_mesh = pytest.mark.parametrize("mesh", ["tp-sp", pytest.param("pp", marks=pytest.mark.slow)])


@pytest.mark.guarantees("lora-gradients-and-exports")
@each_mesh
def test_it_holds_adapters_alone(mesh: str, saved: Saved) -> None:
    folder, weights, _ = saved(mesh)
    trained = {name: tensor for name, tensor in weights.items() if "lora_" in name}
    keys = list_keys(folder / "small.ckpt")
    kept = {key.removeprefix("state_dict.model.") for key in keys if key.startswith("state_dict.")}
    assert kept == trained.keys()
    states = {key for key in keys if key.endswith(".exp_avg")}
    assert len(states) == len(trained)
    # weights and two moments, and what the format adds for each tensor
    bytes_of_trained = 3 * 4 * sum(math.prod(tensor.shape) for tensor in trained.values())
    assert bytes_of_trained < get_size(folder / "small.ckpt") < bytes_of_trained + 5000 * len(keys)
    summary = json.loads((folder / "small.ckpt" / "meta.json").read_text())
    assert summary["hf_models"][0]["adapters"]["default"]["r"] == 4
    assert len(verify_checkpoint(folder / "small.ckpt")) > 2


@pytest.mark.guarantees("lora-gradients-and-exports")
@each_mesh
def test_a_module_an_export_and_a_plain_loop_read_the_rest_from_the_pretrained_model(
    mesh: str, saved: Saved, tmp_path: Path
) -> None:
    folder, weights, base = saved(mesh)

    def read() -> None:
        small, single = folder / "small.ckpt", tmp_path / "single.ckpt"
        consolidate_checkpoint(small, single)
        for path in (small, single):
            module = load_from_checkpoint(CausalLM, path)
            assert_equal_tensors(module.model.state_dict(), weights)
            export_hf(path, tmp_path / f"{path.stem}-merged", merge=True)
            merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"{path.stem}-merged")
            expected: Any = module.model.merge_and_unload()
            assert_equal_tensors(merged.state_dict(), expected.state_dict())
        plain = add_lora(from_pretrained(base, on_meta=False), module.lora_config, base=base)
        load_checkpoint(small, torch.nn.ModuleDict({"model": plain}), weights_only=False)
        assert_equal_tensors(plain.state_dict(), weights)

    run_ranks(read, 1, group=False)


RESUMES = [
    ("tp-sp", "dp", {}),
    ("dp", "tp-sp", {"async_save": True}),
    ("dp", "ddp", {"format": "full"}),
    ("ddp", "megatron", {}),
    ("megatron", "dp", {}),
    ("pp", "tp-sp", {"format": "full"}),
    ("dp", "pp", {"format": "full"}),
    ("pp", "pp", {"async_save": True}),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, torch.Tensor]]:
    """A base, and the weights that a run without a pause makes of it."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    base = save_base(folder / "base")
    return base, train("dp", base, folder / "whole.ckpt", steps=STEPS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The checkpoint holds the random states")  # of another mesh
@pytest.mark.parametrize(
    ("first", "second", "options"),
    RESUMES,
    ids=[f"{first}-then-{second}" for first, second, _ in RESUMES],
)
def test_a_run_goes_on_on_another_mesh(
    first: str, second: str, options: dict[str, Any], uninterrupted: tuple[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    base, expected = uninterrupted
    train(first, base, tmp_path / "half.ckpt", steps=STEPS // 2, **options)
    actual = train(second, base, tmp_path / "end.ckpt", steps=STEPS, ckpt_path=tmp_path / "half.ckpt")
    assert_equal_tensors(actual, expected, atol=5e-5)


@pytest.mark.slow
def test_what_is_frozen_by_hand_is_left_out_too(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")

    class Frozen(CausalLM):
        def configure_model(self) -> None:
            super().configure_model()
            self.model.model.embed_tokens.requires_grad_(False)

    def run() -> None:
        module = Frozen(pretrained=base)
        fit(module, FSDP2Strategy(checkpoint=SMALL)).save_checkpoint(tmp_path / "small.ckpt")
        export_hf(module, tmp_path / "live")

    run_ranks(run, 2)
    names = {key for key in list_keys(tmp_path / "small.ckpt") if key.startswith("state_dict.")}
    assert "state_dict.model.lm_head.weight" in names
    assert not [name for name in names if "embed_tokens" in name]

    def export() -> None:
        export_hf(tmp_path / "small.ckpt", tmp_path / "offline")
        live, offline = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("live", "offline"))
        assert_equal_tensors(offline.state_dict(), live.state_dict())

    run_ranks(export, 1, group=False)


@pytest.mark.slow
def test_weights_that_are_in_no_file_are_kept(tmp_path: Path) -> None:
    def run() -> None:
        module = CausalLM(config=LLAMA, lora={"r": 2})
        fit(module, FSDP2Strategy(checkpoint=SMALL)).save_checkpoint(tmp_path / "run.ckpt")

    run_ranks(run, 2)
    assert "state_dict.model.base_model.model.lm_head.weight" in list_keys(tmp_path / "run.ckpt")


@pytest.mark.guarantees("another-base")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The checkpoint holds the random states")  # of another number of ranks
def test_another_base_and_one_that_has_moved_or_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, other = save_base(tmp_path / "base"), save_base(tmp_path / "other", seed=1)
    small = tmp_path / "small.ckpt"
    weights = run_ranks(lambda: check_files_are_read_again(tmp_path, base, other, monkeypatch), 2)[0]
    shutil.move(base, tmp_path / "moved")
    shutil.rmtree(tmp_path / "base", ignore_errors=True)

    def read_again() -> None:
        with pytest.raises(
            FileNotFoundError, match=r"the model's directory '\S*base' does not exist; give .*export_hf\(pretrained="
        ):
            export_hf(small, tmp_path / "out", merge=True)
        with pytest.raises(ValueError, match=r"but '\S+other' holds different tensors; give the directory"):
            export_hf(small, tmp_path / "out", merge=True, pretrained=other)
        export_hf(small, tmp_path / "adapter")  # which needs no base
        export_hf(small, tmp_path / "out", merge=True, pretrained=tmp_path / "moved")
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "moved")
        adapted: Any = PeftModel.from_pretrained(plain, tmp_path / "adapter")
        assert_equal_tensors(adapted.state_dict(), weights)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert_equal_tensors(merged.state_dict(), adapted.merge_and_unload().state_dict())
        with pytest.raises(FileNotFoundError, match=r"base' does not exist"):
            load_from_checkpoint(CausalLM, small)
        assert_equal_tensors(
            load_from_checkpoint(CausalLM, small, pretrained=str(tmp_path / "moved")).model.state_dict(), weights
        )

    run_ranks(read_again, 1, group=False)


def check_files_are_read_again(
    folder: Path, base: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> dict[str, torch.Tensor]:
    """Only where it is needed; an error there, and of another base, is one on every rank."""
    small = folder / "small.ckpt"
    readers: list[int] = []
    broken_rank: int | None = None

    def read(path: Any) -> str:
        readers.append(dist.get_rank())
        if dist.get_rank() == broken_rank:
            raise OSError("the disk is gone")
        return get_folder_fingerprint(path)

    def train_on(module: CausalLM, steps: int = 3, **options: Any) -> Any:
        torch.manual_seed(0)
        return fit(module, FSDP2Strategy(**options), steps=steps, alike=True, ckpt_path=small if steps == 3 else None)

    monkeypatch.setattr(pretrained, "get_folder_fingerprint", read)
    train_on(make_module(base), steps=1).save_checkpoint(folder / "whole.ckpt")
    assert not readers
    module = make_module(base)
    trainer = train_on(module, steps=2, checkpoint=SMALL)
    weights = get_weights(module)
    broken_rank = 0
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.save_checkpoint(small)
    broken_rank = 1
    trainer.save_checkpoint(small)
    assert readers == [0, 0] if dist.get_rank() == 0 else not readers
    with pytest.raises(OSError, match="the disk is gone"):
        train_on(make_module(base))
    broken_rank = None
    train_on(make_module(base))
    with pytest.raises(
        ValueError, match=r"not hold \d+ frozen weights of .*base', but this run has read a different model, '.*other'"
    ):
        train_on(make_module(other))
    with pytest.raises(
        ValueError,
        match=r"not hold \d+ frozen weights of .*and this run cannot supply these weights, because it trains them or",
    ):
        train_on(CausalLM(config=LLAMA, lora={"r": 4}))
    return weights
