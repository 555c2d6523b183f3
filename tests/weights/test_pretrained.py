"""Weights read from files into shards, in a plain torch loop: what ``from_pretrained`` gives, whatever the files hold.

``tests/models/test_causal_lm.py`` reads whole checkpoints of every kind, tied and converted ones too, through the
Trainer; here the files and the model differ.
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.memory import get_peak_memory, reset_peak_memory
from helpers.models import ENCODER, LLAMA, VOCABULARY, make_causal_lm, make_token_batches
from helpers.oracle import make_config, whole
from helpers.ranks import RankError, run_ranks
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from lightning_fsdp2 import create_device_mesh, export_hf, save_checkpoint
from lightning_fsdp2.models import from_pretrained
from lightning_fsdp2.parallelizer import fsdp2_strategy_parallelize
from lightning_fsdp2.weights import adapters, pretrained
from lightning_fsdp2.weights.pretrained import (
    get_folder_fingerprint,
    get_weight_files,
    load_pretrained,
    read_pretrained,
    set_pretrained,
)

FILES = 9
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three layers in several files with an index."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    make_causal_lm(LLAMA).save_pretrained(path, max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) == FILES
    return path


def read_weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def save_weights(folder: Path, weights: dict[str, Tensor]) -> Path:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def build_on_meta(
    folder: Path,
    kind: Any = AutoModelForCausalLM,
    dtype: torch.dtype = torch.float32,
    allow_missing: Any = (),
    **changes: Any,
) -> nn.Module:
    """A model that has no weights yet and knows where they are."""
    with torch.device("meta"):
        model = kind.from_config(make_config({**LLAMA, **changes}), dtype=dtype)
    set_pretrained(model, folder, allow_missing=allow_missing)
    return model.train()


def build_with_new_parts(folder: Path, **changes: Any) -> nn.Module:
    """A classification head and a fourth layer, which the files lack."""
    new = ("score.weight", "model.layers.3.*")
    return build_on_meta(folder, AutoModelForSequenceClassification, allow_missing=new, num_hidden_layers=4, **changes)


def shard(model: nn.Module, **sizes: int) -> nn.Module:
    mesh = create_device_mesh(device_type="cpu", **sizes)
    return fsdp2_strategy_parallelize(model, mesh, mp_policy=MixedPrecisionPolicy())


def assert_equal_weights(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)


# ---------------------------------------------------------------------- which files


def test_the_index_says_which_files_hold_the_weights(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save_file({"other": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    expected = [str(tmp_path / f"model-{number:05}-of-{FILES:05}.safetensors") for number in range(1, FILES + 1)]
    assert get_weight_files(tmp_path) == expected


def test_a_single_file_counts_before_an_index_that_an_older_model_left(folder: Path, tmp_path: Path) -> None:
    """As for transformers; and what else lies there is not read."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save_file({"other": torch.ones(1)}, tmp_path / "zz_average.safetensors")
    model = make_causal_lm(LLAMA)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes((folder / "model.safetensors.index.json").read_bytes())
    assert get_weight_files(tmp_path) == [str(tmp_path / "model.safetensors")]

    def run() -> None:
        assert_equal_weights(whole(shard(build_on_meta(tmp_path)).state_dict()), model.state_dict())

    run_ranks(run, 1)


def test_files_of_other_names_are_no_model_without_an_index(tmp_path: Path) -> None:
    save_file({"other": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        get_weight_files(tmp_path)


@pytest.mark.parametrize("text", ['{"weight_map": {"a"', "{}", "[]", '{"weight_map": ["a"]}', "\x00"])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is damaged, .* download it again"):
        get_weight_files(tmp_path)


@pytest.mark.parametrize("make_folder", [True, False], ids=["older-weights", "no-folder"])
def test_a_folder_without_safetensors_is_refused_at_once_with_the_remedy(tmp_path: Path, make_folder: bool) -> None:
    path = tmp_path / "model"
    if make_folder:
        path.mkdir()
        torch.save({}, path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"model' holds neither model\.safetensors .*convert older `\.bin`"):
        build_on_meta(path)


def test_a_file_of_the_index_that_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model-00002-of-00009.safetensors").unlink()

    def run() -> None:
        with pytest.raises(FileNotFoundError, match=r"model-00002-of-00009\.safetensors"):
            load_pretrained(build_on_meta(tmp_path), CPU)

    run_ranks(run, 1, group=False)


def test_a_fingerprint_is_of_names_shapes_dtypes_and_first_bytes_in_any_files(tmp_path: Path) -> None:
    numbers = torch.arange(32.0)  # 128 bytes, of which 64 count
    tensors = {"a": numbers, "b": torch.zeros(2), "c": torch.ones(2)}

    def get(tensors: dict[str, Tensor]) -> str:
        return get_folder_fingerprint(save_weights(tmp_path, tensors))

    fingerprint = get(tensors)
    assert get({**tensors, "a": torch.where(numbers < 16, numbers, 0)}) == fingerprint
    others = [
        {**tensors, "a": torch.where(numbers < 15, numbers, 0)},
        {**tensors, "b": torch.zeros(1, 2)},
        {**tensors, "b": torch.zeros(2, dtype=torch.int32)},
        {**tensors, "b": torch.tensor([0.0, 1.0])},
        {"a": numbers, "b": torch.zeros(2), "d": torch.ones(2)},
        {"a": numbers, "b": torch.zeros(2)},
    ]
    assert len({fingerprint, *map(get, others)}) == 7
    (tmp_path / "model.safetensors").unlink()
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert get_folder_fingerprint(tmp_path) == fingerprint


# ---------------------------------------------------------------------- into shards


def assert_equal_models(model: nn.Module, expected: nn.Module) -> None:
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert_equal_weights(whole(model.state_dict()), expected.state_dict())
    assert dict(model.named_buffers()).keys() == dict(expected.named_buffers()).keys()
    assert_equal_weights(dict(model.named_buffers()), dict(expected.named_buffers()))
    tokens = make_token_batches(1)[0]["input_ids"]
    with torch.no_grad():
        actual = model.eval()(tokens, use_cache=False).logits
        torch.testing.assert_close(actual, expected(tokens, use_cache=False).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.guarantees("shard-by-shard")
def test_shards_and_replicas_have_the_weights_buffers_and_logits_of_from_pretrained(folder: Path) -> None:
    def run() -> None:
        expected = AutoModelForCausalLM.from_pretrained(folder)
        torch.manual_seed(dist.get_rank())
        for replicas in (1, 2):
            assert_equal_models(shard(build_on_meta(folder), dp_replicate_size=replicas), expected)
        assert transformers_logging.is_progress_bar_enabled(), "the user's setting was not put back"

    run_ranks(run, 2)


class Distillation(nn.Module):
    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher = teacher.requires_grad_(False)
        self.student = student


def test_several_models_in_one_module_are_read_each_from_its_own_folder(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    small = {"num_hidden_layers": 2, "tie_word_embeddings": True}
    make_causal_lm({**LLAMA, **small}).save_pretrained(tmp_path)

    def run() -> None:
        model = shard(Distillation(build_on_meta(folder), build_on_meta(tmp_path, **small)))
        assert_equal_weights(whole(model.teacher.state_dict()), read_weights(folder))
        expected = read_weights(tmp_path)
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
        assert_equal_weights(whole(model.student.state_dict()), expected)
        assert model.student.lm_head.weight is model.student.model.embed_tokens.weight
        assert not any(parameter.requires_grad for parameter in model.teacher.parameters())
        assert all(parameter.requires_grad for parameter in model.student.parameters())

    run_ranks(run, 2)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
    ids=["bfloat16-files", "bfloat16-model"],
)
def test_weights_take_the_dtype_of_the_model(
    folder: Path, tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    expected = {name: tensor.to(stored) for name, tensor in read_weights(folder).items()}
    save_file(expected, tmp_path / "model.safetensors", metadata={"format": "pt"})

    def run() -> None:
        model = shard(build_on_meta(tmp_path, dtype=wanted))
        assert {parameter.dtype for parameter in model.parameters()} == {wanted}
        actual = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
        assert_equal_weights(actual, {name: tensor.to(wanted) for name, tensor in expected.items()})
        assert model.model.rotary_emb.inv_freq.dtype is torch.float32

    run_ranks(run, 2)


def test_some_weights_are_read_whole_without_the_others(folder: Path) -> None:
    def build(**changes: Any) -> nn.Module:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(make_config({**LLAMA, **changes}))

    stored = read_weights(folder)
    model, names = build(), ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"]
    found = read_pretrained(model, folder, names, torch.bfloat16)
    assert {name for name, parameter in model.named_parameters() if not parameter.is_meta} == set(names)
    assert found.keys() == set(names)
    assert_equal_weights(found, {name: stored[name].bfloat16() for name in names})
    # either of two tied weights stands for both
    tied = read_pretrained(build(tie_word_embeddings=True), folder, ["lm_head.weight"], torch.float32)
    assert tied.keys() == {"lm_head.weight"}
    names = ["model.norm.weight", "model.layers.3.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"lacks model\.layers\.3\.mlp\.up_proj\.weight; give the directory"):
        read_pretrained(build(num_hidden_layers=4), folder, names, torch.float32)


def test_a_file_stays_mapped_for_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapping it for each tensor would take long, and mapped pages stay in memory."""
    files = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    for file in files:
        save_file({name: torch.arange(8.0) for name in "abcdef"}, file)
    mapped = []

    def map_file(file: str, **options: Any) -> Any:
        mapped.append(Path(file))
        return safe_open(file, **options)

    monkeypatch.setattr(pretrained, "safe_open", map_file)
    monkeypatch.setattr(pretrained._Reader, "_MOST_BYTES", 3 * 32)
    reader = pretrained._Reader()
    first, second = map(str, files)
    for name in "abcdef":
        assert torch.equal(reader.read(first, name, slice(2, 4)), torch.tensor([2.0, 3.0]))
    assert mapped == [files[0]] * 2
    for file in (first, first, second, second, first):
        reader.read(file, "a", slice(None))
    assert mapped[2:] == [files[0], files[1], files[0]]


# ---------------------------------------------------------------------- files and model differ


def test_weights_that_the_model_lacks_are_left_in_the_files(folder: Path) -> None:
    def run() -> None:
        weights = read_weights(folder)
        shallow = shard(build_on_meta(folder, num_hidden_layers=2))
        assert_equal_weights(whole(shallow.state_dict()), weights)
        backbone = shard(build_on_meta(folder, AutoModel))
        assert_equal_weights(
            {f"model.{name}": tensor for name, tensor in whole(backbone.state_dict()).items()}, weights
        )

    run_ranks(run, 2)


def test_weights_that_the_files_lack_are_initialised_as_transformers_does(folder: Path) -> None:
    """And are named in one report, that of the first rank."""

    def run() -> list[str]:
        reports: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: reports.append(record.getMessage())  # type: ignore[method-assign]
        transformers_logging.add_handler(handler)
        model = shard(build_with_new_parts(folder, num_labels=40))
        weights = whole(model.state_dict())
        new = {name: tensor for name, tensor in weights.items() if name == "score.weight" or ".layers.3." in name}
        stored = read_weights(folder)
        assert_equal_weights({name: weights[name] for name in weights.keys() - new.keys()}, stored)
        assert len(new) == 10
        for name, tensor in new.items():
            if "norm" in name:
                assert torch.equal(tensor, torch.ones(32)), name
            else:  # `initializer_range` of a LlamaConfig is 0.02
                assert tensor.mean().abs() < 0.005, name
                assert 0.016 < tensor.std() < 0.024, name
        return reports

    first, second = run_ranks(run, 2)
    assert "score.weight" in "".join(first)
    assert second == []


@pytest.mark.guarantees("missing-weights")
def test_weights_that_the_files_lack_are_those_of_one_process_on_any_mesh(folder: Path) -> None:
    def run(replicas: int) -> dict[str, Tensor]:
        torch.manual_seed(dist.get_rank())
        model = shard(
            build_with_new_parts(folder, num_labels=8),
            dp_replicate_size=replicas,
        )
        drawn, untouched = torch.rand(3), torch.Generator().manual_seed(dist.get_rank())
        assert torch.equal(drawn, torch.rand(3, generator=untouched)), "loading drew from the user's random numbers"
        return whole(model.state_dict())

    expected = run_ranks(run, 1, 1)[0]
    for world_size, replicas in ((2, 1), (2, 2)):
        for actual in run_ranks(run, world_size, replicas):
            assert_equal_weights(actual, expected)


def test_a_tensor_of_another_shape_is_named_with_the_folder(folder: Path) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=r"lm_head\.weight is \(7, 32\) here") as raised:
            shard(build_on_meta(folder, vocab_size=7))
        assert str(folder) in str(raised.value)

    run_ranks(run, 2)


@pytest.mark.guarantees("missing-weights")
def test_weights_that_are_missing_are_listed_unless_that_is_allowed(folder: Path, tmp_path: Path) -> None:
    weights = read_weights(folder)
    norm, head = weights.pop("model.norm.weight"), weights.pop("lm_head.weight")
    save_weights(tmp_path, weights)

    def run() -> None:
        for allowed in ((), "lm_head.bias", ["lm_head", "*.norm"]):
            with pytest.raises(
                ValueError,
                match=r"do not fit this LlamaForCausalLM: missing in the files: lm_head\.weight, model\.norm\.weight\.",
            ) as raised:
                shard(build_on_meta(tmp_path, allow_missing=allowed))
            assert str(tmp_path) in str(raised.value)
            assert "allow_missing" in str(raised.value)
        with pytest.raises(ValueError, match=r"missing in the files: model\.norm\.weight\."):
            shard(build_on_meta(tmp_path, allow_missing="lm_head.*"))
        weights = whole(shard(build_on_meta(tmp_path, allow_missing=("lm_*", "*.norm.weight"))).state_dict())
        assert torch.equal(weights["model.norm.weight"], torch.ones_like(norm))
        assert not torch.equal(weights["lm_head.weight"], head)
        tied = whole(
            shard(build_on_meta(tmp_path, allow_missing="model.norm.*", tie_word_embeddings=True)).state_dict()
        )
        assert torch.equal(tied["lm_head.weight"], weights["model.embed_tokens.weight"])

    run_ranks(run, 2)


def test_tied_weights_that_the_files_hold_twice_must_be_equal(folder: Path, tmp_path: Path) -> None:
    weights = read_weights(folder)
    save_weights(tmp_path, weights)
    (tmp_path / "equal").mkdir()
    equal = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_weights(tmp_path / "equal", equal)

    def run() -> None:
        with pytest.raises(
            ValueError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight, .* different values"
        ):
            shard(build_on_meta(tmp_path, tie_word_embeddings=True))
        assert_equal_weights(whole(shard(build_on_meta(tmp_path)).state_dict()), weights)
        model = shard(build_on_meta(tmp_path / "equal", tie_word_embeddings=True))
        assert_equal_weights(whole(model.state_dict()), equal)
        assert model.lm_head.weight is model.model.embed_tokens.weight

    run_ranks(run, 2)


def test_each_tie_that_the_files_contradict_is_named(tmp_path: Path) -> None:
    """Also after one of which the files hold only one weight, as they do by default."""
    config = make_config({"model_type": "bert", "vocab_size": VOCABULARY, **ENCODER})
    bert = AutoModelForMaskedLM.from_config(config)
    assert [*bert.all_tied_weights_keys] == ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"]
    bert.save_pretrained(tmp_path)
    save_weights(tmp_path, {**read_weights(tmp_path), "cls.predictions.decoder.bias": torch.ones(VOCABULARY)})
    with torch.device("meta"):
        model = AutoModelForMaskedLM.from_config(config)
    set_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match=r"ties cls\.predictions\.decoder\.bias to .* different values"):
        load_pretrained(model, CPU)


def test_weights_that_a_module_would_compute_without_are_listed(folder: Path, tmp_path: Path) -> None:
    """As the biases of another config, or the scales of a quantised checkpoint."""
    name = "model.layers.1.self_attn.q_proj"
    extra = {
        f"{name}.bias": torch.ones(32),
        f"{name}.weight_scale_inv": torch.ones(1),
        "model.layers.1.note": torch.ones(1),
    }
    save_weights(tmp_path, {**read_weights(folder), **extra})

    def run() -> None:
        with pytest.raises(
            ValueError, match=rf"in the module that would use them: {name}\.bias, {name}\.weight_scale_inv\. "
        ) as raised:
            shard(build_on_meta(tmp_path))
        assert "If the model should not use some tensors, remove them from the files" in str(raised.value)

    run_ranks(run, 2)


def test_adapters_around_a_model_without_weights_are_initialised_as_peft_does(folder: Path) -> None:
    def run() -> None:
        # rank by rank another seed: those of the first one count
        torch.manual_seed(dist.get_rank())
        config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
        weights = whole(shard(get_peft_model(build_on_meta(folder), config)).state_dict())
        expected = read_weights(folder)
        for name, tensor in weights.items():
            plain = name.removeprefix("base_model.model.").replace("base_layer.", "").replace("original_module.", "")
            plain = plain.replace("modules_to_save.default.", "")
            if "lora_A" in name:  # kaiming_uniform_ with a=sqrt(5)
                assert 0.9 * 32**-0.5 < tensor.abs().max() <= 32**-0.5
            else:
                reference = torch.zeros(32, 8) if "lora_B" in name else expected[plain]
                torch.testing.assert_close(tensor, reference, rtol=0, atol=0, msg=name)

    run_ranks(run, 2)


@pytest.mark.parametrize("init", ["pissa", "orthogonal"])
def test_adapters_that_are_made_of_weights_are_refused_around_a_model_without(init: str, folder: Path) -> None:
    def run() -> None:
        model = build_on_meta(folder)
        adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]), low_cpu_mem_usage=True)
        adapted.peft_config["default"].init_lora_weights = init  # type: ignore[assignment]
        with pytest.raises(
            ValueError, match=rf"init_lora_weights='{init}'.*`from_pretrained\(\.\.\., on_meta=False\)`"
        ):
            shard(adapted)

    run_ranks(run, 1)


def test_a_peft_that_passes_over_hooks_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "version", lambda name: "0.20.0")

    def run() -> None:
        shard(build_on_meta(folder))
        adapted = get_peft_model(build_on_meta(folder), LoraConfig(target_modules=["q_proj"]))
        with pytest.raises(ImportError, match=r"peft 0\.20\.0 is too old .*pip install 'lightning-fsdp2\[lora\]'"):
            shard(adapted)

    run_ranks(run, 1)


def test_only_so_many_names_are_listed(folder: Path, tmp_path: Path) -> None:
    weights = read_weights(folder)
    save_weights(tmp_path, {"model.norm.weight": weights["model.norm.weight"]})
    with pytest.raises(RankError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight, \S+, 9 more\. Change"):
        run_ranks(lambda: load_pretrained(build_on_meta(tmp_path), CPU), 1, group=False)


@pytest.mark.parametrize("damage", ["truncated", "no-safetensors"])
def test_a_damaged_file_is_named_on_every_rank(damage: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model-00003-of-00009.safetensors"
    file.write_bytes(file.read_bytes()[:-5] if damage == "truncated" else b"<html>404</html>")

    def run() -> None:
        with pytest.raises(
            ValueError, match=r"model-00003-of-00009\.safetensors of .* is damaged .* download it again"
        ):
            shard(build_on_meta(tmp_path))

    run_ranks(run, 2)


def test_files_that_may_not_be_read_are_not_called_missing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    def say_missing(*args: Any, **options: Any) -> None:
        raise FileNotFoundError("No such file or directory")  # as safetensors does

    save_weights(tmp_path, {"a": torch.zeros(1)})
    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "safe_open", say_missing)
        patch.setattr(pretrained, "open", refuse, raising=False)
        with pytest.raises(ValueError, match=r"model.safetensors of .* may not be read \(Permission denied\)"):
            pretrained._open_files(tmp_path)
    monkeypatch.setattr(pretrained.os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=rf"pretrained='{tmp_path}' may not be read \(Permission denied\); let this"):
        pretrained.get_weight_files(tmp_path)


def test_an_error_of_one_rank_is_raised_on_all(folder: Path, tmp_path: Path) -> None:
    """Where nodes have disks of their own."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model-00003-of-00009.safetensors").unlink()

    def run() -> None:
        with pytest.raises(
            FileNotFoundError, match=r"model-00003-of-00009\.safetensors is missing, although the index"
        ):
            shard(build_on_meta(tmp_path if dist.get_rank() == 3 else folder), tp_size=2)

    run_ranks(run, 4)


def test_a_checkpoint_or_a_file_is_no_directory_of_a_model(folder: Path, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "step=1.ckpt", nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"step=1\.ckpt' is a checkpoint of a training run\. .*`ckpt_path`.*export_hf"):
        build_on_meta(tmp_path / "step=1.ckpt")
    with pytest.raises(ValueError, match=r"config\.json' is a file; give the directory"):
        build_on_meta(folder / "config.json")


# ---------------------------------------------------------------------- memory

_MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 1.6 GB in float32."""
    path = tmp_path_factory.mktemp("large") / "model"
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 5, "vocab_size": 16384}
    config = make_config({**LLAMA, **sizes, "num_attention_heads": 16, "num_key_value_heads": 16})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.to_empty(device="cpu").save_pretrained(path, max_shard_size="500MB")
    return path


@pytest.mark.guarantees("no-whole-model", "pretrained-slices", "one-file-at-a-time")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tp_size"),
    [(torch.float32, 1), (torch.bfloat16, 1), (torch.float32, 2)],
    ids=["dp2", "dp2-cast", "tp2"],
)
def test_memory_of_reading_and_writing_shards(
    dtype: torch.dtype, tp_size: int, large_folder: Path, tmp_path: Path
) -> None:
    """No rank ever holds more than its shards and the tensor or file in work."""

    def measure() -> tuple[int, ...]:
        mesh = create_device_mesh(device_type="cpu", tp_size=tp_size)
        model = from_pretrained(large_folder, dtype=dtype)
        baseline = reset_peak_memory()
        fsdp2_strategy_parallelize(model, mesh)
        loading = get_peak_memory() - baseline
        shards = sum(parameter.to_local().nbytes for parameter in model.parameters())
        largest = max(parameter.nbytes for parameter in model.parameters())
        baseline = reset_peak_memory()
        export_hf(model, tmp_path / "live", max_shard_size="200MB")
        writing = get_peak_memory() - baseline
        save_checkpoint(tmp_path / "run.ckpt", model)
        del model
        baseline = reset_peak_memory()
        export_hf(tmp_path / "run.ckpt", tmp_path / "offline", max_shard_size="200MB")
        return shards, largest, loading, writing, get_peak_memory() - baseline

    for shards, largest, loading, writing, converting in run_ranks(measure, 2):
        assert shards > 300 * _MEGABYTE
        # 500 MB would do, but not tell a half from a whole in bfloat16
        assert loading <= shards + largest + 200 * _MEGABYTE, f"{loading / _MEGABYTE} MB"
        for exporting in (writing, converting):
            assert exporting <= 200 * _MEGABYTE + 2 * largest + 200 * _MEGABYTE, f"{exporting / _MEGABYTE} MB"


# ---------------------------------------------------------------------- once


def test_weights_are_read_once_and_only_into_models_that_asked_for_them(folder: Path) -> None:
    def run() -> None:
        model = Distillation(build_on_meta(folder), nn.Linear(2, 2, device="meta"))
        load_pretrained(model, CPU)
        assert_equal_weights(model.teacher.state_dict(), read_weights(folder))
        assert model.student.weight.is_meta
        nn.init.zeros_(model.teacher.lm_head.weight)
        load_pretrained(model, CPU)
        assert not model.teacher.lm_head.weight.any()

    run_ranks(run, 1, group=False)


def test_weights_that_a_model_has_by_then_are_kept(folder: Path) -> None:
    def run() -> None:
        model = build_on_meta(folder)
        weights = {name: tensor + 1 for name, tensor in read_weights(folder).items()}
        model.load_state_dict(weights, assign=True)
        assert_equal_weights(whole(shard(model).state_dict()), weights)

    run_ranks(run, 2)
