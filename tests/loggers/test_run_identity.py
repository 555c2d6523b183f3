"""What loggers are told of a run, against the objects it is made of."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from helpers.models import LLAMA
from helpers.programs import commit_all
from helpers.ranks import run_ranks
from helpers.strategies import STRATEGIES, Kind
from helpers.user_modules import make_trainer
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import BatchSampler, DataLoader

from lightning_fsdp2 import CausalLM, FSDP2Config, FSDP2Strategy, TextDataModule
from lightning_fsdp2.loggers.run_identity import describe_run, describe_step

CONFIG = {**LLAMA, "vocab_size": 257, "eos_token_id": 256}


class HasSecrets(LightningDataModule):
    """A user's own, with what belongs into no log."""

    def __init__(self) -> None:
        super().__init__()
        self.api_key, self.hf_token, self.options = "s3cret", "s3cret", {"secret": "s3cret", "anon": False}
        self.url = "https://me:s3cret@host/data"
        self.signed = "https://host/data?X-Amz-Signature=s3cret"
        self.eos_token_id = 7
        self.samples = list(range(1000))
        self._hidden = "s3cret"

    def train_dataloader(self) -> Any:
        return DataLoader([{"input_ids": torch.ones(2, 8, dtype=torch.long)}] * 2, batch_size=None)


@pytest.mark.guarantees("tokens-and-description")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if name == "fsdp2" else pytest.mark.slow) for name, kind in STRATEGIES.items()],
    ids=STRATEGIES,
)
def test_a_run_is_described(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("again and again " * 200)
    monkeypatch.chdir(tmp_path)

    def run() -> tuple[dict[str, Any], int, int, int]:
        data = TextDataModule(
            path=str(tmp_path / "text.txt"),
            sequence_length=16,
            batch_size=2,
            global_batch_size=8,
            validation_fraction=0.0,
        )
        logger = CSVLogger(tmp_path, "", "run")
        trainer = kind.make_trainer(precision="bf16-mixed", logger=logger, max_steps=1, log_every_n_steps=1)
        module = CausalLM(config=CONFIG)
        trainer.fit(module, data)
        whole = CausalLM(config=CONFIG)
        whole.configure_model()
        held = describe_run(trainer, module)["parameters"]["on_rank_0"]
        return sum(p.numel() for p in whole.parameters()), held, len(data.train_dataset), trainer.global_rank

    (total, held, sequences, _), _ = kind.run(run, 2)
    told = yaml.unsafe_load((tmp_path / "run" / "hparams.yaml").read_text())["run"]
    assert told["strategy"]["name"] == kind.strategy.__name__
    mesh = told["strategy"]["mesh"]
    assert mesh["dp_replicate"] * mesh["dp_shard"] == 2
    assert told["devices"] == {"ranks": 2, "hosts": 1, "kind": "cpu"}
    assert told["precision"]["trainer"] == "bf16-mixed"
    assert (told["precision"]["weights"], told["precision"]["compute"]) == ("float32", "bfloat16")
    assert told["parameters"] == {"total": total, "trainable": total, "on_rank_0": held}
    assert total / 2 <= held < 0.6 * total if kind.shards else held == total
    assert told["model"]["class"] == "lightning_fsdp2.models.causal_lm.CausalLM"
    (model,) = told["model"]["hugging_face"]
    assert (model["class"], model["config"]["hidden_size"]) == ("LlamaForCausalLM", 32)
    assert told["data"]["class"] == "lightning_fsdp2.data.text.TextDataModule"
    assert told["data"]["options"]["path"] == str(tmp_path / "text.txt")
    sizes = {name: told["data"][name] for name in ("global_batch_size", "tokens_per_step", "tokens")}
    assert sizes == {"global_batch_size": 8, "tokens_per_step": 128, "tokens": sequences * 16}
    assert told["versions"]["torch"] == torch.__version__
    assert told["git"] is None


@pytest.mark.guarantees("tokens-and-description")
def test_secrets_are_left_out_and_the_commit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("1")
    commit = commit_all(tmp_path)

    def run() -> tuple[dict[str, Any], dict[str, Any]]:
        strategy = FSDP2Strategy(config=FSDP2Config(activation_checkpointing="full"))
        trainer = make_trainer(strategy, max_steps=1)
        module = CausalLM(config=CONFIG)
        trainer.fit(module, datamodule=HasSecrets())
        clean = describe_run(trainer, module)
        (tmp_path / "untracked.txt").write_text("")
        (tmp_path / "train.py").write_text("2")
        return clean, describe_run(trainer, module)

    ((clean, dirty),) = STRATEGIES["fsdp2"].run(run, 1)
    assert (clean["git"], dirty["git"]) == ({"commit": commit, "is_dirty": False}, {"commit": commit, "is_dirty": True})
    assert clean["strategy"]["config"]["activation_checkpointing"] == "full"
    assert "s3cret" not in str(clean)
    options = clean["data"]["options"]
    assert options["url"] == "https://host/data"
    assert options["samples"] == "list of 1000"
    assert (options["options"], options["eos_token_id"]) == ({"anon": False}, 7)


class SavesSecrets(HasSecrets):
    """A user's own, whose options Lightning logs and saves."""

    def __init__(self, api_key: str, url: str, text_key: int, more: dict[str, Any], names: list[str]) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.guarantees("secrets")
def test_loggers_get_no_secrets_of_saved_options(tmp_path: Path) -> None:
    options: dict[str, Any] = {"more": {"authToken": "s3cret", "port": 7}, "names": ["http://u:s3cret@h/x", "a"]}

    def run() -> None:
        data = SavesSecrets("s3cret", "postgres://me:s3/cr@et@host/db", 3, **options)
        trainer = make_trainer(FSDP2Strategy(), max_steps=1, logger=CSVLogger(tmp_path, "", "run"))
        with pytest.warns(UserWarning, match=r"SavesSecrets.save_hyperparameters\(\) takes api_key, url, more, names,"):
            trainer.fit(CausalLM(config=CONFIG), datamodule=data)
        assert data.hparams["api_key"] == "s3cret"

    STRATEGIES["fsdp2"].run(run, 1)
    text = (tmp_path / "run" / "hparams.yaml").read_text()
    assert "s3cret" not in text
    assert "cr@et" not in text
    told = yaml.unsafe_load(text)
    assert (told["api_key"], told["url"], told["text_key"]) == ("hidden", "postgres://host/db", 3)
    assert (told["more"], told["names"]) == ({"authToken": "hidden", "port": 7}, ["http://h/x", "a"])


SAMPLES = list(range(100))


@pytest.mark.parametrize(
    ("loader", "options", "said"),
    [
        (DataLoader(SAMPLES, 2), {"accumulate_grad_batches": 4}, "24 samples: 3 data parallel rank(s) x batches of 2"),
        (DataLoader(SAMPLES, batch_sampler=BatchSampler(SAMPLES, 5, True)), {}, "15 samples: 3 data parallel rank(s)"),
        (DataLoader(SAMPLES, batch_size=None), {}, None),
        ({"a": DataLoader(SAMPLES, 2)}, {}, None),
        (DataLoader(SAMPLES, 2), {"callbacks": [GradientAccumulationScheduler({1: 2})]}, None),
        (DataLoader(SAMPLES, 2), {"lightning_module": SimpleNamespace(automatic_optimization=False)}, None),
    ],
    ids=["accumulation", "batch-sampler", "unknown", "several", "scheduled", "manual"],
)
def test_the_samples_of_a_step_are_told_if_they_are_known(loader: Any, options: Any, said: str | None) -> None:
    trainer = SimpleNamespace(
        **{
            "train_dataloader": loader,
            "datamodule": None,
            "strategy": SimpleNamespace(data_parallel_size=3),
            "accumulate_grad_batches": 1,
            "callbacks": [],
            "lightning_module": SimpleNamespace(automatic_optimization=True),
            **options,
        }
    )
    text = describe_step(trainer)
    assert text is None if said is None else text.startswith(f"A step is {said}")


def test_a_fit_logs_the_samples_and_tokens_of_a_step_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "text.txt").write_text("again and again " * 200)

    def run() -> list[str]:
        data = TextDataModule(path=str(tmp_path / "text.txt"), sequence_length=16, batch_size=2, global_batch_size=4)
        with caplog.at_level("INFO"):
            make_trainer(FSDP2Strategy(tp_size=2), max_steps=1).fit(CausalLM(config=CONFIG), data)
        return [line for line in caplog.messages if line.startswith("A step is ")]

    assert run_ranks(run, 2) == [
        [
            "A step is 4 samples (64 tokens): 1 data parallel rank(s) x batches of 2 x accumulate_grad_batches=2.",
        ],
        [],
    ]
