"""The token-mean loss in a plain torch loop: its gradient is that of the mean over all label tokens of a step."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.models import LLAMA, make_causal_lm, make_token_batches
from helpers.oracle import token_sum_loss, whole
from helpers.ranks import raises_on_all_ranks, run_ranks
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_fsdp2 import (
    FSDP2Config,
    FSDP2Manager,
    apply_token_mean_,
    create_device_mesh,
    defer_grad_sync,
    token_mean_loss,
)
from lightning_fsdp2.mesh import get_mesh
from lightning_fsdp2.parallel.loss.load_balance import LoadBalance
from lightning_fsdp2.parallel.loss.token_mean import add_load_balance

MICRO_BATCHES = 3


def train_step(use_mesh: bool) -> tuple[dict[str, Tensor], float, float]:
    torch.manual_seed(0)
    model = make_causal_lm(LLAMA)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = create_device_mesh()
    model = FSDP2Manager(FSDP2Config(mp_policy=MixedPrecisionPolicy()), mesh).parallelize(model)
    batches = make_token_batches(MICRO_BATCHES * 2)[rank::ranks]
    for batch in batches[:-1]:
        with defer_grad_sync(model):
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits
            token_mean_loss(model, logits, batch["labels"]).backward()
    logits = model(input_ids=batches[-1]["input_ids"], use_cache=False).logits
    shifted = F.pad(batches[-1]["labels"], (0, 1), value=-100)[:, 1:]
    token_mean_loss(model, logits, shifted, shift=False).backward()
    mean = apply_token_mean_(model, get_mesh(mesh, "dp_cp").get_group())
    assert apply_token_mean_(model, get_mesh(mesh, "dp_cp").get_group()) is None, "the window was not closed"
    return whole({name: p.grad for name, p in model.named_parameters()}), mean.loss.item(), mean.tokens.item()


@pytest.mark.guarantees("token-mean")
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradient_loss_and_count_over_ranks_and_micro_batches(ranks: int) -> None:
    torch.manual_seed(0)
    model = make_causal_lm(LLAMA)
    parts = [token_sum_loss(model, batch) for batch in make_token_batches(MICRO_BATCHES * 2)]
    tokens = sum(count for _, count in parts)
    loss = sum(part for part, _ in parts) / tokens
    expected = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, model.parameters()), strict=True))
    assert min(count for _, count in parts) == 0, "one micro-batch should have no label"
    for gradients, actual_loss, actual_tokens in run_ranks(train_step, ranks, True):
        assert actual_tokens == tokens
        assert actual_loss == pytest.approx(loss.item(), abs=1e-5)
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_a_window_without_any_label_is_an_error() -> None:
    def run() -> None:
        model = torch.nn.Linear(3, 5)
        labels = torch.full((2, 4), -100)
        token_mean_loss(model, model(torch.ones(2, 4, 3)), labels).backward()
        apply_token_mean_(model, dist.group.WORLD)

    with raises_on_all_ranks(RuntimeError, match="No label token in a whole optimizer step"):
        run_ranks(run, 2)


def test_an_auxiliary_loss_is_weighted_by_the_label_tokens_of_its_micro_batch() -> None:
    model = torch.nn.Linear(3, 5)
    model.router = torch.nn.Parameter(torch.tensor(2.0))
    for tokens, factor in ((1, 1.0), (3, 5.0)):
        labels = torch.tensor([[1] * tokens + [-100] * (4 - tokens)])
        auxiliary = model.router.double() * factor
        balance = LoadBalance(auxiliary, auxiliary.detach(), torch.tensor(tokens, dtype=torch.float64))
        loss = token_mean_loss(model, model(torch.ones(1, 4, 3)), labels, shift=False)
        (loss + add_load_balance(model, balance, 0.1)).backward()
    mean = apply_token_mean_(model)
    assert mean is not None
    assert mean.load_balance == 2.0 * (1 * 1 + 3 * 5) / 4
    assert model.router.grad.item() == pytest.approx(0.1 * (1 * 1 + 3 * 5) / 4)


def test_nothing_is_counted_without_gradients() -> None:
    model = torch.nn.Linear(3, 5)
    with torch.no_grad():
        token_mean_loss(model, model(torch.ones(2, 4, 3)), torch.ones(2, 4, dtype=torch.long))
    assert apply_token_mean_(model) is None
