"""Hooks on parameters and after backwards when a pipeline runs several backwards in place of one."""

from functools import partial
from typing import Any

import pytest
import torch
from helpers.mesh_runs import whole_of_stages
from helpers.models import make_causal_lm, make_token_batches
from helpers.pipelines import CONFIGS, LoggingModule
from helpers.ranks import RankError, run_ranks
from helpers.user_modules import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fsdp2 import FSDP2Config, FSDP2Strategy

ACCUMULATE, STEPS, LARGEST = 2, 2, 1e-3


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten()), 1


def halve(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


class Hooked(LoggingModule):
    """Has hooks that do not commute with adding up micro-batches, on parameters of every stage."""

    def __init__(self, config: str = "llama", pattern: str = "down_proj") -> None:
        torch.manual_seed(1)
        super().__init__(partial(make_causal_lm, CONFIGS[config]), compute_loss)
        self.pattern, self.calls = pattern, 0

    def on_train_start(self) -> None:
        for name, parameter in self.named_parameters():
            if self.pattern in name:
                parameter.register_hook(self.clamp)
            elif "o_proj" in name:
                parameter.register_post_accumulate_grad_hook(halve)

    def clamp(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient.clamp(-LARGEST, LARGEST)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Clips(Hooked):
    def on_train_start(self) -> None:
        pass

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad = parameter.grad.clamp(-LARGEST, LARGEST)


def train_by_hand(module: Any, batches: list[dict[str, Tensor]]) -> None:
    module.on_train_start()
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(batches):
        (module.loss(module.model, batch)[0] / ACCUMULATE).backward()
        module.on_after_backward()
        if index % ACCUMULATE == ACCUMULATE - 1:
            optimizer.step()
            optimizer.zero_grad()


def fit(module: Any, batches: list[dict[str, Tensor]], **flags: Any) -> Any:
    trainer = make_trainer(
        FSDP2Strategy(pp_size=2, config=FSDP2Config(**flags)), accumulate_grad_batches=ACCUMULATE, max_steps=STEPS
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_module", "flags"),
    [
        (Hooked, {}),
        (Hooked, {"pp_schedule": "interleaved_1f1b"}),
        (Hooked, {"defer_fsdp_grad_sync": False}),
        (Clips, {}),
    ],
)
def test_hooks_see_the_gradient_of_a_whole_batch(make_module: type[Hooked], flags: dict[str, Any]) -> None:
    batches = make_token_batches(ACCUMULATE * STEPS, size=4)
    expected = make_module()
    train_by_hand(expected, batches)

    def run() -> int:
        module = make_module()
        trainer = fit(module, batches, **flags)
        weights = whole_of_stages(dict(module.named_parameters()), trainer)
        torch.testing.assert_close(weights, dict(expected.named_parameters()), rtol=1e-5, atol=1e-5)
        return module.calls

    assert sum(run_ranks(run, 2)) == expected.calls


@pytest.mark.slow
def test_a_hook_on_a_tied_embedding_is_refused() -> None:
    batches = make_token_batches(ACCUMULATE * STEPS, size=4)
    with pytest.raises(RankError, match="a hook was registered on a parameter that several stages share"):
        run_ranks(lambda: fit(Hooked("qwen3", "embed_tokens"), batches), 2)
