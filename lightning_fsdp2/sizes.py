"""The sizes of a run's parallelism (data, tensor, context, pipeline, expert), and those of the resulting mesh axes."""

import math
from dataclasses import dataclass
from typing import Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

PIPELINE_PARALLEL = "pipeline_parallel"
STAGE = "stage"
DP_REPLICATE = "dp_replicate"
DP_SHARD = "dp_shard"
DP_SHARD_CP = "dp_shard_cp"
DP_CP = "dp_cp"
DATA_PARALLEL = "data_parallel"
CONTEXT_PARALLEL = "context_parallel"
TENSOR_PARALLEL = "tensor_parallel"
CP_TP = "cp_tp"
EFSDP = "efsdp"
EXPERT_PARALLEL = "ep"

EP_SHARD = "ep_shard"
"""Name of the axis ``efsdp`` in meshes from other software."""


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """Number of ranks along each axis of a run's mesh. The product of all sizes except ``ep`` is the world size."""

    pp: int = 1
    """Number of pipeline parallel ranks, which hold different layers."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    ep: int = 1
    """Number of expert parallel ranks, which are also ranks of ``dp_shard``, ``cp`` and ``tp``."""

    @property
    def dp(self) -> int:
        """Number of data parallel ranks, which read different batches."""
        return self.dp_replicate * self.dp_shard

    @property
    def stage(self) -> int:
        """Number of ranks of one pipeline stage, which hold the same layers."""
        return self.dp * self.cp * self.tp


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Parallel sizes as the user gives them, before the number of ranks is known."""

    dp_size: int | Literal["auto"] | None = "auto"
    """Number of data parallel ranks (replicate x shard). ``"auto"``, ``None`` or a number <= 0 mean
    ``world_size / (pp_size * cp_size * tp_size)``."""

    dp_replicate_size: int | Literal["auto"] | None = 1
    """Number of replicas of the sharded model (HSDP). ``"auto"`` means one per node, or with several pipeline stages,
    one per node of a stage."""

    tp_size: int | None = 1
    """Number of tensor parallel ranks."""

    cp_size: int | None = 1
    """Number of context parallel ranks."""

    ep_size: int | None = 1
    """Number of expert parallel ranks, among which the experts of each layer are distributed. These are no further
    ranks: ``ep_size`` divides the number of ranks of one model replica in a pipeline stage, (``dp_size`` /
    ``dp_replicate_size``) x ``cp_size`` x ``tp_size``."""

    pp_size: int | None = 1
    """Number of pipeline parallel ranks, among which the layers are distributed. 0 and ``None`` mean 1."""

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size not in (None, "auto") and (isinstance(size, bool) or not isinstance(size, int)):
                raise ValueError(f"{name}={size!r} is not a number of ranks; use an integer >= 1.")

    def resolve(self, *, world_size: int, num_nodes: int = 1) -> MeshSizes:
        """Compute the sizes that are ``"auto"``, and check that the product of all sizes is the world size.

        Args:
            world_size: Number of ranks.
            num_nodes: Number of nodes. ``dp_replicate_size="auto"`` stands for this number.

        Raises:
            ValueError: When the product of the sizes is not the world size. The message shows the calculation.
        """
        pp = _check_size("pp_size", self.pp_size or 1)
        tp = _check_size("tp_size", self.tp_size)
        cp = _check_size("cp_size", self.cp_size)
        others = {"cp_size": cp, "tp_size": tp} if pp == 1 else {"pp_size": pp, "cp_size": cp, "tp_size": tp}
        dp = self._resolve_dp_size(world_size, others)
        replicate = self._resolve_dp_replicate_size(dp, num_nodes, pp, f"{world_size} / ({_multiply(others)})")
        ep = _check_size("ep_size", self.ep_size)
        ranks = dp // replicate * cp * tp
        if ranks % ep:
            whole = "one model replica" if pp == 1 else "one stage of a model replica"
            raise ValueError(
                f"ep_size={ep} does not divide the {ranks} ranks of {whole} (dp_shard={dp // replicate} x"
                f" cp_size={cp} x tp_size={tp}), which share the experts; use one of {_divisors(ranks)}."
            )
        return MeshSizes(pp=pp, dp_replicate=replicate, dp_shard=dp // replicate, cp=cp, tp=tp, ep=ep)

    def resolve_for_run(self, *, world_size: int, num_nodes: int = 1) -> MeshSizes:
        """Compute the sizes at the start of a run, and warn if experts' tokens have to travel between nodes.

        The arguments and errors are those of :meth:`resolve`. The warning is logged on global rank 0.
        """
        sizes = self.resolve(world_size=world_size, num_nodes=num_nodes)
        ranks = world_size // num_nodes
        if ranks % sizes.ep:
            rank_zero_warn(
                f"ep_size={sizes.ep} does not divide the {ranks} ranks of a node, so tokens travel between nodes to"
                f" their experts, which is much slower than within a node; prefer one of {_divisors(ranks)}."
            )
        return sizes

    def _resolve_dp_size(self, world_size: int, others: dict[str, int]) -> int:
        """Return the number of data parallel ranks. ``others`` has the sizes of all other axes by option."""
        size, product = self.dp_size, math.prod(others.values())
        if size is None or size == "auto" or (isinstance(size, int) and not isinstance(size, bool) and size <= 0):
            if world_size % product != 0:
                raise ValueError(
                    f"{_multiply(others)} = {product} does not divide the world size {world_size}; choose sizes"
                    f" that do{_suggest_size(world_size, others)}, or start {_next_multiple(world_size, product)}"
                    " processes."
                )
            return world_size // product
        dp = _check_size("dp_size", size)
        if dp * product != world_size:
            raise ValueError(
                f"{_multiply({'dp_size': dp, **others})} = {dp * product}, but the world size is {world_size};"
                f' use dp_size="auto" or start {dp * product} processes.'
            )
        return dp

    def _resolve_dp_replicate_size(self, dp: int, num_nodes: int, pp: int, calculation: str) -> int:
        """Return the number of replicas. ``calculation`` shows how ``dp`` follows from the world size."""
        # the ranks of a stage are consecutive, so a stage is on several whole nodes or on a part of one
        nodes = max(num_nodes // pp, 1)
        is_auto = self.dp_replicate_size == "auto"
        replicate = nodes if is_auto else _check_size("dp_replicate_size", self.dp_replicate_size)
        if dp % replicate != 0:
            of_stage = "" if pp == 1 else " of a pipeline stage"
            which = f"'auto' (one for each of {nodes} nodes{of_stage})" if is_auto else replicate
            raise ValueError(
                f"dp_replicate_size={which} does not divide the data parallel size {dp} (world size {calculation});"
                f" use one of {_divisors(dp)}."
            )
        return replicate


def _check_size(name: str, size: int | str | None) -> int:
    if size is None:
        return 1
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{name}={size!r} is not a number of ranks; use an integer >= 1.")
    return size


def _multiply(sizes: dict[str, int]) -> str:
    """Return the multiplication of sizes as text, such as ``"cp_size=1 x tp_size=2"``."""
    return " x ".join(f"{name}={size}" for name, size in sizes.items())


def _suggest_size(world_size: int, sizes: dict[str, int]) -> str:
    """Return ``, such as tp_size=4 or 8`` if another number for one of the sizes would be possible, or ``""``."""
    for name, size in sizes.items():
        rest, remainder = divmod(world_size, math.prod(sizes.values()) // size)
        if size == 1 or remainder:
            continue
        smaller = max(number for number in _divisors(rest) if number < size)
        larger = next((f" or {number}" for number in _divisors(rest) if number > size), "")
        return f", such as {name}={smaller}{larger}"
    return ""


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _next_multiple(number: int, factor: int) -> int:
    return (number // factor + 1) * factor
