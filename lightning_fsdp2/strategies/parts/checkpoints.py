"""The checkpoint half of the mesh strategies: it connects Lightning's checkpoint dict with the files."""

import platform
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp2.checkpoint.frozen import LEFT_OUT_KEY, LeftOut, describe_left_out, leave_out_frozen
from lightning_fsdp2.checkpoint.loading import load_model_state, load_optimizer_states
from lightning_fsdp2.checkpoint.single_file import gather_state
from lightning_fsdp2.checkpoint.state import get_optimizer_state
from lightning_fsdp2.compat.ledger import get_ledger
from lightning_fsdp2.compat.lightning import (
    get_last_saved,
    get_loader_states,
    get_loaders,
    is_accumulating,
    is_epoch_cut_short,
    is_last_epoch,
    prepare_resume,
    reopen_epoch,
    save_last,
)
from lightning_fsdp2.config import CheckpointConfig
from lightning_fsdp2.parallel.data.fully_shard import reshard
from lightning_fsdp2.ranks.coordination import get_group, wait_for_all_ranks
from lightning_fsdp2.ranks.random_state import get_random_state, set_random_state
from lightning_fsdp2.strategies.checkpoint_io import MeshCheckpointIO
from lightning_fsdp2.strategies.launch.agreement import check_shared_folders
from lightning_fsdp2.strategies.parts.tracking import Tracking
from lightning_fsdp2.strategies.world import WorldStrategy
from lightning_fsdp2.weights.description import DESCRIPTIONS_KEY, describe_hf_models

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_RANKS_KEY = "lightning_fsdp2"

_SAVE_TIMEOUT_AFTER_ERROR = timedelta(minutes=1)


class CheckpointingStrategy(WorldStrategy):
    """Strategy that saves and loads Lightning checkpoints as :class:`CheckpointConfig` says.

    Hooks work as under any other strategy: ``on_save_checkpoint`` and ``on_load_checkpoint`` get the whole dict and may
    change it. The tensors in its ``state_dict`` and ``optimizer_states`` are sharded.
    """

    checkpoint_config: CheckpointConfig
    saved_steps: dict[str, int | None]
    """Step of each saved checkpoint, by path."""

    _random_state_to_restore: dict[str, Any] | None = None
    _begins_epoch_anew = False
    _left_out: Sequence[LeftOut] = ()
    _last_loader_states: Sequence[Any] = ()
    _resumed_epoch = 0
    _checkpoint_io: MeshCheckpointIO | None
    _tracking: Tracking | None = None

    @abstractmethod
    def parallelize(self) -> None:
        """Shard the LightningModule unless it is already sharded. Every stage calls this."""

    def release_parameters(self) -> None:
        """Put back the sharded parameters, which optimizers and checkpoints need. A forward may leave gathered ones."""
        reshard(self.lightning_module)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # Lightning passes on `trainer.fit(weights_only=)` only if this is False; `load_checkpoint` shards if necessary
        return False

    @property
    @override
    def checkpoint_io(self) -> MeshCheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = MeshCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        if io is not None and not isinstance(io, MeshCheckpointIO):
            raise ValueError(
                f"Trainer(plugins=[{type(io).__name__}()]): {type(self).__name__} writes sharded checkpoints on all"
                " ranks and would not use it; remove the plugin, and set"
                f" {type(self).__name__}(checkpoint=CheckpointConfig(...)), or derive it from MeshCheckpointIO."
            )
        self._checkpoint_io = io

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._resumed_epoch = 0
        config, thread_group = self.checkpoint_config, None
        if config.async_save:
            thread_group = get_group("checkpoint thread", self._timeout)
        self.checkpoint_io.connect(config, self.root_device, self._control_group, thread_group)
        if self._tracking is None:
            self._tracking = Tracking(self._add_up_over_data, lambda action: self.checkpoint_io.then(action))
        self._tracking.attach(self.lightning_module.trainer)

    def prepare_checkpoints(self, trainer: "Trainer") -> None:
        """Clean up after earlier runs, and take over how ``ModelCheckpoint`` callbacks save and link."""
        self.checkpoint_io.wait()
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._last_loader_states = []
        check_shared_folders(trainer, self.hosts, self._control_group)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                self.checkpoint_io.clean(callback.dirpath or trainer.default_root_dir, callback.CHECKPOINT_NAME_LAST)
                self._take_over(callback, trainer)
                self._warn_of_second_save(callback)

    def _take_over(self, callback: ModelCheckpoint, trainer: "Trainer") -> None:
        """Make ``callback`` save on all ranks together, only after optimizer steps, and also at the end of a fit."""
        replace = partial(get_ledger(trainer).replace, callback)
        replace("_link_checkpoint", self._link, reason="the old link is removed before the new one has a target")
        replace("file_exists", self._file_exists, reason="what is being written is not seen, and its name chosen again")
        if type(callback).on_train_batch_end is ModelCheckpoint.on_train_batch_end:
            save = partial(_save_behind_steps, callback)
            replace("on_train_batch_end", save, reason="it saves in micro-batches that no optimizer step follows")
        fast_dev_run = bool(cast(Any, trainer).fast_dev_run)
        if self.checkpoint_config.save_at_end and not fast_dev_run:
            save = partial(_save_last_step, callback, callback.on_train_epoch_end)
            replace("on_train_epoch_end", save, reason="the last steps of a fit may be in no checkpoint")
        if fast_dev_run and type(callback).on_train_end is ModelCheckpoint.on_train_end:
            reason = "it saves under fast_dev_run, maybe in place of the last checkpoint of a long run"
            replace("on_train_end", lambda *args: None, reason=reason)

    def finish_checkpoints(self) -> None:
        """Undo what :meth:`prepare_checkpoints` took over, and wait for the last save."""
        trainer = self.lightning_module.trainer
        if self._tracking is not None:
            self._tracking.detach(trainer)
        for callback in trainer.checkpoint_callbacks:
            get_ledger(trainer).put_back(callback)
        if trainer.interrupted:
            self.checkpoint_io.settle()
        else:
            self.checkpoint_io.teardown()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state for a checkpoint; every rank must call it.

        With ``CheckpointConfig(format="full")``, rank 0 has whole tensors in host memory, and other ranks have none.
        """
        module = self.lightning_module
        state = module.state_dict()
        if not self.checkpoint_config.frozen_parameters:
            state = leave_out_frozen(module, state)
        return gather_state(state) if self.checkpoint_config.format == "full" else state

    def wait_for_all_ranks_to_save(self) -> None:
        """Wait until all ranks save. If some never do, raise an error that explains this instead of hanging."""
        self._wait_for_all_ranks(
            "save a checkpoint",
            "Saving is a collective: call `trainer.save_checkpoint(...)` on all ranks, not under `if"
            " trainer.is_global_zero`. Behind an error on one rank there is nothing to save together.",
        )

    def _wait_for_all_ranks(self, purpose: str, remedy: str) -> None:
        self.set_group_timeout(None)  # the full timeout: all ranks wait for the slowest one to write
        # time out earlier than the collectives in which other ranks may be waiting
        timeout = self._timeout / 2
        if self.lightning_module.trainer.interrupted:
            timeout = min(timeout, _SAVE_TIMEOUT_AFTER_ERROR)
        wait_for_all_ranks(purpose, timeout, remedy)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.release_parameters()
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return get_optimizer_state(self.lightning_module, inner)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the checkpoint ``filepath`` on all ranks. An existing one is replaced once the new one is complete.

        With ``async_save``, a checkpoint saved during a fit is complete by the time the next save begins or the fit
        ends. Any other checkpoint is complete when this returns.
        """
        self._wait_for_all_ranks(
            "write a checkpoint",
            "What the Trainer asks while it saves may have failed there (`on_save_checkpoint`, `state_dict`): see the"
            " error in the log of that rank.",
        )
        self._warn_of_gradients(checkpoint)
        if "loops" in checkpoint and is_epoch_cut_short(self.lightning_module.trainer):
            reopen_epoch(checkpoint["loops"]["fit_loop"])
            if self._last_loader_states:
                _set_loader_states(checkpoint, self._last_loader_states)
        checkpoint = {**checkpoint, _RANKS_KEY: self._gather_rank_states(checkpoint)}
        if not self.checkpoint_config.frozen_parameters:
            state = checkpoint["state_dict"]
            checkpoint[LEFT_OUT_KEY] = describe_left_out(self.lightning_module, state, self._control_group)
        # outside of a fit no later step would report a failure, so wait
        self.saved_steps[str(filepath)] = checkpoint.get("global_step")
        state = self.lightning_module.trainer.state
        wait = state.fn != TrainerFn.FITTING or state.status != TrainerStatus.RUNNING
        self.checkpoint_io.save_checkpoint(
            checkpoint, self.broadcast(filepath), storage_options, summary=self._get_summary(), wait=wait
        )

    @override
    @torch.inference_mode(False)  # the user may run the Trainer in inference mode, and train the module later
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the checkpoint ``checkpoint_path`` on all ranks; from a directory, each rank reads only its shards.

        Raises:
            FileNotFoundError: When there is no such checkpoint.
            ValueError: When the checkpoint is incomplete or damaged, or holds objects that may not be unpickled.
        """
        path = self.broadcast(checkpoint_path)
        module = self.lightning_module
        self.parallelize()
        self.release_parameters()
        checkpoint = self.checkpoint_io.load_checkpoint(
            path,
            module,
            with_optimizers=module.trainer.state.fn == TrainerFn.FITTING,
            # a hook that renames keys must see them before they reach the model
            in_place=not is_overridden("on_load_checkpoint", module),
            weights_only=weights_only,
        )
        checkpoint.setdefault("pytorch-lightning_version", lightning.__version__)  # a plain `state_dict` has no version
        if (ranks := checkpoint.pop(_RANKS_KEY, None)) is not None:
            self._take_rank_states(checkpoint, ranks)
        if module.trainer.state.fn == TrainerFn.FITTING and "loops" in checkpoint:
            self._resumed_epoch = prepare_resume(checkpoint["loops"]["fit_loop"], module.trainer)
        self._left_out = checkpoint.pop(LEFT_OUT_KEY, [])
        self._loaded_path = path
        return checkpoint

    @override
    @torch.inference_mode(False)
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        state = checkpoint["state_dict"]
        load_model_state(self._loaded_path, self.lightning_module, state, strict=strict, left_out=self._left_out)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        load_optimizer_states(self._loaded_path, self.lightning_module, self.optimizers, checkpoint["optimizer_states"])

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint; with ``async_save``, once the save in progress is complete."""
        self.checkpoint_io.remove_checkpoint(filepath)

    def _warn_of_second_save(self, callback: ModelCheckpoint) -> None:
        if self.checkpoint_config.async_save and callback.save_last is True and callback.save_top_k != 0:
            rank_zero_warn(
                "ModelCheckpoint(save_last=True) writes every checkpoint twice, and training waits for the first before"
                " the second, in spite of CheckpointConfig(async_save=True). Use save_last='link'."
            )

    def keep_loader_states(self) -> None:
        """Remember the data loaders' positions at the end of a fit, for a checkpoint after the loaders are reset."""
        self._last_loader_states = get_loader_states(self.lightning_module.trainer)

    def _warn_of_gradients(self, checkpoint: dict[str, Any]) -> None:
        trainer = self.lightning_module.trainer
        if "loops" in checkpoint and trainer.state.fn == TrainerFn.FITTING and is_accumulating(trainer):
            rank_zero_warn(
                "A checkpoint is saved amid accumulation"
                f" (accumulate_grad_batches={cast(Any, trainer).accumulate_grad_batches}): a run that resumes from it"
                " makes this step without the micro-batches before. Save behind an optimizer step: let"
                " val_check_interval, and what else saves, be a multiple of the accumulation."
            )

    def _file_exists(self, filepath: str | Path, trainer: "Trainer") -> bool:
        exists = trainer.is_global_zero and self.checkpoint_io.exists(filepath)
        return self.reduce_boolean_decision(exists, all=False)

    def _link(self, trainer: "Trainer", filepath: str, linkpath: str) -> None:
        self.checkpoint_io.link(filepath, linkpath)
        self.saved_steps[linkpath] = self.saved_steps.get(filepath)
        self.barrier()

    def restore_random_state(self) -> None:
        """Restore the checkpoint's random state. Call this after the data loaders' iterators have drawn their seeds."""
        if self._random_state_to_restore is not None:
            set_random_state(self._random_state_to_restore, self.root_device)
            self._random_state_to_restore = None

    def _gather_rank_states(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Gather the states that differ between ranks, such as random states and data loader positions."""
        own = (self.data_parallel_rank, get_random_state(self.root_device), _get_loader_states(checkpoint))
        everyone = [own] * self.world_size
        dist.all_gather_object(everyone, own, group=self._control_group)
        return {
            "mesh": self._get_mesh_sizes(),
            "random_states": [state for _, state, _ in everyone],
            "loader_states": {rank: loaders for rank, _, loaders in everyone if loaders},
            "has_global_positions": _has_global_positions(self.lightning_module.trainer),
            "tracking": self._tracking.get_state(self.lightning_module.trainer),
        }

    def _take_rank_states(self, checkpoint: dict[str, Any], ranks: dict[str, Any]) -> None:
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            return
        if "tracking" in ranks:  # missing in checkpoints of earlier versions
            self._tracking.set_state(ranks["tracking"])
        random_states, loader_states = ranks["random_states"], ranks["loader_states"]
        saved_mesh, mesh = ranks.get("mesh"), self._get_mesh_sizes()
        changed, lost = [], []
        if self._can_take_random_states(len(random_states), saved_mesh):
            self._random_state_to_restore = random_states[self.global_rank]
        else:
            changed.append(f"the random states of {len(random_states)} ranks (mesh {saved_mesh or 'unknown'})")
            lost.append("random numbers (dropout)")
        if len(loader_states) == self.data_parallel_size:
            _set_loader_states(checkpoint, loader_states[self.data_parallel_rank])
        elif loader_states and ranks.get("has_global_positions"):
            _set_loader_states(checkpoint, loader_states[0])
        elif loader_states:
            _set_loader_states(checkpoint, [])
            self._begins_epoch_anew = True
            changed.append(f"the data loader positions of {len(loader_states)} data parallel ranks")
            lost.append("the data of the current epoch")
        if changed:
            rank_zero_warn(
                f"The checkpoint holds {' and '.join(changed)}, which cannot be mapped to this run's {self.world_size}"
                f" ranks (mesh {mesh}, {self.data_parallel_size} data parallel ranks); they are dropped:"
                f" {' and '.join(lost)} start anew."
            )

    def _add_up_over_data(self, number: int) -> int:
        """Return the sum of ``number`` over the ranks that read different data, on the host."""
        total = torch.tensor(number)
        dist.all_reduce(total, group=self._control_group)
        return int(total) * self.data_parallel_size // self.world_size

    def _can_take_random_states(self, ranks: int, mesh: dict[str, int] | None) -> bool:
        """Return whether this run can use the random states that ``ranks`` ranks saved on a mesh of the shape ``mesh``.

        The ranks of one replica must get the same state. With the states of another mesh, they would drop different
        activations.
        """
        if mesh is None:  # a checkpoint of an earlier version
            return ranks == self.world_size and self._replica_group.size() == 1
        return mesh == self._get_mesh_sizes()

    def _get_mesh_sizes(self) -> dict[str, int]:
        mesh = self.full_device_mesh
        return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))

    def _get_summary(self) -> dict[str, Any]:
        module = self.lightning_module
        tokenizer = getattr(getattr(module.trainer, "datamodule", None), "tokenizer", None)
        return {
            DESCRIPTIONS_KEY: describe_hf_models(module, tokenizer),
            "mesh": self._get_mesh_sizes(),
            "world_size": self.world_size,
            "strategy": type(self).__name__,
            "precision": str(self.precision_plugin.precision),
            "lightning": lightning.__version__,
            "python": platform.python_version(),
        }


def _save_behind_steps(callback: ModelCheckpoint, trainer: "Trainer", *args: Any) -> None:
    """Call Lightning's hook, except after micro-batches that no optimizer step followed.

    Lightning's hook only checks the number of steps. That number may still call for a save in the micro-batches after
    the step: in a resumed run, or after the end of an epoch, where the hook postpones a save until the next validation.
    """
    if not is_accumulating(trainer):
        ModelCheckpoint.on_train_batch_end(callback, trainer, *args)


def _save_last_step(
    callback: ModelCheckpoint, own: Callable[..., None], trainer: "Trainer", module: "LightningModule"
) -> None:
    """Call Lightning's hook. If the fit ends now, also save if the last steps are not in any checkpoint yet.

    Saving in `on_train_end` would be too late: the schedulers would already be updated for the epoch, and a run that
    resumes from the checkpoint would update them again.
    """
    own(trainer, module)
    _, step = get_last_saved(callback)
    if callback.save_last and step != trainer.global_step and is_last_epoch(trainer):
        save_last(callback, trainer, save_weights_only=callback.save_weights_only)


def _has_global_positions(trainer: "Trainer") -> bool:
    """Return whether all data loaders report that their positions are global.

    Equal states on all ranks would not prove it: counts of each rank's own batches would be equal, too.
    """
    loaders = [loader for loader in get_loaders(trainer) if hasattr(loader, "state_dict")]
    return all(getattr(loader, "has_global_position", False) for loader in loaders)


def _get_loader_states(checkpoint: dict[str, Any]) -> list[Any]:
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
    return fit_loop.get("state_dict", {}).get("combined_loader", [])


def _set_loader_states(checkpoint: dict[str, Any], states: Sequence[Any]) -> None:
    checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = states
