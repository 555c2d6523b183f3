"""Hugging Face models out of shards and out of checkpoints: what vanilla transformers writes, and reads again."""

import json
import math
import multiprocessing
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.cover import Matrix
from helpers.families import get_families, keep_known, make_family_config, make_family_model
from helpers.models import LLAMA, PlainTransformer, add_adapters, make_causal_lm
from helpers.oracle import whole
from helpers.pretrained_kinds import get_conversions
from helpers.ranks import run_ranks
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM, dynamic_module_utils

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh, export_hf, save_checkpoint
from lightning_fsdp2.compat.torch import set_group_timeout
from lightning_fsdp2.data.byte_tokenizer import build_byte_tokenizer
from lightning_fsdp2.export import hugging_face, sources
from lightning_fsdp2.models import from_pretrained

FILE_SIZE = "60KB"
"""Makes several files of the tiny models."""

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tp_size": 2}),
    "dp2xtp2": (4, {"tp_size": 2}),
    "pp2": (2, {"pp_size": 2}),
    "pp2xtp2": (4, {"pp_size": 2, "tp_size": 2}),
    "ep2": (2, {"ep_size": 2}),
    "ep2xefsdp2": (4, {"ep_size": 2}),
    "dp2xtp2-ep4": (4, {"tp_size": 2, "ep_size": 4}),
    "pp2xep2": (4, {"pp_size": 2, "ep_size": 2}),
}
"""Ranks, and sizes."""

ROUND_TRIPS = ("llama", "gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3")
DENSE = ("llama", "gemma3_text")
CELLS = {
    f"{family}-{mesh}": (family, mesh)
    for family in ROUND_TRIPS
    for mesh, (_, sizes) in MESHES.items()
    if not (family in DENSE and "ep_size" in sizes)
}


def describe(family: str, mesh: str) -> dict[str, Any]:
    """Return the features of a cell."""
    ranks, sizes = MESHES[mesh]
    is_sharded = ranks > math.prod(sizes.values())
    return {"family": family, **sizes, "fully_shard": is_sharded}


MATRIX = Matrix(
    "round trips of Hugging Face models",
    {name: describe(*cell) for name, cell in CELLS.items()},
    fast=("qwen3_moe-tp2", "gemma3_text-pp2"),
    costs={name: MESHES[mesh][0] for name, (_, mesh) in CELLS.items()},
)

TOKENS = torch.arange(3, 19)[None]


def read_weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def read_json(folder: Path) -> dict[str, Any]:
    return {file.name: json.loads(file.read_text()) for file in folder.glob("*.json")}


def compute_logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS, use_cache=False).logits


def shard(model: nn.Module, **sizes: int) -> nn.Module:
    mesh = create_device_mesh(device_type="cpu", **sizes)
    return FSDP2Manager(FSDP2Config(mp_policy=MixedPrecisionPolicy()), mesh).parallelize(model)


def assert_same_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.dtype == expected[name].dtype, name
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)


# ---------------------------------------------------------------------- round trips


@pytest.mark.guarantees("checkpoints-of-stages", "same-logits")
@pytest.mark.parametrize(("family", "mesh"), MATRIX.list_parameters(CELLS))
def test_round_trip_through_shards_and_through_a_checkpoint(family: str, mesh: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = make_family_model(family)
    assert bool(source.config.tie_word_embeddings) == (family == "gemma3_text")
    source.save_pretrained(tmp_path / "vanilla", max_shard_size=FILE_SIZE)
    ranks, sizes = MESHES[mesh]

    def run() -> None:
        model = shard(from_pretrained(tmp_path / "vanilla"), **sizes)
        for name, tensor in whole(model.state_dict()).items():
            torch.testing.assert_close(tensor, source.state_dict()[name], rtol=0, atol=0, msg=name)
        torch.testing.assert_close(compute_logits(model), compute_logits(source), rtol=1e-4, atol=1e-5)
        save_checkpoint(tmp_path / "run.ckpt", model)
        export_hf(model, tmp_path / "live", max_shard_size=FILE_SIZE)
        export_hf(tmp_path / "run.ckpt", tmp_path / "offline-together", max_shard_size=FILE_SIZE)

    def read_again() -> None:
        export_hf(tmp_path / "run.ckpt", tmp_path / "offline", max_shard_size=FILE_SIZE)
        expected = read_weights(tmp_path / "vanilla")
        for folder in (tmp_path / name for name in ("live", "offline", "offline-together")):
            assert len(list(folder.glob("*.safetensors"))) > 1
            assert_same_tensors(read_weights(folder), expected)
            # the weights are equal to the bit; products may round otherwise where these lie otherwise in memory
            logits = compute_logits(AutoModelForCausalLM.from_pretrained(folder))
            torch.testing.assert_close(logits, compute_logits(source), rtol=1e-5, atol=1e-6)

    run_ranks(run, ranks)
    run_ranks(read_again, 1, group=False)


def assert_same_folders(actual: Path, expected: Path) -> None:
    """The same tensors in the same files, and the same configs."""
    assert sorted(file.name for file in actual.iterdir()) == sorted(file.name for file in expected.iterdir())
    assert_same_tensors(read_weights(actual), read_weights(expected))
    assert read_json(actual) == read_json(expected)


def describe_family(family: str) -> dict[str, Any]:
    """Return what decides how a family's files are written."""
    config = make_family_config(family)
    return {
        "tied": bool(getattr(config, "tie_word_embeddings", False)),
        "parts": bool(config.sub_configs),
        **dict.fromkeys(get_conversions(family), True),
    }


FAMILIES = Matrix(
    "exported families",
    {family: describe_family(family) for family in get_families()},
    fast=("mixtral",),
    always=keep_known("llama", "gpt_oss", "longcat_flash", "moss_transcribe_diarize", "nemotron_h", "phi4_multimodal"),
)


@pytest.mark.guarantees("checkpoints-of-experts", "files-of-save-pretrained")
@pytest.mark.parametrize("family", FAMILIES.list_parameters({family: (family,) for family in FAMILIES.cells}))
def test_every_file_is_that_of_save_pretrained(family: str, tmp_path: Path) -> None:
    """For a new model, and for one that was read: what was converted on the way in is converted back."""

    def run() -> None:
        model = make_family_model(family)
        for _ in range(2):
            save_checkpoint(tmp_path / "run.ckpt", model)
            export_hf(model, tmp_path / "live", max_shard_size=FILE_SIZE)
            export_hf(tmp_path / "run.ckpt", tmp_path / "offline", max_shard_size=FILE_SIZE)
            model.save_pretrained(tmp_path / "vanilla", max_shard_size=FILE_SIZE)
            assert_same_folders(tmp_path / "live", tmp_path / "vanilla")
            assert_same_folders(tmp_path / "offline", tmp_path / "vanilla")
            # the class alone would read EXAONE as the Llama that it is built of, and keep the names of EXAONE
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "vanilla")
            for name in ("live", "offline", "vanilla"):
                shutil.rmtree(tmp_path / name)

    run_ranks(run, 1, group=False)


# ---------------------------------------------------------------------- options


def make_llama() -> Any:
    torch.manual_seed(0)
    return make_causal_lm(LLAMA)


def test_weights_of_another_dtype_but_for_what_must_stay_in_float32(tmp_path: Path) -> None:
    model = make_family_model("deepseek_v3")
    export_hf(model, tmp_path / "bf16", dtype="bfloat16")
    weights, expected = read_weights(tmp_path / "bf16"), model.state_dict()
    model.save_pretrained(tmp_path / "whole")
    # transformers 5.24 keeps the weights of the routers too
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16)
    kept = {name for name, tensor in loaded.state_dict().items() if tensor.dtype is torch.float32}
    assert kept >= {name for name in expected if name.endswith("e_score_correction_bias")} != set()
    assert {name for name, tensor in weights.items() if tensor.dtype is torch.float32} == kept
    assert {tensor.dtype for name, tensor in weights.items() if name not in kept} == {torch.bfloat16}
    assert torch.equal(weights["lm_head.weight"], expected["lm_head.weight"].bfloat16())
    assert read_json(tmp_path / "bf16")["config.json"]["dtype"] == "bfloat16"
    with pytest.raises(ValueError, match=r"dtype='bf16'\) is unknown; use 'float32', 'bfloat16', 'float16' or None"):
        export_hf(model, tmp_path / "other", dtype="bf16")  # type: ignore[arg-type]


def test_the_generation_config_and_the_tokenizer_come_along(tmp_path: Path) -> None:
    model = make_llama()
    model.generation_config.temperature, model.generation_config.do_sample = 0.25, True
    model.save_pretrained(tmp_path / "with")
    build_byte_tokenizer().save_pretrained(tmp_path / "with")

    def run() -> None:
        again = from_pretrained(tmp_path / "with", on_meta=False)
        assert again.generation_config.temperature == 0.25
        save_checkpoint(tmp_path / "run.ckpt", again)
        export_hf(again, tmp_path / "live")
        export_hf(tmp_path / "run.ckpt", tmp_path / "offline")
        export_hf(make_llama(), tmp_path / "without")
        export_hf(make_llama(), tmp_path / "given", tokenizer=tmp_path / "with")
        with pytest.raises(ValueError, match=r"without'\): the directory has no tokenizer files"):
            export_hf(make_llama(), tmp_path / "other", tokenizer=tmp_path / "without")

    run_ranks(run, 1, group=False)
    for name in ("live", "offline"):
        assert read_json(tmp_path / name)["generation_config.json"]["temperature"] == 0.25
    for name in ("live", "offline", "given"):
        assert AutoTokenizer.from_pretrained(tmp_path / name)("a")["input_ids"] == [97]
    assert not list((tmp_path / "without").glob("tokenizer*"))


@pytest.mark.parametrize(
    ("ends", "expected"), [(5, [5, 256]), ([5, 7], [5, 7, 256]), (256, 256), ([5, 256], [5, 256]), (None, 256)]
)
def test_generation_ends_at_the_end_token_of_the_tokenizer_too(ends: Any, expected: Any, tmp_path: Path) -> None:
    """A base fine-tuned on chats answers up to their end token, which its own generation config does not know."""

    def run() -> None:
        model = make_llama()
        model.generation_config.eos_token_id = ends
        save_checkpoint(tmp_path / "run.ckpt", model)
        for source, out in ((model, "live"), (tmp_path / "run.ckpt", "offline")):
            export_hf(source, tmp_path / out, tokenizer=build_byte_tokenizer())
        assert model.generation_config.eos_token_id == ends  # the model that is trained on is left alone

    run_ranks(run, 1, group=False)
    for name in ("live", "offline"):
        assert GenerationConfig.from_pretrained(tmp_path / name).eos_token_id == expected


def test_a_published_generation_config_is_written_back_though_it_is_invalid(tmp_path: Path) -> None:
    """A temperature without sampling, as on the hub; later versions of transformers write it back too."""
    make_llama().save_pretrained(tmp_path / "published")
    (tmp_path / "published" / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')

    def run() -> None:
        model = from_pretrained(tmp_path / "published", on_meta=False)
        save_checkpoint(tmp_path / "run.ckpt", model)
        export_hf(model, tmp_path / "live")
        export_hf(tmp_path / "run.ckpt", tmp_path / "offline")

    def read(name: str) -> dict[str, Any]:
        return {**GenerationConfig.from_pretrained(tmp_path / name).to_dict(), "transformers_version": None}

    run_ranks(run, 1, group=False)
    assert read("live") == read("offline") == read("published")


def test_a_wrong_tokenizer_is_found_before_weights_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise AssertionError("written")

    monkeypatch.setattr(hugging_face, "_write_file", fail)
    with pytest.raises(ValueError, match="has no tokenizer files"):
        export_hf(make_llama(), tmp_path / "out", tokenizer=tmp_path)
    with pytest.raises(TypeError, match=r"tokenizer=<object>\) is not a transformers tokenizer"):
        export_hf(make_llama(), tmp_path / "out", tokenizer=object())
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_with_several_chat_templates(tmp_path: Path) -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    export_hf(make_llama(), tmp_path / "out", tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template


def test_the_code_of_a_model_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    make_llama().save_pretrained(source)
    fields = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"},
    }
    (source / "config.json").write_text(json.dumps({**read_json(source)["config.json"], **fields}))
    (source / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    (source / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_own import OwnConfig\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))

    def run() -> None:
        model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
        model.save_pretrained(tmp_path / "vanilla")
        export_hf(shard(model), tmp_path / "live")
        assert_same_folders(tmp_path / "live", tmp_path / "vanilla")
        assert (tmp_path / "live" / "modeling_own.py").exists()
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "live", trust_remote_code=True)
        assert type(again).__name__ == "OwnModel"

    run_ranks(run, 1)


@pytest.mark.parametrize("is_told", [True, False], ids=["config-told", "config-not-told"])
def test_a_head_that_was_untied_is_written_too(is_told: bool, tmp_path: Path) -> None:
    def run() -> None:
        torch.manual_seed(0)
        model: Any = make_causal_lm({**LLAMA, "tie_word_embeddings": True})
        model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
        model.config.tie_word_embeddings = not is_told
        expected = compute_logits(model)
        model.save_pretrained(tmp_path / "vanilla")
        model = shard(model)
        save_checkpoint(tmp_path / "run.ckpt", model)
        export_hf(model, tmp_path / "live")
        export_hf(tmp_path / "run.ckpt", tmp_path / "offline")
        for name in ("live", "offline"):
            assert_same_folders(tmp_path / name, tmp_path / "vanilla")
            torch.testing.assert_close(compute_logits(AutoModelForCausalLM.from_pretrained(tmp_path / name)), expected)

    run_ranks(run, 1)


class Distillation(nn.Module):
    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher = teacher
        self.student = student


def test_one_of_several_models_is_named(tmp_path: Path) -> None:
    module = Distillation(make_causal_lm({**LLAMA, "num_hidden_layers": 1}), make_llama())
    save_checkpoint(tmp_path / "run.ckpt", module)
    for source, name in ((module, "live"), (tmp_path / "run.ckpt", "offline")):
        export_hf(source, tmp_path / name, model="student")
        assert_same_tensors(read_weights(tmp_path / name), module.student.state_dict())
        for wrong in (None, "pupil"):
            with pytest.raises(ValueError, match=r"has the model\(s\) 'teacher', 'student'; set model to one of them"):
                export_hf(source, tmp_path / "other", model=wrong)


def test_a_single_file_of_lightnings_or_a_users_own(tmp_path: Path) -> None:
    model = make_llama()
    descriptions = sources.describe_hf_models(nn.ModuleDict({"model": model}))
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": state, "hf_models": descriptions, "epoch": 3}, tmp_path / "run.ckpt")
    export_hf(tmp_path / "run.ckpt", tmp_path / "out")
    assert_same_tensors(read_weights(tmp_path / "out"), model.state_dict())


# ---------------------------------------------------------------------- what stands at `out`


def test_what_stands_there_is_replaced_only_if_that_is_wanted_and_only_by_a_complete_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export_hf(make_llama(), out)
    (out / "notes.txt").write_text("mine")
    (tmp_path / "file").touch()
    write = hugging_face._write_file

    def fail_on_rank_1(path: Path, tensors: dict[str, Tensor]) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError(f"{path} could not be written: no space")
        write(path, tensors)

    def run() -> None:
        model = shard(make_llama())
        with pytest.raises(FileExistsError, match=r"out' is not empty; .* overwrite=True"):
            export_hf(model, out)
        with pytest.raises(FileExistsError, match=r"file' is a file"):
            export_hf(model, tmp_path / "file", overwrite=True)
        with monkeypatch.context() as patch:
            patch.setattr(hugging_face, "_write_file", fail_on_rank_1)
            with pytest.raises(RuntimeError, match=r"model-00002-of-00003\.safetensors could not be written: no space"):
                export_hf(model, out, max_shard_size=FILE_SIZE, overwrite=True)
        dist.barrier()
        assert {path.name for path in tmp_path.iterdir()} == {"out", "file"}
        assert (out / "notes.txt").read_text() == "mine"
        dist.barrier()
        export_hf(model, out, max_shard_size=FILE_SIZE, overwrite=True)

    run_ranks(run, 2)
    assert not (out / "notes.txt").exists()
    assert len(list(out.glob("*.safetensors"))) == 3
    assert_same_tensors(read_weights(out), make_llama().state_dict())


@pytest.mark.guarantees("new-errors")
def test_a_place_that_cannot_be_written_or_must_not_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "here").mkdir()
    save_checkpoint(tmp_path / "runs" / "last.ckpt", make_llama())
    monkeypatch.chdir(tmp_path / "here")
    for out in (".", "..", tmp_path / "here"):
        with pytest.raises(ValueError, match=r"would replace the working directory .*; choose a different directory"):
            export_hf(make_llama(), out, overwrite=True)
    for out in (tmp_path / "runs", tmp_path / "runs" / "last.ckpt"):
        with pytest.raises(ValueError, match=r"would replace the checkpoint '.*last\.ckpt'"):
            export_hf(tmp_path / "runs" / "last.ckpt", out, overwrite=True)
    with pytest.raises(OSError, match=r"file/out' cannot be created \(File exists\); choose a different"):
        export_hf(make_llama(), tmp_path / "file" / "out")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match=r"0\.1 MB"):
        export_hf(make_llama(), tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "here", "runs"}


def test_a_rank_without_host_memory_is_an_error_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = sources._copy_to_host

    def fail_on_rank_0(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if dist.get_rank() == 0:
            raise RuntimeError("can't allocate memory")
        return copy(tensor, dtype)

    def run() -> None:
        model = shard(make_llama())
        with monkeypatch.context() as patch:
            patch.setattr(sources, "_copy_to_host", fail_on_rank_0)
            with pytest.raises(RuntimeError, match="can't allocate memory"):
                export_hf(model, tmp_path / "out", max_shard_size=FILE_SIZE)
        export_hf(model, tmp_path / "out", max_shard_size=FILE_SIZE)

    run_ranks(run, 2)
    assert_same_tensors(read_weights(tmp_path / "out"), make_llama().state_dict())


@pytest.mark.parametrize("offline", [False, True], ids=["live", "offline"])
def test_a_call_on_one_rank_is_explained(offline: bool, tmp_path: Path) -> None:
    """Before the other ranks' collectives give up, and whether the ranks have come together before or not."""
    save_checkpoint(tmp_path / "run.ckpt", make_llama())
    explained = multiprocessing.get_context("fork").Event()

    def run() -> None:
        source = tmp_path / "run.ckpt" if offline else shard(make_llama())
        if offline:
            export_hf(source, tmp_path / "out")
        set_group_timeout(dist.group.WORLD, timedelta(seconds=2))
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=r"Rank 0 wants to export a model, .* not under `if rank == 0`"):
                export_hf(source, tmp_path / "out", overwrite=True)
            explained.set()
        else:
            explained.wait(30)  # a rank that ends would be an error of another kind

    run_ranks(run, 2)


# ---------------------------------------------------------------------- what cannot be exported


def change_head(model: Any) -> nn.Module:
    model.lm_head = nn.Linear(32, 7)
    return model


def add_prompt(model: Any) -> nn.Module:
    return get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


def add_two(model: Any) -> nn.Module:
    adapted: Any = add_adapters(model, target_modules=["q_proj"])
    adapted.add_adapter("second", LoraConfig(target_modules=["q_proj"]))
    return adapted


def test_a_model_whose_adapters_were_merged_is_exported(tmp_path: Path) -> None:
    export_hf(add_adapters(make_llama()).merge_and_unload(), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PlainTransformer(), TypeError, "no transformers model in PlainTransformer"),
        (
            lambda: add_two(make_llama()),
            ValueError,
            "LlamaForCausalLM has peft adapters that cannot be exported: only a single LoRA",
        ),
        (lambda: add_prompt(make_llama()), ValueError, "LlamaForCausalLM has peft adapters.*save_pretrained"),
        (
            lambda: change_head(make_llama()),
            ValueError,
            r"do not match a LlamaForCausalLM with its config.*unexpected: lm_head\.bias; of a different shape: lm_",
        ),
    ],
    ids=["other-modules", "several-adapters", "prompt", "other-than-its-config"],
)
@pytest.mark.parametrize("offline", [False, True], ids=["live", "offline"])
def test_what_cannot_be_exported_says_why(
    make: Callable[[], nn.Module], error: type[Exception], message: str, offline: bool, tmp_path: Path
) -> None:
    source: Any = make()
    if offline:
        save_checkpoint(tmp_path / "run.ckpt", source)
        source = tmp_path / "run.ckpt"
        error, message = (
            (ValueError, "does not record which Hugging Face model") if error is TypeError else (error, message)
        )
    with pytest.raises(error, match=message):
        export_hf(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class OwnLlama(LlamaForCausalLM):
    """A user's own class."""


def test_a_users_own_class_is_exported_where_it_is_at_hand(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = OwnLlama(make_llama().config)
    save_checkpoint(tmp_path / "run.ckpt", model)
    export_hf(model, tmp_path / "out")
    assert read_json(tmp_path / "out")["config.json"]["architectures"] == ["OwnLlama"]
    assert_same_tensors(read_weights(tmp_path / "out"), model.state_dict())
    with pytest.raises(ValueError, match=r"holds a .*OwnLlama, but the installed transformers .* export the module"):
        export_hf(tmp_path / "run.ckpt", tmp_path / "offline")


def test_a_path_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checkpoint '.*absent\.ckpt'"):
        export_hf(tmp_path / "absent.ckpt", tmp_path / "out")
    (tmp_path / "damaged.ckpt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=r"damaged\.ckpt' is truncated, or was not written by `torch.save`"):
        export_hf(tmp_path / "damaged.ckpt", tmp_path / "out")
    save_checkpoint(tmp_path / "half.ckpt", make_llama())
    data = tmp_path / "half.ckpt" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"half\.ckpt' is incomplete: __0_0\.distcp \(truncated\)"):
        export_hf(tmp_path / "half.ckpt", tmp_path / "out")
    with pytest.raises(ValueError, match=r"out='s3://bucket/out'\) is not local: export to a local directory"):
        export_hf(make_llama(), "s3://bucket/out")
