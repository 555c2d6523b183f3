"""Settings, such as parallel sizes and micro-batch sizes, that a plan may vary without changing the training."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy

from lightning_fsdp2.compat.torch import tree_leaves, tree_map_only
from lightning_fsdp2.config import DistributedConfig, FSDP2Config, spell_alike
from lightning_fsdp2.models import CausalLM
from lightning_fsdp2.parallel.pipeline.schedule import get_micro_batches
from lightning_fsdp2.sizes import ParallelSizes

_SIZES = {"pp": "pp_size", "dp_replicate": "dp_replicate_size", "tp": "tp_size", "cp": "cp_size", "ep": "ep_size"}


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """Settings of a run that a plan may vary. A variation changes gradients only by rounding errors."""

    dp: int
    """Number of data parallel ranks (replicas x shards), which follows from the other sizes."""

    pp: int
    dp_replicate: int
    tp: int
    cp: int
    ep: int
    config: DistributedConfig
    """Config of the strategy, with the flags."""

    loss: str | None
    """Option ``loss`` of a :class:`~lightning_fsdp2.CausalLM`; None for other modules."""

    batch_size: int
    """Number of samples in a batch of a data parallel rank, which a pipeline divides into micro-batches."""

    accumulation: int
    """Number of batches of a data parallel rank in a step."""

    @property
    def samples(self) -> int:
        """Number of samples in a step, over all ranks."""
        return self.dp * self.batch_size * self.accumulation

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches into which each batch is divided; 1 without pipeline parallelism.

        Raises:
            ValueError: When the schedule does not allow the number.
        """
        if self.pp == 1 or not isinstance(self.config, FSDP2Config):
            return 1
        return get_micro_batches(
            self.config.pp_microbatches,
            rows=self.batch_size,
            schedule=self.config.pp_schedule,
            ranks=self.pp,
            stages_per_rank=self.config.stages_per_rank,
        )

    def divide(self, micro_batches: int, rows: int) -> "Knobs":
        """Return a copy of these settings with one batch in a step, which has micro-batches of ``rows`` samples."""
        divided = replace(self, batch_size=micro_batches * rows, accumulation=1)
        return divided.with_flags(pp_microbatches=micro_batches)

    def with_flags(self, **flags: Any) -> "Knobs":
        """Return a copy of these settings in which the config has the values in ``flags``."""
        return replace(self, config=replace(self.config, **flags))


def read_knobs(trainer: Any, module: Any, batch: Any, *, world_size: int, num_nodes: int, accumulation: int) -> Knobs:
    """Read the current settings of a run.

    Raises:
        ValueError: When the parallel sizes do not fit the number of ranks, or the first dims of the tensors in
            ``batch`` differ in size.
    """
    strategy = trainer.strategy
    sizes = strategy.asked_sizes.resolve(world_size=world_size, num_nodes=num_nodes)
    return Knobs(
        dp=sizes.dp,
        pp=sizes.pp,
        dp_replicate=sizes.dp_replicate,
        tp=sizes.tp,
        cp=sizes.cp,
        ep=sizes.ep,
        config=spell_alike(strategy.config),
        loss=module.loss if isinstance(module, CausalLM) else None,
        batch_size=get_batch_size(batch),
        accumulation=accumulation,
    )


def apply_knobs(knobs: Knobs, trainer: Any, module: Any, batch: Any) -> Any:
    """Apply settings to the trainer and the module in place, and return ``batch`` resized to ``knobs.batch_size``."""
    strategy = trainer.strategy
    strategy.config = knobs.config
    if isinstance(knobs.config, FSDP2Config):
        strategy.asked_sizes = ParallelSizes(**{option: getattr(knobs, name) for name, option in _SIZES.items()})
    if knobs.loss is not None:
        module.loss = knobs.loss
    trainer.accumulate_grad_batches = knobs.accumulation
    if get_batch_size(batch) == knobs.batch_size:
        return batch
    return tree_map_only(Tensor, lambda tensor: tensor[:1].expand(knobs.batch_size, *tensor.shape[1:]), batch)


def get_batch_size(batch: Any) -> int:
    """Return the number of samples in ``batch``: the size of the first dim, which all its tensors must share.

    Raises:
        ValueError: When no tensor has a first dim, or the first dims differ in size.
    """
    sizes = {tensor.size(0) for tensor in tree_leaves(batch) if isinstance(tensor, Tensor) and tensor.ndim > 0}
    if len(sizes) != 1:
        raise ValueError(
            f"batch: dim 0 of its tensors has the different sizes {sorted(sizes)}, but a plan needs one common size,"
            " the number of samples; give tensors of shape [samples, ...]."
        )
    return sizes.pop()


def get_sequence_length(batch: Any) -> int | None:
    """Return the number of tokens per sample; None for batches without ``input_ids``."""
    tokens = batch.get("input_ids") if isinstance(batch, dict) else None
    return tokens.size(-1) if isinstance(tokens, Tensor) else None


def get_differences(before: Knobs, after: Knobs) -> dict[str, Any]:
    """Return the settings and flags that differ between ``before`` and ``after``, with their values in ``after``."""
    old, new = _get_settings(before), _get_settings(after)
    return {name: value for name, value in new.items() if value != old[name]}


def merge(before: Knobs, first: Knobs, second: Knobs) -> Knobs | None:
    """Return ``before`` with the changes of both other settings; None if both change the same setting."""
    changes, others = get_differences(before, first), get_differences(before, second)
    if changes.keys() & others.keys():
        return None
    flags = {name: getattr(second.config, name) for name in others if hasattr(second.config, name)}
    values = {name: value for name, value in others.items() if name not in flags}
    dp = first.dp * second.dp // before.dp  # each may have exchanged data parallel ranks for another axis
    with suppress(ValueError):  # raised by the config if the flags cannot be combined
        return replace(first, dp=dp, **values).with_flags(**flags)
    return None


def _get_settings(knobs: Knobs) -> dict[str, Any]:
    """Return the settings and flags by name. ``dp`` is left out, because the other sizes determine it."""
    sizes = {name: getattr(knobs, name) for name in _SIZES}
    flags = knobs.config.to_dict()
    # return True instead of the stored policy, since a plan may turn offloading on but never changes the policy
    flags |= {name: True for name, value in flags.items() if isinstance(value, CPUOffloadPolicy)}
    return {**sizes, **flags, "loss": knobs.loss, "batch_size": knobs.batch_size, "accumulation": knobs.accumulation}


def describe_differences(before: Knobs, after: Knobs) -> str:
    """Describe the settings that differ, by their names in the YAML and their values in ``after``."""
    names = {**_SIZES, "accumulation": "accumulate_grad_batches"}
    return ", ".join(f"{names.get(name, name)}={value!r}" for name, value in get_differences(before, after).items())


def build_config(
    before: Knobs, after: Knobs, *, strategy: str, names_batch_size: bool, has_global_batch: bool
) -> dict[str, Any]:
    """Build the additions to the run's YAML that change its settings from ``before`` to ``after``.

    Args:
        before: Current settings of the run.
        after: New settings of the run.
        strategy: Class path of the run's strategy.
        names_batch_size: Whether the data module has the option ``batch_size``.
        has_global_batch: Whether the data module has a global batch size, from which it computes gradient accumulation.
    """
    different = get_differences(before, after)
    flags = {name: different[name] for name in after.config.to_dict() if name in different}
    init_args = {option: different[name] for name, option in _SIZES.items() if name in different}
    if init_args:
        init_args = {"dp_size": "auto", **init_args}
    if flags:
        init_args["config"] = flags
    config: dict[str, Any] = {}
    if init_args:
        config.setdefault("trainer", {})["strategy"] = {"class_path": strategy, "init_args": init_args}
    if "accumulation" in different and not has_global_batch:
        config.setdefault("trainer", {})["accumulate_grad_batches"] = after.accumulation
    if "loss" in different:
        config["model"] = {"init_args": {"loss": after.loss}}
    if "batch_size" in different and names_batch_size:
        config["data"] = {"init_args": {"batch_size": after.batch_size}}
    return config
