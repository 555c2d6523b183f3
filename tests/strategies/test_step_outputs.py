"""What the last stage of a pipeline tells the others, without a Trainer: both stages log and return the same."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import raises_on_all_ranks, run_ranks
from torch import Tensor, nn
from torchmetrics import SumMetric

from lightning_fsdp2 import token_mean_loss
from lightning_fsdp2.parallel.loss.token_mean import find_token_windows
from lightning_fsdp2.strategies.step_outputs import StepOutputs


class Logs(nn.Module):
    """A stand-in for a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 5)
        self.metric = SumMetric()
        self.trainer = SimpleNamespace(should_stop=False)
        self.logged: dict[str, Any] = {}

    def log(self, name: str, value: Tensor, **options: Any) -> None:
        self.logged[name] = (value.item(), options)


def make() -> tuple[StepOutputs, Any]:
    group = cast(Any, dist.group.WORLD)
    return StepOutputs(group, group, group.size() - 1, torch.device("cpu")), Logs()


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def run_batch(outputs: StepOutputs, module: Any, *losses: float, is_mapping: bool = False, **options: Any) -> Any:
    """Log the losses of micro-batches, which the last stage returns, and share them."""
    with outputs.record(module, is_last):
        for value in losses:
            module.log("loss", value, **options)
            if is_last():
                loss = torch.tensor(value, requires_grad=True)
                outputs.add_loss(outputs.take_loss({"loss": loss} if is_mapping else loss))
    return outputs.share(module)


def test_all_stages_get_the_loss_of_the_batch_in_the_form_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    broadcast, sent = dist.broadcast_object_list, []

    def look(objects: list[Any], **options: Any) -> None:
        sent.append(objects[0])
        broadcast(objects, **options)

    monkeypatch.setattr(dist, "broadcast_object_list", look)

    def run() -> None:
        outputs, module = make()
        for _ in range(2):
            loss = run_batch(outputs, module, 1.0, 2.0, 6.0)
            assert (loss.item(), loss.requires_grad, loss.dtype) == (9.0, True, torch.float32)
        assert len(sent) == 1, "what the numbers mean is sent once"
        assert run_batch(outputs, module, 1.0, is_mapping=True)["loss"].item() == 1.0
        assert len(sent) == 2
        assert not module.trainer.should_stop
        module.trainer.should_stop = is_last()
        run_batch(outputs, module, 1.0)
        assert module.trainer.should_stop

    run_ranks(run, 2)


def test_values_of_micro_batches_are_logged_as_those_of_one_batch() -> None:
    reductions = {"mean": 3.0, "sum": 9.0, "max": 6.0, "min": 1.0, torch.max: 6.0, torch.min: 1.0, torch.prod: 12.0}

    def run() -> None:
        outputs, module = make()
        for reduction, expected in reductions.items():
            options = {"reduce_fx": reduction, "prog_bar": True}
            run_batch(outputs, module, 1.0, 2.0, 6.0, **options)
            assert module.logged == {"loss": (expected, options)}
        run_batch(outputs, module, 1.0, 2.0, batch_size=4)
        assert module.logged == {"loss": (1.5, {"batch_size": 8})}
        assert "log" not in vars(module)
        own = module.__dict__["log"] = lambda *args, **options: None
        run_batch(outputs, module, 1.0)
        assert module.__dict__["log"] is own

    run_ranks(run, 2)


def test_all_stages_know_the_tokens_that_the_last_one_has_counted() -> None:
    def run() -> list[float | None]:
        outputs, module = make()
        with outputs.record(module, is_last):
            module.log("first", 7.0)
            if is_last():
                # uniform logits: each of 3 tokens costs log(5)
                loss = token_mean_loss(module.head, torch.zeros(1, 4, 5, requires_grad=True), torch.ones(1, 4).long())
                outputs.add_loss(outputs.take_loss(loss))
        outputs.share(module)
        assert module.logged == {"first": (7.0, {})}
        (window,) = find_token_windows(module).values()
        return [window.loss_sum.item(), window.tokens.item(), window.load_balance]

    for loss_sum, tokens, balance in run_ranks(run, 2):
        assert loss_sum == pytest.approx(3 * torch.log(torch.tensor(5.0)).item())
        assert (tokens, balance) == (3, None)


@pytest.mark.parametrize("updates_all", [True, False])
def test_a_metric_that_only_the_last_stage_updates_is_refused(updates_all: bool) -> None:
    def run() -> None:
        outputs, module = make()
        with outputs.record(module, is_last):
            if updates_all or is_last():
                module.metric.update(1)
            if is_last():
                outputs.add_loss(outputs.take_loss(torch.ones((), requires_grad=True)))
        outputs.share(module)

    error = raises_on_all_ranks(ValueError, match=r"pp_size=2: `training_step` updates the metric 'metric' after the")
    with nullcontext() if updates_all else error:
        run_ranks(run, 2)


def test_what_cannot_be_shared_is_refused_by_name() -> None:
    def run() -> None:
        outputs, module = make()
        for output in (None, {}, 1.0, torch.ones(())):
            with pytest.raises(
                ValueError, match=r"pp_size=1: `training_step` returned .* as the loss of a micro-batch"
            ):
                outputs.take_loss(output)
        for value, message in ((SumMetric(), "gets a SumMetric"), (torch.ones(2), r"a tensor of the shape \(2,\)")):
            with outputs.record(module, is_last), pytest.raises(ValueError, match=rf"log\('it', \.\.\.\).*{message}"):
                module.log("it", value)
        with pytest.raises(ValueError, match=r"log\('loss', \.\.\., reduce_fx=.* cannot be sent .* such as 'sum'"):
            run_batch(outputs, module, 1.0, reduce_fx=lambda values: values.sum())

    run_ranks(run, 1)
