"""Preparation of data loaders for several ranks, and a check that the ranks of a replica read the same batches."""

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState
from torch.utils.data import DataLoader

from lightning_fsdp2.compat.lightning import set_sampler_epoch
from lightning_fsdp2.compat.lightning_loops import replace_evaluation_sampler, surround_data_hooks
from lightning_fsdp2.ranks.own_random import shared_random_numbers
from lightning_fsdp2.ranks.same_batches import get_batch_fingerprint
from lightning_fsdp2.strategies.launch.remedies import is_raised_in
from lightning_fsdp2.strategies.parts.dataloading import (
    build_evaluation_sampler,
    draw_order_from_shared_numbers,
    fill_up,
    get_optional_evaluation_sampler,
    keep_in_step,
)
from lightning_fsdp2.strategies.parts.world import World


class Batches:
    """Helper that prepares the data loaders of a stage for the ranks of ``world``, and checks their first batches."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._checked: set[tuple[str, int]] = set()

    def begin_stage(self, trainer: Any) -> None:
        """Start a stage of ``trainer``, in which the first batch of each data loader is checked again."""
        self._checked.clear()
        replace_evaluation_sampler(trainer, build_evaluation_sampler)
        if trainer.state.fn == TrainerFn.FITTING and self._world.has_own_random_numbers:
            surround_data_hooks(trainer, shared_random_numbers)

    def prepare(self, loader: Any, state: TrainerState, *, resumed_epoch: int) -> Any:
        """Prepare the user's data loader: set its seeds and its sampler's epoch, and make it equally long on all ranks.

        Args:
            loader: Data loader, of any kind that Lightning accepts.
            state: State of the Trainer, which says what the loader is for.
            resumed_epoch: Epoch in which the run resumes. 0 leaves the sampler as it is.
        """
        has_own_numbers = state.stage == RunningStage.TRAINING and self._world.has_own_random_numbers
        if isinstance(loader, DataLoader) and loader.generator is None:
            # Each new iterator draws a random seed, and a resumed run creates fewer iterators than an uninterrupted
            # run. If the seeds came from the global generator, which dropout also uses, dropout would differ after
            # resuming.
            own_seed = self._world.data_parallel_rank if has_own_numbers else 0
            loader.generator = torch.Generator().manual_seed(torch.initial_seed() + own_seed)
        seeds_workers = has_own_numbers or int(os.environ.get("PL_SEED_WORKERS", "0"))
        if getattr(loader, "worker_init_fn", "none") is None and seeds_workers:
            # Lightning would seed workers by global rank, so the ranks of one replica would augment data differently
            loader.worker_init_fn = partial(pl_worker_init_function, rank=self._world.data_parallel_rank)
        if resumed_epoch:
            set_sampler_epoch(loader, resumed_epoch)
        if has_own_numbers:
            draw_order_from_shared_numbers(loader)
        if get_optional_evaluation_sampler(loader) is not None:
            return fill_up(loader, self._world.control_group)
        may_drop = state.fn != TrainerFn.PREDICTING
        return keep_in_step(loader, self._world.control_group, may_drop=may_drop)

    def check_same(self, batch: Any, stage: str, dataloader_idx: int) -> None:
        """Check that the ranks of each replica read the same first batch from each data loader.

        Raises:
            ValueError: On every rank, when the batches of a replica differ.
        """
        world = self._world
        if world.replica_group.size() == 1 or (stage, dataloader_idx) in self._checked:
            return
        self._checked.add((stage, dataloader_idx))
        # compare over all ranks, not only in this rank's replica, so that every rank raises the error
        fingerprints = [(0, "")] * world.size
        own = (world.data_parallel_rank, get_batch_fingerprint(batch))
        dist.all_gather_object(fingerprints, own, group=world.control_group)
        if len(set(fingerprints)) > world.data_parallel_size:
            raise ValueError(
                f"The ranks of one model replica read different first batches from {stage}_dataloader {dataloader_idx},"
                " but must read the same batches. Shard the data by `trainer.strategy.data_parallel_rank` and"
                " `data_parallel_size`, not by the global rank, and use the same seed for shuffling on all ranks."
            )

    def end_without_samples(self, exception: BaseException) -> None:
        """Make all ranks fail if ``exception`` says that this rank has no samples to predict on.

        Lightning's sampler fails only on ranks without samples. The other ranks would wait forever in
        :func:`keep_in_step`.
        """
        if isinstance(exception, AssertionError) and is_raised_in(
            UnrepeatedDistributedSampler.__init__.__code__, exception
        ):
            keep_in_step((), self._world.control_group, may_drop=False)
