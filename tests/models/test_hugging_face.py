"""Hugging Face models in anybody's LightningModule: built without weights, which the strategy reads as shards."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import user_modules
from helpers.families import make_family_model
from helpers.models import LLAMA, make_causal_lm, make_token_batches
from helpers.oracle import whole
from helpers.ranks import RankError, run_ranks
from helpers.user_modules import WithModel
from huggingface_hub.utils import filter_repo_objects
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from lightning_fsdp2 import CausalLM, FSDP2Strategy
from lightning_fsdp2.models import from_pretrained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    make_causal_lm(LLAMA).save_pretrained(path)
    return path


class Classifier(WithModel):
    """A user's own module, with a part of its own beside a model with a new head."""

    make_optimizer = staticmethod(partial(torch.optim.AdamW, lr=1e-3))

    def __init__(self, folder: Path, *, allow_missing: Any = "score.*", on_meta: bool = True) -> None:
        make_model = partial(
            from_pretrained,
            folder,
            auto_class="AutoModelForSequenceClassification",
            config={"num_labels": 5, "pad_token_id": 0},
            attn_implementation="eager",
            allow_missing=allow_missing,
            on_meta=on_meta,
        )
        super().__init__(make_model)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.model(batch["input_ids"]).logits * self.scale).square().mean()


make_trainer = partial(user_modules.make_trainer, use_distributed_sampler=True)


def make_loader() -> DataLoader[Any]:
    return DataLoader(make_token_batches(4), batch_size=None)


def test_a_users_module_takes_its_weights_as_shards_and_a_new_head(folder: Path) -> None:
    def run(strategy: Any, on_meta: bool) -> dict[str, Tensor]:
        torch.manual_seed(1)
        module = Classifier(folder, on_meta=on_meta)
        trainer = make_trainer(strategy(), limit_train_batches=0)
        trainer.fit(module, make_loader())
        assert module.model.training
        assert module.model.config._attn_implementation == "eager"
        weights = whole(module.model.state_dict())
        make_trainer(strategy()).fit(module, make_loader())
        assert not torch.equal(whole(module.model.state_dict())["score.weight"], weights["score.weight"])
        return weights

    expected = run_ranks(run, 1, lambda: "auto", False, group=False)[0]
    actual = run_ranks(run, 2, FSDP2Strategy, True)[0]
    source = make_vanilla(folder)
    assert actual.keys() == source.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name
        if name != "score.weight":
            assert torch.equal(tensor, source[name]), name
    assert actual["score.weight"].shape == (5, 32)
    assert actual["score.weight"].std() > 0.01


def make_vanilla(folder: Path) -> dict[str, Tensor]:
    def run() -> dict[str, Tensor]:
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=5).state_dict()

    return run_ranks(run, 1, group=False)[0]


@pytest.mark.parametrize("strategy", [FSDP2Strategy, lambda: "auto"], ids=["shards", "whole"])
def test_a_missing_head_is_an_error_before_the_first_step(strategy: Any, folder: Path) -> None:
    def run() -> None:
        on_meta = strategy is FSDP2Strategy
        make_trainer(strategy()).fit(Classifier(folder, allow_missing=(), on_meta=on_meta), make_loader())

    with pytest.raises(RankError, match=r"LlamaForSequenceClassification: missing in the files: score\.weight\. "):
        run_ranks(run, 1, group=False)


def test_what_is_built_and_how(folder: Path) -> None:
    model = from_pretrained(
        folder, auto_class="LlamaForCausalLM", dtype=torch.bfloat16, config={"attention_dropout": 0.5}
    )
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {(tensor.device.type, tensor.dtype) for tensor in model.parameters()} == {("meta", torch.bfloat16)}
    assert model.config.attention_dropout == 0.5
    with pytest.raises(ValueError, match=r"auto_class='AutoLlama'\): transformers has no such model class"):
        from_pretrained(folder, auto_class="AutoLlama")
    with pytest.raises(ValueError, match=r"has no num_layers; check the spelling. Its fields are .*hidden_layers"):
        from_pretrained(folder, config={"num_layers": 2})


def test_files_of_another_architecture_are_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**LLAMA, "model_type": "qwen2"})).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'LlamaForCausalLM'\) needs a LlamaConfig, but .* is a Qwen2Config; use"):
        from_pretrained(tmp_path, auto_class="LlamaForCausalLM")
    assert type(from_pretrained(tmp_path, auto_class="Qwen2ForCausalLM")).__name__ == "Qwen2ForCausalLM"


@pytest.mark.parametrize("family", ["deepseek_v3", "nemotron_h"])
def test_tensors_that_a_family_keeps_in_float32_stay_so(family: str, tmp_path: Path) -> None:
    model = make_family_model(family)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer))
    model.save_pretrained(tmp_path)

    def run() -> None:
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
        assert {tensor.dtype for tensor in expected.values()} == {torch.bfloat16, torch.float32}
        actual = from_pretrained(tmp_path, dtype=torch.bfloat16, on_meta=False).state_dict()
        module = CausalLM(pretrained=str(tmp_path))
        make_trainer(FSDP2Strategy(), precision="bf16-true", limit_train_batches=0).fit(module, make_loader())
        for weights in (actual, module.model.state_dict()):
            for name, tensor in weights.items():
                tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)

    run_ranks(run, 1)


def test_a_quantised_model_is_refused(folder: Path, tmp_path: Path) -> None:
    model = make_causal_lm(LLAMA)
    model.config.quantization_config = {"quant_method": "fp8"}
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a quantised model, which this package does not train\. Dequantise"):
        from_pretrained(tmp_path)
    module = CausalLM(pretrained=str(tmp_path))
    with pytest.raises(ValueError, match="is a quantised model"):
        module.configure_model()


@pytest.mark.parametrize("build", [from_pretrained, CausalLM], ids=["from_pretrained", "CausalLM"])
def test_a_path_that_is_no_model_is_refused_at_once(build: Any, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"pretrained='.*absent' does not exist"):
        build(str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match=r"pretrained='\./absent' does not exist"):
        build("./absent")
    with pytest.raises(ValueError, match=r"config\.json' is a file"):
        build(str(folder / "config.json"))
    with pytest.raises(FileNotFoundError, match=r"holds neither model\.safetensors nor"):
        build(str(tmp_path))
    (tmp_path / ".metadata").touch()
    with pytest.raises(ValueError, match="is a checkpoint of a training run"):
        build(str(tmp_path))


def test_a_name_of_the_hub_is_downloaded_once_and_looked_up_afterwards(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, bool]] = []

    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    wanted += ["tokenizer.json", "tokenizer.model", "spiece.model", "qwen.tiktoken", "chat_template.jinja"]
    other = ["consolidated.safetensors", "consolidated.00.pth", "original/model.safetensors", "original/config.json"]
    other += ["onnx/decoder.safetensors", "model.gguf", "README.md"]

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str], local_files_only: bool) -> str:
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        assert list(filter_repo_objects([*wanted, *other], **patterns)) == wanted
        calls.append((name, local_files_only))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert from_pretrained("meta-llama/Llama-3").config.name_or_path == str(folder)
    assert calls == [("meta-llama/Llama-3", False)]


@pytest.mark.slow
def test_causal_lm_takes_a_backbone_and_a_new_head(folder: Path, tmp_path: Path) -> None:
    make_causal_lm(LLAMA).model.save_pretrained(tmp_path)

    def run(allow_missing: Any) -> dict[str, Tensor]:
        module = CausalLM(pretrained=str(tmp_path), allow_missing=allow_missing)
        make_trainer(FSDP2Strategy(), limit_train_batches=0).fit(module, make_loader())
        assert module.hparams["allow_missing"] == allow_missing
        return whole(module.model.state_dict())

    assert run_ranks(run, 2, ["lm_head.weight"])[0]["lm_head.weight"].std() > 0.01
    with pytest.raises(RankError, match=r"missing in the files: lm_head\.weight\. .*`allow_missing`"):
        run_ranks(run, 1, [])
