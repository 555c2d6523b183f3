"""Saving and loading of a run's checkpoints, for the strategies that train on a device mesh."""

import platform
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_fsdp2.checkpoint.formats.single_file import gather_state
from lightning_fsdp2.checkpoint.frozen import LEFT_OUT_KEY, LeftOut, describe_left_out, leave_out_frozen
from lightning_fsdp2.checkpoint.loading import load_model_state, load_optimizer_states
from lightning_fsdp2.checkpoint.state import get_optimizer_state
from lightning_fsdp2.compat.ledger import get_ledger
from lightning_fsdp2.compat.lightning import is_accumulating
from lightning_fsdp2.config import CheckpointConfig
from lightning_fsdp2.ranks.coordination import get_group, wait_for_all_ranks
from lightning_fsdp2.strategies.checkpoint_io import MeshCheckpointIO
from lightning_fsdp2.strategies.launch.agreement import check_folders
from lightning_fsdp2.strategies.parts.model_checkpoint import take_over
from lightning_fsdp2.strategies.parts.resumption import Resumption
from lightning_fsdp2.strategies.parts.world import World
from lightning_fsdp2.weights.description import DESCRIPTIONS_KEY, describe_hf_models

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_SAVE_TIMEOUT_AFTER_ERROR = timedelta(minutes=1)


class Checkpoints:
    """Saver and loader of a run's Lightning checkpoints.

    Hooks work as under any other strategy: ``on_save_checkpoint`` and ``on_load_checkpoint`` get the checkpoint dict
    and may change it. The tensors in the dict's ``state_dict`` and ``optimizer_states`` are sharded.

    Args:
        config: Options for writing and reading checkpoints.
        world: The ranks of the run.
        resumption: Per-rank states to save and restore.

    Attributes:
        saved_steps: Global step of each saved checkpoint, by path.
    """

    def __init__(self, config: CheckpointConfig, world: World, resumption: Resumption) -> None:
        self.config = config
        self.saved_steps: dict[str, int | None] = {}
        self._world = world
        self._resumption = resumption
        self._io: MeshCheckpointIO | None = None
        self._left_out: Sequence[LeftOut] = ()
        self._loaded_path: str | Path = ""

    @property
    def io(self) -> MeshCheckpointIO:
        """The Lightning plugin that writes and reads the checkpoint files."""
        if self._io is None:
            self._io = MeshCheckpointIO()
        return self._io

    def set_io(self, io: CheckpointIO | None, strategy: str) -> None:
        """Set the plugin that writes and reads checkpoints. None sets the default.

        Raises:
            ValueError: When ``io`` is not a :class:`MeshCheckpointIO`. The message names ``strategy``.
        """
        if io is not None and not isinstance(io, MeshCheckpointIO):
            raise ValueError(
                f"Trainer(plugins=[{type(io).__name__}()]): {strategy} writes sharded checkpoints on all ranks and"
                f" would not use this plugin; remove it and set {strategy}(checkpoint=CheckpointConfig(...)), or derive"
                " the plugin from MeshCheckpointIO."
            )
        self._io = io

    # ------------------------------------------------------------------ stages

    def connect(self, device: torch.device) -> None:
        """Give the checkpoint plugin this rank's device and the run's process groups. The groups must already exist."""
        thread_group = get_group("checkpoint thread", self._world.timeout) if self.config.async_save else None
        world = self._world
        self.io.connect(self.config, device, cast(Any, world.control_group), thread_group, world.pipeline_control)

    def begin_stage(self, trainer: "Trainer") -> None:
        """Wait for the last save to end, and prepare for a stage of the Trainer.

        Before a fit, remove the leftovers of interrupted saves, and adapt ``ModelCheckpoint`` callbacks to the mesh by
        replacing some of their methods.
        """
        self.io.wait()
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._resumption.forget_loader_states()
        check_folders(trainer, self._world.hosts, cast(Any, self._world.control_group))
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                self.io.clean(callback.dirpath or trainer.default_root_dir, callback.CHECKPOINT_NAME_LAST)
                exists = partial(self._exists, is_first=trainer.is_global_zero)
                take_over(callback, trainer, link=self._link, exists=exists, save_at_end=self.config.save_at_end)
                self._warn_of_second_save(callback)

    def end_stage(self, trainer: "Trainer") -> None:
        """Restore the methods of the ``ModelCheckpoint`` callbacks, and wait for the last save."""
        for callback in trainer.checkpoint_callbacks:
            get_ledger(trainer).put_back(callback)
        if trainer.interrupted:
            self.io.settle()
        else:
            self.io.teardown()

    def _warn_of_second_save(self, callback: ModelCheckpoint) -> None:
        if self.config.async_save and callback.save_last is True and callback.save_top_k != 0:
            rank_zero_warn(
                "ModelCheckpoint(save_last=True) writes every checkpoint twice, and training waits for the first write"
                " in spite of CheckpointConfig(async_save=True). Use save_last='link'."
            )

    def _exists(self, filepath: str | Path, trainer: "Trainer", *, is_first: bool) -> bool:
        return self._world.decide(is_first and self.io.exists(filepath), all=False)

    def _link(self, trainer: "Trainer", filepath: str, linkpath: str) -> None:
        self.io.link(filepath, linkpath)
        self.saved_steps[linkpath] = self.saved_steps.get(filepath)
        self._world.wait()

    # ------------------------------------------------------------------ save

    def get_module_state(self, module: "LightningModule") -> dict[str, Any]:
        """Return the module's state for a checkpoint. Every rank must call this.

        With ``CheckpointConfig(format="full")``, the state holds whole tensors in host memory on rank 0, and is empty
        on the other ranks.
        """
        state = module.state_dict()
        if not self.config.frozen_parameters:
            state = leave_out_frozen(module, state)
        whole = self.config.format == "full"
        return gather_state(state, pipeline=self._world.pipeline_control) if whole else state

    def get_optimizer_state(self, module: "LightningModule", optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, in which parameters are identified by names instead of numbers."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return get_optimizer_state(module, inner)

    def wait_for_all_ranks_to_save(self, trainer: "Trainer") -> None:
        """Wait until all ranks have begun to save a checkpoint. If a rank does not, raise an error rather than hang."""
        self._wait_for_all_ranks(
            trainer,
            "save a checkpoint",
            "Saving is a collective: call `trainer.save_checkpoint(...)` on all ranks, not under `if"
            " trainer.is_global_zero`. After an error on one rank, the ranks cannot save a checkpoint.",
        )

    def save(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None, module: "LightningModule"
    ) -> None:
        """Write a checkpoint on all ranks. Once it is complete, it replaces an existing checkpoint at ``path``.

        With ``async_save``, a checkpoint saved during a fit is complete by the time the next save begins or the fit
        ends. Any other checkpoint is complete when this method returns.
        """
        trainer = module.trainer
        self._wait_for_all_ranks(
            trainer,
            "write a checkpoint",
            "A method that the Trainer calls to save a checkpoint (`on_save_checkpoint`, `state_dict`) may have failed"
            " on that rank: see the error in its log.",
        )
        if "loops" in checkpoint and trainer.state.fn == TrainerFn.FITTING and is_accumulating(trainer):
            _warn_of_gradients(trainer)
        checkpoint = self._resumption.add_to(checkpoint, trainer, trainer.strategy.root_device)
        if not self.config.frozen_parameters:
            checkpoint[LEFT_OUT_KEY] = describe_left_out(module, checkpoint["state_dict"], self._world.control_group)
        self.saved_steps[str(path)] = checkpoint.get("global_step")
        # outside of a fit, wait for the save, since no later step would report its failure
        wait = trainer.state.fn != TrainerFn.FITTING or trainer.state.status != TrainerStatus.RUNNING
        summary = self._get_summary(module)
        self.io.save_checkpoint(checkpoint, self._world.broadcast(path), storage_options, summary=summary, wait=wait)

    def _wait_for_all_ranks(self, trainer: "Trainer", purpose: str, remedy: str) -> None:
        # restore the full timeout of collectives, since the slowest rank may take a long time to write
        self._world.set_group_timeout(None)
        # wait only half as long here, to time out before any collective in which other ranks may be waiting
        timeout = self._world.timeout / 2
        if trainer.interrupted:
            timeout = min(timeout, _SAVE_TIMEOUT_AFTER_ERROR)
        wait_for_all_ranks(purpose, timeout, remedy)

    def _get_summary(self, module: "LightningModule") -> dict[str, Any]:
        strategy: Any = module.trainer.strategy
        tokenizer = getattr(getattr(module.trainer, "datamodule", None), "tokenizer", None)
        return {
            DESCRIPTIONS_KEY: describe_hf_models(module, tokenizer),
            "mesh": self._world.axis_sizes,
            "world_size": self._world.size,
            "strategy": type(strategy).__name__,
            "precision": str(strategy.precision_plugin.precision),
            "lightning": lightning.__version__,
            "python": platform.python_version(),
        }

    # ------------------------------------------------------------------ load

    def load(self, path: str | Path, module: "LightningModule", *, weights_only: bool | None) -> dict[str, Any]:
        """Read the checkpoint ``path`` on all ranks. From a directory, each rank reads only its own shards.

        Raises:
            FileNotFoundError: When there is no such checkpoint.
            ValueError: When the checkpoint is incomplete or damaged, or holds objects that must not be unpickled.
        """
        path = self._world.broadcast(path)
        is_fit = module.trainer.state.fn == TrainerFn.FITTING
        checkpoint = self.io.load_checkpoint(
            path,
            module,
            with_optimizers=is_fit,
            # a hook may rename keys, so it must run before weights are read into the model
            in_place=not is_overridden("on_load_checkpoint", module),
            weights_only=weights_only,
        )
        # a checkpoint that is only a `state_dict` does not record Lightning's version
        checkpoint.setdefault("pytorch-lightning_version", lightning.__version__)
        self._resumption.take_from(checkpoint, module.trainer, is_fit=is_fit)
        self._left_out = checkpoint.pop(LEFT_OUT_KEY, [])
        self._loaded_path = path
        return checkpoint

    def load_module_state(self, checkpoint: Mapping[str, Any], module: "LightningModule", *, strict: bool) -> None:
        """Load the state in ``checkpoint``, which :meth:`load` has returned, into the module."""
        state = checkpoint["state_dict"]
        load_model_state(self._loaded_path, module, state, strict=strict, left_out=self._left_out)

    def load_optimizer_states(
        self, checkpoint: Mapping[str, Any], module: "LightningModule", optimizers: list[Optimizer]
    ) -> None:
        """Load the states in ``checkpoint``, which :meth:`load` has returned, into the optimizers."""
        states, weights = checkpoint["optimizer_states"], checkpoint["state_dict"]
        load_optimizer_states(self._loaded_path, module, optimizers, states, weights)


def _warn_of_gradients(trainer: "Trainer") -> None:
    rank_zero_warn(
        "A checkpoint is saved during gradient accumulation"
        f" (accumulate_grad_batches={cast(Any, trainer).accumulate_grad_batches}): a run that resumes from this"
        " checkpoint makes the current step without the earlier micro-batches. Save after an optimizer step: make"
        " val_check_interval, and other intervals that save, a multiple of accumulate_grad_batches."
    )
