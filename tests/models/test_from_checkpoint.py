"""Modules come back from checkpoints of any kind in one process: with the weights that were trained, and all else."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.models import GPT2, LLAMA, make_causal_lm, make_token_batches
from helpers.oracle import make_config
from helpers.ranks import run_ranks
from helpers.user_modules import UserModule, make_trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from lightning_fsdp2 import (
    CausalLM,
    CheckpointConfig,
    FSDP2Strategy,
    load_from_checkpoint,
    save_checkpoint,
)
from lightning_fsdp2.models import from_pretrained

GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BATCHES = make_token_batches(4, ragged=False)
TOKENS = BATCHES[0]["input_ids"]


def train(module: pl.LightningModule, path: Path, **strategy: Any) -> Tensor:
    """Train two steps, save, and return the logits of the trained model."""
    trainer = make_trainer(strategy.get("strategy") or FSDP2Strategy(**strategy))
    trainer.fit(module, DataLoader(BATCHES, batch_size=None))
    trainer.save_checkpoint(path)
    return get_logits(module)


def get_logits(module: Any) -> Tensor:
    with torch.no_grad():
        return module.eval()(TOKENS)


def assert_loaded(module: CausalLM, logits: Tensor) -> None:
    assert module.training
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    config = module.model.config
    tied = module.model.get_output_embeddings().weight is module.model.get_input_embeddings().weight
    assert tied == bool(config.tie_word_embeddings)
    torch.testing.assert_close(get_logits(module), logits, rtol=1e-5, atol=1e-6)


@pytest.mark.guarantees("checkpoint-commands", "loaded-modules")
@pytest.mark.parametrize(
    ("config", "tp_size", "format"),
    [
        pytest.param(GEMMA, 1, "sharded", id="gemma-dp2-sharded", marks=pytest.mark.slow),
        pytest.param(LLAMA, 2, "full", id="llama-tp2-full"),
        pytest.param(GEMMA, 1, "full", id="gemma-dp2-full", marks=pytest.mark.slow),
        pytest.param(LLAMA, 2, "sharded", id="llama-tp2-sharded", marks=pytest.mark.slow),
        pytest.param(GPT2, 2, "sharded", id="gpt2-tp2-sharded", marks=pytest.mark.slow),
        pytest.param(GPT2, 1, "full", id="gpt2-dp2-full", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_was_sharded(config: dict[str, Any], tp_size: int, format: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    checkpoint = CheckpointConfig(format=format)
    logits = run_ranks(lambda: train(CausalLM(config=config), path, tp_size=tp_size, checkpoint=checkpoint), 2)[0]
    assert path.is_dir() == (format == "sharded")
    assert_loaded(load_from_checkpoint(CausalLM, path), logits)


class TrainsLogits(UserModule):
    """A user's own module with a Hugging Face model, whose logits it returns."""

    make_optimizer = staticmethod(partial(torch.optim.SGD, lr=0.5))

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self(batch["input_ids"]).square().mean()


class FromConfig(TrainsLogits):
    """Its hyper-parameter is the config that its model holds."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = LlamaForCausalLM(config)


class SaveOnTheWay(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("format", ["sharded", pytest.param("full", marks=pytest.mark.slow)])
def test_a_config_in_the_hyperparameters_of_a_context_parallel_model(format: Any, tmp_path: Path) -> None:
    """While it is trained the config names attention that nobody who loads it has."""
    path = tmp_path / "a.ckpt"

    def run() -> Tensor:
        checkpoint = CheckpointConfig(format=format, trust_checkpoint=True)
        strategy = FSDP2Strategy(cp_size=2, checkpoint=checkpoint)
        logger = CSVLogger(tmp_path, name="", version="")
        trainer = make_trainer(strategy, callbacks=[SaveOnTheWay(path)], logger=logger)
        module = FromConfig(make_config(LLAMA))
        trainer.fit(module, DataLoader(BATCHES, batch_size=None))
        return get_logits(module)

    logits = run_ranks(run, 2)[0]
    module = load_from_checkpoint(FromConfig, path, trust_checkpoint=True)
    assert module.model.config._attn_implementation == module.hparams["config"]._attn_implementation == "sdpa"
    torch.testing.assert_close(get_logits(module), logits, rtol=1e-5, atol=1e-6)
    hyper_parameters, _, run = (tmp_path / "hparams.yaml").read_text().partition("\nrun:")
    assert "context_parallel" not in hyper_parameters
    assert "context_parallel_method" in run


def test_the_files_that_training_began_with_are_not_read_again(tmp_path: Path) -> None:
    folder, path = tmp_path / "pretrained", tmp_path / "a.ckpt"
    model = make_causal_lm(LLAMA)
    model.config.unsloth_version = "2026.9"  # tools add fields that transformers does not know
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.25}')
    logits = run_ranks(lambda: train(CausalLM(pretrained=str(folder), loss="chunked"), path), 1)[0]
    shutil.rmtree(folder)
    module = load_from_checkpoint(CausalLM, path)
    assert module.loss == "chunked"
    assert module.hparams["config"]["model_type"] == "llama"
    assert module.model.generation_config.temperature == 0.25
    assert_loaded(module, logits)


class FromFolder(TrainsLogits):
    """Takes the weights that training began with from files."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if self.model is None:
            self.model = from_pretrained(self.hparams["folder"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        pass


def test_what_was_trained_is_not_replaced_by_what_training_began_with(tmp_path: Path) -> None:
    folder, path = tmp_path / "pretrained", tmp_path / "a.ckpt"
    make_causal_lm(LLAMA).save_pretrained(folder)

    def run() -> None:
        logits = train(FromFolder(str(folder)), path)
        module = load_from_checkpoint(FromFolder, path)
        torch.testing.assert_close(get_logits(module), logits)
        make_trainer().validate(module, DataLoader(BATCHES, batch_size=None), verbose=False)
        torch.testing.assert_close(get_logits(module), logits)

    run_ranks(run, 2)


def test_what_a_checkpoint_lacks_is_what_training_began_with(tmp_path: Path) -> None:
    """As where the base is frozen and checkpoints hold the rest."""
    model = make_causal_lm(LLAMA)
    model.save_pretrained(tmp_path)
    norm = torch.randn(32)
    state = {"model.model.norm.weight": norm}
    torch.save({"state_dict": state, "hyper_parameters": {"folder": str(tmp_path)}}, tmp_path / "a.ckpt")

    def run() -> None:
        module = load_from_checkpoint(FromFolder, tmp_path / "a.ckpt", strict=False)
        for name, tensor in module.model.state_dict().items():
            expected = norm if name == "model.norm.weight" else model.state_dict()[name]
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0, msg=name)

    run_ranks(run, 1, group=False)


class WithFolder(CausalLM):
    def __init__(self, pretrained: str, scale: float = 2.0) -> None:
        super().__init__(pretrained)
        self.save_hyperparameters("pretrained", "scale")
        self.scale = scale


@pytest.mark.slow
def test_a_subclass_is_built_from_its_own_arguments_and_those_of_the_call_count_first(tmp_path: Path) -> None:
    folder, path = tmp_path / "pretrained", tmp_path / "a.ckpt"
    make_causal_lm(LLAMA).save_pretrained(folder)
    logits = run_ranks(lambda: train(WithFolder(str(folder), scale=3.0), path), 1)[0]
    module = load_from_checkpoint(WithFolder, path)
    assert module.scale == 3.0
    assert_loaded(module, logits)
    folder = folder.rename(tmp_path / "moved")
    assert load_from_checkpoint(WithFolder, path, pretrained=str(folder), scale=4.0).scale == 4.0


class OwnSharding(CausalLM):
    """Written for Lightning's ModelParallelStrategy."""

    def configure_model(self) -> None:
        is_new = self.model is None
        super().configure_model()
        if is_new and self.device_mesh is not None:
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def test_a_directory_of_lightnings_own_strategy(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"

    def run() -> Tensor:
        return train(OwnSharding(config=LLAMA), path, strategy=ModelParallelStrategy(2, 1))

    logits = run_ranks(run, 2)[0]
    assert path.is_dir()
    assert_loaded(load_from_checkpoint(OwnSharding, path), logits)


class OnMeta(TrainsLogits):
    """Builds on the meta device under any strategy; holds what only initialisation can fill."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = make_causal_lm({**GEMMA, "hidden_size": self.hparams["width"]})
                self.head = nn.Sequential(nn.Linear(101, 3), Scale())

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(super().forward(input_ids))


class Scale(nn.Module):
    """A buffer that checkpoints hold, and one that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.zeros(3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.count.zero_()
        self.scale.copy_(torch.arange(3.0))

    def forward(self, hidden: Tensor) -> Tensor:
        self.count += 1
        return hidden * self.scale


@pytest.mark.guarantees("loaded-modules")
@pytest.mark.filterwarnings("error:.*meta")
def test_what_is_built_on_the_meta_device_gets_weights_and_buffers(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    logits = run_ranks(lambda: train(OnMeta(32), path), 2)[0]
    module = load_from_checkpoint(OnMeta, path)
    assert module.head[1].count == 2
    assert module.model.lm_head.weight is module.model.model.embed_tokens.weight
    torch.testing.assert_close(get_logits(module), logits, rtol=1e-5, atol=1e-6)
    state = torch.get_rng_state()
    load_from_checkpoint(OnMeta, path)
    assert torch.equal(torch.get_rng_state(), state)


class Lenient(OnMeta):
    strict_loading = False


def test_keys_that_differ_are_listed_or_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    source = OnMeta(32)
    source.configure_model()
    state = {name: torch.randn(value.shape) for name, value in source.state_dict().items()}
    bias = state.pop("head.0.bias")
    torch.save({"state_dict": {**state, "other": bias}, "hyper_parameters": {"width": 32}}, path)
    with pytest.raises(ValueError, match=r"(?s)a\.ckpt' does not match this OnMeta.*head\.0\.bias.*other"):
        load_from_checkpoint(OnMeta, path)
    with pytest.raises(ValueError, match=r"size mismatch for model\.lm_head\.weight"):
        load_from_checkpoint(OnMeta, path, width=64)
    for module in (load_from_checkpoint(OnMeta, path, strict=False), load_from_checkpoint(Lenient, path)):
        assert torch.equal(module.head[0].weight, state["head.0.weight"])
        assert not module.head[0].bias.is_meta


def test_weights_without_hyper_parameters(tmp_path: Path) -> None:
    model = make_causal_lm(LLAMA)
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    torch.save(state, tmp_path / "weights.pt")
    save_checkpoint(tmp_path / "a.ckpt", nn.ModuleDict({"model": model}))
    for name in ("weights.pt", "a.ckpt"):
        assert_loaded(load_from_checkpoint(CausalLM, tmp_path / name, config=LLAMA), model.eval()(TOKENS).logits)


OBJECT = Path("somewhere")


class WithObject(pl.LightningModule):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_objects_are_loaded_from_trusted_checkpoints_only(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {}, "hyper_parameters": {"path": OBJECT}}, path)
    with pytest.raises(ValueError, match=r"objects other than tensors.*`trust_checkpoint=True`"):
        load_from_checkpoint(WithObject, path)
    for trust in ({"trust_checkpoint": True}, {"weights_only": False}):
        assert load_from_checkpoint(WithObject, path, **trust).hparams["path"] == OBJECT
    with pytest.raises(ValueError, match="leave one of them out"):
        load_from_checkpoint(WithObject, path, trust_checkpoint=True, weights_only=True)


class Data(pl.LightningDataModule):
    def __init__(self, size: int, count: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen = 0

    def train_dataloader(self) -> DataLoader[Any]:
        self.seen += 1
        return DataLoader(BATCHES, batch_size=None)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize("format", ["sharded", pytest.param("full", marks=pytest.mark.slow)])
def test_a_data_module_comes_back_with_its_arguments_and_state(format: Any, tmp_path: Path) -> None:
    def run() -> None:
        strategy = FSDP2Strategy(checkpoint=CheckpointConfig(format=format))
        trainer = make_trainer(strategy, max_steps=1)
        trainer.fit(CausalLM(config=LLAMA), datamodule=Data(size=2, count=3))
        trainer.save_checkpoint(tmp_path / "a.ckpt")

    run_ranks(run, 1)
    data = load_from_checkpoint(Data, tmp_path / "a.ckpt", count=4)
    assert (data.hparams["size"], data.hparams["count"], data.seen) == (2, 4, 1)


def test_other_classes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"cls=.*Linear.* pass a LightningModule or LightningDataModule class"):
        load_from_checkpoint(nn.Linear, "a.ckpt")
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint 'absent\.ckpt'"):
        load_from_checkpoint(CausalLM, "absent.ckpt")
