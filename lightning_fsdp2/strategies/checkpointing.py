"""The checkpoint half of the mesh strategies: between Lightning's checkpoint dict and a sharded directory."""

import pickle
import platform
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp2.checkpoint.distributed import (
    EXTRA_STATES_KEY,
    check_complete,
    load_model_state,
    load_optimizer_states,
    read_metadata,
    read_tensors,
    write_checkpoint,
)
from lightning_fsdp2.checkpoint.folder import remove_checkpoint
from lightning_fsdp2.checkpoint.hf_description import DESCRIPTIONS_KEY, describe_hf_models
from lightning_fsdp2.checkpoint.state import get_optimizer_state
from lightning_fsdp2.config import CheckpointConfig
from lightning_fsdp2.parallel.fully_shard import reshard
from lightning_fsdp2.parallel.random_state import get_random_state, set_random_state
from lightning_fsdp2.strategies.world import WorldStrategy

if TYPE_CHECKING:
    from lightning.pytorch.plugins.io import CheckpointIO

_RANKS_KEY = "lightning_fsdp2"


class CheckpointingStrategy(WorldStrategy):
    """Saves and loads Lightning checkpoints as sharded directories.

    Hooks see what they see under any other strategy: ``on_save_checkpoint`` and ``on_load_checkpoint`` get the whole
    dict, with sharded tensors in ``state_dict`` and ``optimizer_states``, and may change it.
    """

    checkpoint_config: CheckpointConfig
    _random_state_to_restore: dict[str, Any] | None = None

    @abstractmethod
    def parallelize(self) -> None:
        """Shard the LightningModule, once; every stage calls it."""

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # False is the only way to learn `trainer.fit(weights_only=)`; `load_checkpoint` shards the module if need be
        return False

    @property
    @override
    def checkpoint_io(self) -> "CheckpointIO":
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: "CheckpointIO") -> None:
        raise ValueError(
            f"Trainer(plugins=[{type(io).__name__}()]): {type(self).__name__} writes sharded checkpoints itself and"
            f" would not use it; remove the plugin, and set {type(self).__name__}(checkpoint=CheckpointConfig(...))."
        )

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.lightning_module.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        reshard(self.lightning_module)
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return get_optimizer_state(self.lightning_module, inner)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the directory ``filepath`` on all ranks; one of that name is replaced once the new one is complete."""
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} writes directories and has no use for `storage_options`.")
        path = self.broadcast(filepath)
        metadata = dict(checkpoint)
        tensors = {"state_dict": metadata.pop("state_dict")}
        for index, state in enumerate(metadata.pop("optimizer_states", [])):
            tensors[f"optimizer_{index}"] = state
        metadata[_RANKS_KEY] = self._gather_rank_states(checkpoint)
        write_checkpoint(path, tensors, metadata, summary=self._get_summary(), group=self._control_group)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the directory ``checkpoint_path`` on all ranks; each reads its shards only.

        Raises:
            ValueError: When it is incomplete, or holds objects that may not be unpickled.
        """
        path = Path(self.broadcast(checkpoint_path))
        module = self.lightning_module
        self.parallelize()
        reshard(module)
        check_complete(path, self._control_group)
        checkpoint, weights_only = self._read_metadata(path, weights_only)
        model_state, optimizer_states = read_tensors(
            path,
            module,
            with_optimizers=module.trainer.state.fn == TrainerFn.FITTING,
            # a hook that renames keys must see them before they reach the model
            in_place=not is_overridden("on_load_checkpoint", module),
            weights_only=weights_only,
            group=self._control_group,
        )
        checkpoint["state_dict"] = {**model_state, **checkpoint.pop(EXTRA_STATES_KEY, {})}
        if optimizer_states:
            checkpoint["optimizer_states"] = optimizer_states
        if (ranks := checkpoint.pop(_RANKS_KEY, None)) is not None:
            self._take_rank_states(checkpoint, ranks)
        self._loaded_path = path
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        own = self.lightning_module.state_dict()
        state = {name: _shard_like(value, own.get(name)) for name, value in checkpoint["state_dict"].items()}
        load_model_state(self._loaded_path, self.lightning_module, state, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        load_optimizer_states(self._loaded_path, self.lightning_module, self.optimizers, checkpoint["optimizer_states"])

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            remove_checkpoint(filepath)

    def restore_random_state(self) -> None:
        """Put back the random state of the checkpoint, once the data loaders' iterators have drawn their seeds."""
        if self._random_state_to_restore is not None:
            set_random_state(self._random_state_to_restore, self.root_device)
            self._random_state_to_restore = None

    def _gather_rank_states(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """What differs by rank and so cannot be rank 0's: random states, positions of the data loaders."""
        own = (self.data_parallel_rank, get_random_state(self.root_device), _get_loader_states(checkpoint))
        everyone = [own] * self.world_size
        dist.all_gather_object(everyone, own, group=self._control_group)
        return {
            "random_states": [state for _, state, _ in everyone],
            "loader_states": {rank: loaders for rank, _, loaders in everyone if loaders},
        }

    def _take_rank_states(self, checkpoint: dict[str, Any], ranks: dict[str, Any]) -> None:
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            return
        random_states, loader_states = ranks["random_states"], ranks["loader_states"]
        changed, lost = [], []
        if len(random_states) == self.world_size:
            self._random_state_to_restore = random_states[self.global_rank]
        else:
            changed.append(f"the random states of {len(random_states)} ranks")
            lost.append("random numbers (dropout)")
        if len(loader_states) == self.data_parallel_size:
            _set_loader_states(checkpoint, loader_states[self.data_parallel_rank])
        elif loader_states and all(states == loader_states[0] for states in loader_states.values()):
            # a position in the whole data set, the same on every rank, holds for any number of ranks
            _set_loader_states(checkpoint, loader_states[0])
        elif loader_states:
            _set_loader_states(checkpoint, [])
            changed.append(f"the data loader positions of {len(loader_states)} data parallel ranks")
            lost.append("the data of the current epoch")
        if changed:
            rank_zero_warn(
                f"The checkpoint holds {' and '.join(changed)}, which cannot be mapped to this run's {self.world_size}"
                f" ranks ({self.data_parallel_size} data parallel); they are dropped: {' and '.join(lost)} start anew."
            )

    def _read_metadata(self, path: Path, weights_only: bool | None) -> tuple[dict[str, Any], bool]:
        """Unpickle as little as possible, and say whether that was ``weights_only``.

        The call's choice counts before the config's.
        """
        choice = weights_only if weights_only is not None else self.checkpoint_config.weights_only
        try:
            return read_metadata(path, weights_only=choice is not False), choice is not False
        except pickle.UnpicklingError as error:
            if choice is None and self.checkpoint_config.trust_checkpoint:
                return read_metadata(path, weights_only=False), False
            raise ValueError(
                f"The checkpoint {str(path)!r} holds objects beyond tensors and plain types (hyper-parameters, most"
                " likely), which can run code when they are loaded. If you trust the file, pass"
                " `weights_only=False` to the Trainer's method, or CheckpointConfig(trust_checkpoint=True) to the"
                f" strategy. {str(error).splitlines()[0]}"
            ) from error

    def _get_summary(self) -> dict[str, Any]:
        mesh = self.full_device_mesh
        module = self.lightning_module
        tokenizer = getattr(getattr(module.trainer, "datamodule", None), "tokenizer", None)
        return {
            DESCRIPTIONS_KEY: describe_hf_models(module, tokenizer),
            "mesh": dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)),
            "world_size": self.world_size,
            "strategy": type(self).__name__,
            "precision": str(self.precision_plugin.precision),
            "lightning": lightning.__version__,
            "python": platform.python_version(),
        }


def _shard_like(value: Any, own: Any) -> Any:
    """A tensor that a hook renamed or made was not read with the sharding of its new name."""
    if not (isinstance(own, DTensor) and isinstance(value, Tensor) and value.shape == own.shape):
        return value
    if isinstance(value, DTensor):
        if (value.device_mesh, value.placements) == (own.device_mesh, own.placements):
            return value
        value = value.full_tensor()
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


def _get_loader_states(checkpoint: dict[str, Any]) -> list[Any]:
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
    return fit_loop.get("state_dict", {}).get("combined_loader", [])


def _set_loader_states(checkpoint: dict[str, Any], states: list[Any]) -> None:
    checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = states
