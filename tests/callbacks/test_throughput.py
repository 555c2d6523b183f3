"""Tokens per second and MFU, with a clock that goes by steps and operations as torch counts them."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from helpers.float8 import WIDE_LLAMA
from helpers.models import GPT2, LLAMA, make_causal_lm, make_token_batches
from helpers.ranks import run_ranks
from helpers.recorder import Recorder, catch_messages
from helpers.strategies import STRATEGIES, Kind
from helpers.user_modules import Regressor, make_batches, make_language_model, make_loader, make_trainer
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from lightning_fsdp2 import CausalLM, DDPStrategy, Float8Config, FSDP2Strategy
from lightning_fsdp2.callbacks import Throughput, throughput
from lightning_fsdp2.callbacks.model_flops import (
    get_flops_per_token,
    get_peak_flops,
    get_peak_flops_of,
    get_peak_flops_of_model,
)
from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.layers.float8 import apply_float8, choose_float8


class Clock:
    """Ten seconds between any two looks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        self.seconds += 10.0
        return self.seconds


@pytest.mark.guarantees("measuring-callbacks")
@pytest.mark.parametrize(
    "sizes",
    [pytest.param({}, marks=pytest.mark.slow), {"tp_size": 2}, pytest.param({"cp_size": 2}, marks=pytest.mark.slow)],
    ids=["dp2", "tp2", "cp2"],
)
def test_tokens_are_counted_once_for_the_ranks_that_share_them(sizes: dict[str, int]) -> None:
    batches = [{"input_ids": torch.arange(3, 3 + 24).view(2, 12)} for _ in range(16)]
    batches = [{**batch, "labels": batch["input_ids"]} for batch in batches]

    def run() -> dict[int, dict[str, float]]:
        recorder = Recorder()
        trainer = make_trainer(
            FSDP2Strategy(**sizes),
            logger=recorder,
            callbacks=[Throughput(flops_per_token=100.0, peak_flops=1000.0)],
            max_steps=4,
            accumulate_grad_batches=2,
            log_every_n_steps=2,
        )
        with patch.object(throughput, "time", Clock()):
            trainer.fit(make_language_model(), DataLoader(batches, batch_size=None))
        return recorder.rows

    readers = 1 if sizes else 2
    for rows in run_ranks(run, 2):
        assert list(rows) == [1, 3]
        for number, row in enumerate(rows.values(), 1):
            tokens = 2 * 2 * 24 * readers  # steps, micro-batches
            # two looks per fetch, one at the end: of 90 seconds
            seconds = row["throughput/step_seconds"] * 2
            assert row["train/total_tokens"] == number * tokens
            assert row["throughput/tokens_per_second"] == pytest.approx(tokens / seconds)
            assert row["throughput/tokens_per_second_per_device"] == pytest.approx(tokens / seconds / 2)
            assert row["throughput/mfu"] == pytest.approx(tokens / seconds / 2 * 100 / 1000)
            assert row["throughput/tflops_per_device"] == pytest.approx(tokens / seconds / 2 * 100 / 1e12)
        assert seconds == 90
        assert row["throughput/data_share"] == pytest.approx(40 / 90)


def test_tokens_go_on_counting_where_the_run_is_resumed_and_validation_is_not_timed(tmp_path: Path) -> None:
    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 3:  # between two steps that log
                trainer.save_checkpoint(tmp_path / "first.ckpt")

    def run() -> tuple[dict[str, float], dict[str, float], list[str]]:
        rows: list[dict[str, float]] = []
        for steps, path in ((3, None), (4, tmp_path / "first.ckpt")):
            recorder = Recorder()
            trainer = make_trainer(
                DDPStrategy(),
                logger=recorder,
                callbacks=[Throughput(), Saves()],
                max_steps=steps,
                log_every_n_steps=2,
                val_check_interval=1,
                limit_val_batches=0 if path else 1,
                num_sanity_val_steps=0,
            )
            batches = [{"input_ids": torch.ones(2, 8, dtype=torch.long), **batch} for batch in make_batches(8)]
            with patch.object(throughput, "time", Clock()), catch_messages() as messages:
                trainer.fit(Regressor(), make_loader(batches), make_loader(batches), ckpt_path=path)
            rows.append(recorder.rows[1 if path is None else 3])
        return rows[0], rows[1], messages

    (first, second, messages), _ = run_ranks(run, 2)
    assert first["train/total_tokens"] == 2 * 2 * 16
    # of the seven looks at the clock two are for each fetch and two for the validation between the steps
    assert first["throughput/step_seconds"] == (70 - 10) / 2
    assert second["train/total_tokens"] == 2 * first["train/total_tokens"]
    assert "throughput/mfu" not in second
    assert sum("no MFU, because Regressor holds 0 Hugging Face models" in message for message in messages) == 1


MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "head_dim": {**LLAMA, "head_dim": 24},
    "gpt2": GPT2,
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.guarantees("measuring-callbacks")
@pytest.mark.parametrize(
    "config",
    [pytest.param(config, marks=() if name == "mixtral" else pytest.mark.slow) for name, config in MODELS.items()],
    ids=MODELS,
)
def test_operations_per_token_are_those_that_torch_counts(config: dict[str, Any]) -> None:
    def run() -> tuple[float, float]:
        model: Any = make_causal_lm(config)
        model.set_attn_implementation("eager")
        if "num_local_experts" in config:
            model.set_experts_implementation("eager")  # torch does not count grouped products
        tokens = torch.arange(3, 3 + 64).view(2, 32)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=tokens, use_cache=False).logits.sum().backward()
        return get_flops_per_token(model, 32), counter.get_total_flops() / 64

    ((expected, counted),) = run_ranks(run, 1)
    # beside the products counted here, transformers multiplies positions with rotary frequencies
    assert expected == pytest.approx(counted, rel=2e-3)


@pytest.mark.guarantees("measuring-callbacks")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if name == "fsdp2" else pytest.mark.slow) for name, kind in STRATEGIES.items()],
    ids=STRATEGIES,
)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_operations_of_a_sharded_model_are_those_of_the_whole(kind: Kind, tied: bool) -> None:
    config = {**LLAMA, "tie_word_embeddings": tied}

    def run() -> tuple[float, float]:
        callback = Throughput()
        trainer = kind.make_trainer(callbacks=[callback], max_steps=1, log_every_n_steps=1)
        trainer.fit(CausalLM(config=config), make_loader(make_token_batches(2, length=32)))
        rate = callback.latest["throughput/tokens_per_second_per_device"]
        return callback.latest["throughput/tflops_per_device"] * 1e12 / rate, get_flops_per_token(
            make_causal_lm(config), 32
        )

    for operations, expected in kind.run(run, 2):
        assert operations == pytest.approx(expected, rel=1e-9)


def test_frozen_weights_cost_two_thirds_and_windows_end_attention() -> None:
    def run() -> list[float]:
        model: Any = make_causal_lm({**LLAMA, "model_type": "mistral", "sliding_window": 8})
        whole = get_flops_per_token(model, 32)
        model.requires_grad_(False)
        frozen = get_flops_per_token(model, 32)
        products = 3 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64) + 101 * 32
        return [whole - frozen - 2 * products, frozen - 4 * products]

    ((frozen, attention),) = run_ranks(run, 1)
    assert frozen == 0
    assert attention == 12 * 3 * 32 * 8


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("NVIDIA GB200", (2500, 1250, 80)),
        ("NVIDIA B200", (2250, 1125, 75)),
        ("NVIDIA H100 80GB HBM3", (989.4, 494.7, 66.9)),
        ("NVIDIA H100 PCIe", (756, 378, 51.2)),
        ("NVIDIA H100 NVL", (835.5, 417.7, 60)),
        ("NVIDIA H200", (989.4, 494.7, 66.9)),
        ("NVIDIA H200 NVL", (835.5, 417.7, 60)),
        ("NVIDIA GH200 480GB", (989.4, 494.7, 66.9)),
        ("NVIDIA A100-SXM4-80GB", (312, 156, 19.5)),
        ("NVIDIA A100 80GB PCIe", (312, 156, 19.5)),
        ("NVIDIA A10", (125, 62.5, 31.2)),
        ("NVIDIA L4", (121, 60, 30.3)),
        ("NVIDIA L40", (181, 90.5, 90.5)),
        ("NVIDIA L40S", (362, 183, 91.6)),
        ("NVIDIA RTX A6000", (154.8, 77.4, 38.7)),
        ("NVIDIA RTX 6000 Ada Generation", (364.2, 182.1, 91.1)),
        ("NVIDIA GeForce RTX 4090", (165.2, 82.6, 82.6)),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA RTX 4000 Ada Generation", None),
    ],
)
def test_peaks_without_sparsity(name: str, peaks: tuple[float, float, float] | None) -> None:
    def read(dtype: torch.dtype, precision: str) -> float | None:
        with (
            patch.object(torch.cuda, "get_device_name", lambda device: name),
            patch.object(torch, "get_float32_matmul_precision", lambda: precision),
        ):
            try:
                return get_peak_flops(torch.device("cuda"), dtype)
            except ValueError:
                return None

    assert read(torch.float64, "high") is None
    found = [read(torch.bfloat16, "highest"), read(torch.float32, "high"), read(torch.float32, "highest")]
    assert found == ([None] * 3 if peaks is None else pytest.approx([peak * 1e12 for peak in peaks]))


def test_the_peak_of_a_model_in_float8_lies_between_those_of_its_dtypes() -> None:
    """All products take as long together as each at the peak for its dtype."""
    get_peak = partial(get_peak_flops_of, "NVIDIA H100 80GB HBM3")
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)

    def run(recipe: Any, emulate: bool, trained: bool) -> float:
        model = make_causal_lm(WIDE_LLAMA).requires_grad_(trained)
        structure, config = find_structure(model), Float8Config(recipe=recipe, emulate=emulate)
        apply_float8(structure, choose_float8(structure, config, torch.device("cpu"), {}))
        return get_peak_flops_of_model(model, 10 * matrices, torch.bfloat16, get_peak)

    def peak(*arguments: Any) -> float:
        return run_ranks(run, 1, *arguments)[0] / 989.4e12

    # of 10 operations, 2 for each product in float8 take half the time
    assert peak("rowwise_with_gw_hp", False, True) == pytest.approx(10 / (6 + 4 / 2))
    assert peak("rowwise", False, True) == pytest.approx(10 / (4 + 6 / 2))
    assert peak("rowwise", False, False) == pytest.approx(10 / (6 + 4 / 2))
    assert peak("rowwise", True, True) == 1


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 3090"])
def test_devices_without_units_for_float8_have_no_peak_for_it(name: str) -> None:
    assert get_peak_flops_of(name, torch.bfloat16) > 0
    with pytest.raises(ValueError, match=f"the peak speed of '{name}' in float8_e4m3fn is not known"):
        get_peak_flops_of(name, torch.float8_e4m3fn)


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(ValueError, match="the peak speed of 'cpu' in float32 is not known"):
        get_peak_flops(torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="Linear holds 0 Hugging Face models, not one"):
        get_flops_per_token(nn.Linear(2, 2), 8)
    with pytest.raises(ValueError, match=r"Throughput\(peak_flops=0\) must be positive"):
        Throughput(peak_flops=0)
