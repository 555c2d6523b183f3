"""Steps of an evaluation without a Trainer."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import nn

from lightning_fsdp2.strategies.parts.evaluation import Evaluation
from lightning_fsdp2.strategies.parts.step_region import StepRegion
from lightning_fsdp2.strategies.parts.world import World


def make_evaluation(log: list[str]) -> Evaluation:
    world = World(timeout=timedelta(seconds=60), rendezvous_timeout=timedelta(seconds=60))
    world.control_group = dist.group.WORLD
    return Evaluation(world, lambda: log.append("released"))


def test_a_step_leaves_inference_mode_and_releases_what_it_gathered() -> None:
    def run() -> tuple[bool, bool, list[str]]:
        log: list[str] = []
        with torch.inference_mode():
            result = make_evaluation(log).run(
                StepRegion(timedelta(seconds=1)),
                nn.Linear(1, 1),
                lambda: (torch.is_inference_mode_enabled(), torch.is_grad_enabled()),
            )
        return (*result, log)

    assert run_ranks(run, 1) == [(False, False, ["released"])]


@pytest.mark.guarantees("predictions")
def test_ranks_with_fewer_batches_run_along_to_the_end_of_each_loader() -> None:
    batches = ([2, 1], [3, 4])
    """Batches of both ranks in each of two data loaders."""

    def run() -> tuple[list[int], int]:
        steps, evaluation, region = [0], make_evaluation([]), StepRegion(timedelta(seconds=1))

        def step() -> int:
            steps[0] += 1
            return steps[0]

        own = batches[dist.get_rank()]
        evaluation.begin_predictions(own)
        return [evaluation.run_prediction(region, nn.Linear(1, 1), step) for _ in range(sum(own))], steps[0]

    # the first rank repeats the last step of the first loader once, and that of the second loader three times
    assert run_ranks(run, 2) == [([1, 2, 4], 7), ([1, 2, 3, 4, 5, 6, 7], 7)]
