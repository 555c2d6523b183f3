"""Saving and restoring of states that differ between the ranks of a run, such as random states and data positions."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fsdp2.compat.lightning import (
    begin_epoch_after_complete_one,
    count_logged_steps,
    get_loader_states,
    get_loaders,
    is_epoch_cut_short,
    prepare_resume,
    reopen_epoch,
    restore_loader_states,
    set_logged_step,
)
from lightning_fsdp2.compat.lightning_slurm import resume_array_task
from lightning_fsdp2.strategies.parts.tracking import Tracking
from lightning_fsdp2.strategies.parts.world import World

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_KEY = "lightning_fsdp2"
"""Key of the per-rank states in Lightning's checkpoint dict."""


class Resumption:
    """Helper that saves and restores random states, data loader positions and token counts.

    Args:
        world: The ranks of the run.
        tracking: Counter of the tokens.

    Attributes:
        epoch: Epoch in which the run resumes. 0 if the run does not resume, or if training has already started.
        micro_batches: With a pipeline, the largest number of rows of a batch so far, its number of micro-batches, and
            the settings from which the number follows.
    """

    def __init__(self, world: World, tracking: Tracking) -> None:
        self._world = world
        self._tracking = tracking
        self._random_states: tuple[dict[str, Any], dict[str, Any] | None] | None = None
        self._repeats_epoch = False
        self._logged_steps: int | None = None
        self._last_loader_states: Sequence[Any] = ()
        self.epoch = 0
        self.micro_batches: tuple[int, int, Any] = (0, 0, None)

    # ------------------------------------------------------------------ into a checkpoint

    def forget_loader_states(self) -> None:
        """Forget the data loader positions of an earlier fit."""
        self._last_loader_states = ()

    def keep_loader_states(self, trainer: "Trainer") -> None:
        """Remember the data loader positions at the end of a fit, because a checkpoint may be saved later."""
        self._last_loader_states = get_loader_states(trainer)

    def add_to(self, checkpoint: dict[str, Any], trainer: "Trainer", device: torch.device) -> dict[str, Any]:
        """Return ``checkpoint`` with the states of all ranks added. Every rank must call this.

        If the fit ended in the middle of an epoch, the fit loop's progress in ``checkpoint`` is changed in place, so
        that a resumed run continues the epoch.
        """
        if "loops" in checkpoint and is_epoch_cut_short(trainer):
            reopen_epoch(checkpoint["loops"]["fit_loop"])
            if self._last_loader_states:
                _set_loader_states(checkpoint, self._last_loader_states)
        return {**checkpoint, _KEY: self.gather(checkpoint, trainer, device)}

    def gather(self, checkpoint: dict[str, Any], trainer: "Trainer", device: torch.device) -> dict[str, Any]:
        """Gather the random states, data loader positions and token counts of all ranks."""
        world = self._world
        random_state, shared_random_state = world.random_numbers.get_states(device)
        own = (world.data_parallel_rank, random_state, _get_loader_states(checkpoint))
        everyone = [own] * world.size
        dist.all_gather_object(everyone, own, group=world.control_group)
        return {
            "mesh": world.axis_sizes,
            # the state of the first rank of each replica, because the ranks of a replica must have the same state
            "random_states": {rank: state for rank, state, _ in reversed(everyone)},
            "shared_random_state": shared_random_state,
            "loader_states": {rank: loaders for rank, _, loaders in everyone if loaders},
            "has_global_positions": _has_global_positions(trainer),
            "tracking": self._tracking.get_state(trainer),
            "micro_batches": self.micro_batches,
        }

    # ------------------------------------------------------------------ out of a checkpoint

    def begin_stage(self, trainer: "Trainer") -> None:
        """Start a stage of the Trainer, and forget states from earlier checkpoints."""
        resume_array_task(trainer)
        self.epoch = 0
        self.micro_batches = (0, 0, None)
        self._random_states = None
        self._logged_steps = None
        self._repeats_epoch = False

    def take_from(self, checkpoint: dict[str, Any], trainer: "Trainer", *, is_fit: bool) -> None:
        """Remove the states of all ranks from ``checkpoint``. In a fit, keep this rank's states for :meth:`resume`."""
        states = checkpoint.pop(_KEY, None)
        if not is_fit:
            return
        if states is not None:
            self._take(checkpoint, states)
        if "loops" in checkpoint:
            self._logged_steps = count_logged_steps(checkpoint["loops"]["fit_loop"], trainer)
            self.epoch = prepare_resume(checkpoint["loops"]["fit_loop"], trainer)

    def _take(self, checkpoint: dict[str, Any], states: dict[str, Any]) -> None:
        world = self._world
        if "tracking" in states:  # older checkpoints do not have this key
            self._tracking.set_state(states["tracking"])
        self.micro_batches = states.get("micro_batches", (0, 0, None))
        random_states, loader_states, mesh = states["random_states"], states["loader_states"], states.get("mesh")
        shared = states.get("shared_random_state")
        changed, lost = [], []
        if len(random_states) == world.data_parallel_size and (shared is not None) == world.has_own_random_numbers:
            self._random_states = random_states[world.data_parallel_rank], shared
        else:
            kind = (
                "the same random state on all" if shared is None and len(random_states) > 1 else "the random states of"
            )
            changed.append(f"{kind} {len(random_states)} data parallel ranks (mesh {mesh or 'unknown'})")
            lost.append("random numbers (dropout)")
        if len(loader_states) == world.data_parallel_size:
            _set_loader_states(checkpoint, loader_states[world.data_parallel_rank])
        elif loader_states and states.get("has_global_positions"):
            _set_loader_states(checkpoint, loader_states[0])
        elif loader_states:
            _set_loader_states(checkpoint, [])
            self._repeats_epoch = True
            changed.append(f"the data loader positions of {len(loader_states)} data parallel ranks")
            lost.append("the data of the current epoch")
        if changed:
            rank_zero_warn(
                f"The checkpoint holds {' and '.join(changed)}, which cannot be mapped to this run's"
                f" {world.size} ranks (mesh {world.axis_sizes}, {world.data_parallel_size} data parallel ranks);"
                f" they are dropped: {' and '.join(lost)} start over."
            )

    def resume(self, trainer: "Trainer", device: torch.device) -> None:
        """Begin the random numbers of the training, and restore the states that a fit resumes with.

        Call this after the iterators of the data loaders have drawn seeds, since drawing can change the random state.
        """
        begin_epoch_after_complete_one(trainer)
        self.epoch = 0
        self._restore_loader_positions(trainer)
        self._world.begin_random_numbers(device)
        if self._random_states is not None:
            self._world.random_numbers.set_states(*self._random_states, device)
            self._random_states = None

    def begin_batch(self, trainer: "Trainer") -> None:
        """Let a resumed run go on with the steps that loggers see. Call this before each batch.

        Lightning may count the last step of the earlier run twice: once more in an iteration without a batch, if the
        checkpoint was saved after a step with a validation.
        """
        if self._logged_steps is not None and trainer.training:
            set_logged_step(trainer, self._logged_steps)
            self._logged_steps = None

    def _restore_loader_positions(self, trainer: "Trainer") -> None:
        """Set Lightning's batch counts to the position of the restored data loaders.

        Lightning restores the counts of the earlier run, whose batch size or number of ranks may be different. The
        count over all epochs becomes about what it would be if the run had always had this batch size and these ranks.
        """
        restore_loader_states(trainer)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        counts = [getattr(loader, "get_optional_restored_batches", lambda: None)() for loader in get_loaders(trainer)]
        if self._repeats_epoch:
            self._repeats_epoch = False
            # If the saved epoch had finished its last batch, let Lightning end the epoch. Otherwise, repeat the epoch
            # from its first batch.
            counts = [] if progress.is_last_batch else [0]
        for count in counts:
            if count is not None and count != progress.current.ready:
                ready, shift = progress.current.ready, count - progress.current.ready
                # scale the batches of earlier epochs, too, but not if this epoch is repeated from its first batch
                of_all = round(progress.total.ready * shift / ready) if count and ready else shift
                progress.total, progress.current = _shift(progress.total, of_all), _shift(progress.current, shift)


def _shift(counts: Any, batches: int) -> Any:
    """Return Lightning's counts of batches that are ready, started, processed and completed, with ``batches`` added."""
    return type(counts)(**{name: count + batches for name, count in asdict(counts).items()})


def _has_global_positions(trainer: "Trainer") -> bool:
    """Return whether all data loaders report that their saved positions count the samples of all ranks.

    Comparing the positions would not answer this. They may be equal on all ranks even if each rank counts only its own
    batches.
    """
    loaders = [loader for loader in get_loaders(trainer) if hasattr(loader, "state_dict")]
    return all(getattr(loader, "has_global_position", False) for loader in loaders)


def _get_loader_states(checkpoint: dict[str, Any]) -> list[Any]:
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
    return fit_loop.get("state_dict", {}).get("combined_loader", [])


def _set_loader_states(checkpoint: dict[str, Any], states: Sequence[Any]) -> None:
    checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = states
