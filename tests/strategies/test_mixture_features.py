"""What users do with a mixture apart from training, with experts distributed over ranks."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.families import make_family_config, make_family_model
from helpers.models import make_token_batches
from helpers.oracle import whole
from helpers.ranks import run_ranks
from helpers.user_modules import make_trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fsdp2 import CausalLM, FSDP2Strategy
from lightning_fsdp2.callbacks import ExponentialMovingAverage
from lightning_fsdp2.callbacks.model_flops import get_flops_per_token
from lightning_fsdp2.parallelizer import unshard_fsdp2_model


def make_module(family: str = "qwen3_moe") -> CausalLM:
    torch.manual_seed(0)
    module = CausalLM(config=make_family_config(family).to_dict())
    module.model = make_family_model(family)
    module.hf_config = module.model.config
    return module


def make_loader(count: int = 4) -> DataLoader:
    return DataLoader(make_token_batches(count, ragged=False), batch_size=None)


def fit(module: CausalLM, *, callbacks: Any = (), max_steps: int = 1, **sizes: int) -> Any:
    trainer = make_trainer(
        FSDP2Strategy(timeout=timedelta(seconds=3), **sizes), callbacks=[*callbacks], max_steps=max_steps
    )
    trainer.fit(module, make_loader())
    return trainer


def copy_to_one_process(module: CausalLM) -> Any:
    model: Any = make_family_model("qwen3_moe")
    model.load_state_dict(whole(module.model.state_dict()))
    return model.eval()


def generate(model: Any, prompt: Tensor, length: int, **options: Any) -> list[int]:
    tokens = model.generate(
        prompt, max_new_tokens=length, do_sample=False, pad_token_id=0, eos_token_id=None, **options
    )
    return tokens[0].tolist()


@pytest.mark.guarantees("generation-of-mixtures")
@pytest.mark.parametrize("is_gathered", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ranks_generate_from_different_prompts(is_gathered: bool) -> None:
    def run() -> None:
        module = make_module()
        fit(module, ep_size=2)
        expected = copy_to_one_process(module)
        module.eval()
        rank = dist.get_rank()
        prompt = torch.arange(3, 8 + rank)[None]
        with torch.no_grad(), unshard_fsdp2_model(module if is_gathered else torch.nn.Identity()):
            actual = generate(module.model, prompt, 3 + 4 * rank, synced_gpus=True)
        assert actual == generate(expected, prompt, 3 + 4 * rank)

    run_ranks(run, 2)


def test_a_call_on_one_rank_is_an_error_even_if_weights_are_gathered() -> None:
    def run() -> None:
        module = make_module()
        trainer = fit(module, ep_size=2)
        with torch.no_grad(), unshard_fsdp2_model(module):
            if trainer.is_global_zero:
                with pytest.raises(RuntimeError, match=r"Rank 0 wants to call .*Call it on all ranks\.$"):
                    module(torch.arange(3, 11)[None])

    run_ranks(run, 2)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"ep_size": 2}, {"ep_size": 4, "tp_size": 2}], ids=str)
def test_averages_of_experts_are_those_of_one_process(sizes: dict[str, int]) -> None:
    def run() -> None:
        module, average = make_module(), ExponentialMovingAverage(0.5)
        before = whole(module.model.state_dict())
        fit(module, callbacks=[average], **sizes)
        after = whole(dict(module.model.named_parameters()))
        decay = min(0.5, 2 / 11)
        for name, averaged in whole(average.averages).items():
            name = name.removeprefix("model.")
            torch.testing.assert_close(averaged, decay * before[name] + (1 - decay) * after[name])

    run_ranks(run, 4)


@pytest.mark.slow
def test_frozen_experts_keep_their_weights_and_the_rest_trains_as_in_one_process() -> None:
    def run() -> None:
        modules = {}
        for ep_size in (1, 2):
            module = modules[ep_size] = make_module()
            for name, parameter in module.model.named_parameters():
                parameter.requires_grad_(".experts." not in name)
            before = {name: p.clone() for name, p in module.model.named_parameters()}
            fit(module, ep_size=ep_size, max_steps=2)
            after = whole(dict(module.model.named_parameters()))
            assert all(torch.equal(after[name], before[name]) == (".experts." in name) for name in after)
            modules[ep_size] = after
        for name, weight in modules[1].items():
            torch.testing.assert_close(modules[2][name], weight, msg=name)

    run_ranks(run, 2)


@pytest.mark.slow
def test_ragged_data_is_validated_and_predicted_as_in_one_process() -> None:
    def run() -> None:
        module = make_module()
        trainer = fit(module, ep_size=2)
        model = copy_to_one_process(module)
        batches = make_token_batches(5, ragged=True)  # an odd number: one rank has a batch more
        (metrics,) = trainer.validate(module, DataLoader(batches, batch_size=None))
        total = count = 0.0
        for batch in batches:
            labels = batch["labels"][:, 1:]
            with torch.no_grad():
                logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
            losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")
            total, count = total + losses.item(), count + (labels != -100).sum().item()
        assert metrics["val/loss"] == pytest.approx(total / count, rel=1e-5)
        predictions = trainer.predict(module, DataLoader(batches, batch_size=None))
        found = torch.cat([prediction["log_probability"] for prediction in predictions]).sum()
        assert found.item() == pytest.approx(-total, rel=1e-5)

    run_ranks(run, 2)


def test_the_operations_of_a_token_are_those_of_one_process() -> None:
    expected = get_flops_per_token(make_module(), 16)

    def run() -> float:
        module = make_module()
        fit(module, ep_size=2)
        return get_flops_per_token(module, 16)

    assert run_ranks(run, 2) == [expected] * 2


def test_a_checkpoint_with_another_number_of_experts_is_an_error_on_every_rank(tmp_path: Path) -> None:
    def run() -> None:
        module = make_module()
        fit(module, ep_size=2).save_checkpoint(tmp_path / "run.ckpt")
        config = make_family_config("qwen3_moe")
        config.num_experts = 8
        other = CausalLM(config=config.to_dict())
        trainer = make_trainer(FSDP2Strategy(ep_size=2))
        with pytest.raises(ValueError, match=r"does not fit this CausalLM(.|\n)*experts.gate_up_proj.*\[4, .*\[8, "):
            trainer.fit(other, make_loader(), ckpt_path=tmp_path / "run.ckpt")

    run_ranks(run, 2)
