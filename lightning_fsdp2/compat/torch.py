"""Access to private parts of torch, with reasons and possible replacements. For FSDP2, see ``fsdp.py``."""

import inspect
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import _state_dict_stager, filesystem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor, _api, _dtensor_spec, placement_types
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.torch_version import TorchVersion
from torch.utils import _python_dispatch, _pytree
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

StridedShard: Any = placement_types._StridedShard
"""Placement of weights that pack several separately sharded projections. transformers also uses it for experts."""

StorageInfo: Any = filesystem._StorageInfo
"""Class that stores a tensor's position in a checkpoint's files. ``.metadata`` files have used it since torch 2.1."""

tree_map_only: Any = _pytree.tree_map_only
"""Function that maps the leaves of one type in nested containers. Only its module is private (torch 2.11 to 2.15)."""

tree_leaves: Any = _pytree.tree_leaves
"""Function that lists the leaves of nested containers."""

tree_map_with_path: Any = _pytree.tree_map_with_path
keystr: Any = _pytree.keystr
"""Function that maps all leaves of nested containers, and also passes the path of keys to each leaf."""

TorchDispatchMode: Any = _python_dispatch.TorchDispatchMode
"""Base class of modes that see each operation below autograd. Only its module is private (torch 2.11 to 2.15)."""

is_traceable_wrapper_subclass_type: Any = _python_dispatch.is_traceable_wrapper_subclass_type
"""Function that tests whether a class is a tensor subclass that consists of other tensors."""

BatchNormBase: Any = _NormBase
"""Base class of torch's norms with running statistics."""

flex_attention_operation: Any = torch._higher_order_ops.flex_attention
"""Operation that appears in graphs when ``flex_attention`` is compiled."""


class StateDictStager(_state_dict_stager.StateDictStager):
    """Stager that copies state dicts to host memory, and reuses this memory for the next copy.

    In torch 2.11, the public ``DefaultStager`` closes its internal ``StateDictStager`` after each use, so the next use
    fails. In torch 2.13 and 2.15, the internal stager stays open.
    """

    def _offload_tensor(self, x: Tensor, memo: dict[int, Any], non_blocking: bool = False) -> Tensor:
        """Copy a tensor, even a DTensor whose local tensor begins in the middle of its storage.

        Megatron-FSDP stores many shards in one buffer. For a DTensor with such a shard, ``data_ptr()`` returns the
        offset in the buffer instead of 0. The base method in torch 2.13 mistakes such a DTensor for a plain tensor, and
        fails.
        """
        if not isinstance(x, DTensor):
            return super()._offload_tensor(x, memo, non_blocking)
        local = self.deepcopy_with_tensor_offload(x._local_tensor, memo, [], non_blocking)
        # use the constructor, because `from_local` would not leave the copy in host memory
        memo[id(x)] = copy = DTensor(local, x._spec, requires_grad=False)
        return copy


def get_operation(function: Any) -> Any:
    """Return the torch operator that ``torch.library.custom_op`` registered when it made ``function``."""
    return function._opoverload


def get_schema(operation: Any) -> Any:
    """Return the schema of an operation: its name, its arguments, and which arguments it changes in place."""
    return operation._schema


def get_forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the forward hooks of ``module``."""
    return list(module._forward_hooks.values())


def get_hooks(module: nn.Module) -> list[dict[int, Any]]:
    """Return the dicts in which ``module`` keeps its hooks of forward and backward, and their options."""
    return [
        value
        for name, value in vars(module).items()
        if name.startswith(("_forward_", "_backward_")) and "_hooks" in name and isinstance(value, dict)
    ]


def is_module_compiled(module: nn.Module) -> bool:
    """Return whether ``module`` was compiled with ``module.compile()``."""
    return module._compiled_call_impl is not None


def get_shard(tensor: DTensor) -> Tensor:
    """Return the tensor that stores this rank's shard of ``tensor``.

    ``to_local`` would instead return a view of this tensor that autograd tracks.
    """
    return tensor._local_tensor


def split_evenly(tensor: Tensor, ranks: int, dim: int) -> list[Tensor]:
    """Split ``tensor`` along ``dim`` into one shard for each of ``ranks`` ranks, as DTensor does."""
    return placement_types.Shard(dim)._split_tensor(tensor, ranks, with_padding=False)[0]


def get_storage_id(tensor: Tensor) -> int:
    """Return a number that identifies the storage of ``tensor``, even on the meta device, which has no addresses."""
    return tensor.untyped_storage()._cdata


def is_view(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a view, which keeps the memory of the viewed tensor alive."""
    return tensor._is_view()


def make_wrapper_subclass(cls: type[Tensor], like: Tensor) -> Any:
    """Make a tensor of the subclass ``cls`` without memory, with the shape, strides, dtype and device of ``like``."""
    return Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)


def call_at_end_of_backward(function: Callable[[], None]) -> None:
    """Register ``function``, so that autograd calls it once at the end of the current backward."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def finish_static_graph(wrapper: DistributedDataParallel, *, reduces_all: bool) -> None:
    """Make DDP check now whether all gradients were reduced. By default, DDP checks this in the next forward.

    Args:
        wrapper: Wrapper that has just finished a backward with gradient synchronisation.
        reduces_all: Whether to reduce all gradients before the check. DDP with a static graph does not reduce them in
            its first backward, so the caller must set this flag after that backward.
    """
    reducer: Any = wrapper.reducer
    if reduces_all:
        reducer._delay_all_reduce()
    reducer._rebuild_buckets()


def replicate(module: nn.Module, *, broadcast_buffers: bool, **options: Any) -> DistributedDataParallel:
    """Wrap ``module`` in DDP, and pass ``broadcast_buffers`` under the name that this version of torch uses.

    In torch 2.13 and 2.15, ``broadcast_buffers`` is deprecated in favour of ``forward_sync_buffers``. Even if the new
    flag is False, DDP broadcasts buffers once when it wraps the module, unless ``init_sync`` is False too.
    """
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    options["forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"] = broadcast_buffers
    return DistributedDataParallel(module, **options)


def has_own_loading(module: nn.Module) -> bool:
    """Return whether ``module`` itself has a hook or an overridden method that changes how it loads a state dict.

    Ignore torch's own hooks: FSDP2 registers some on every module with parameters. torch has no public way to list
    hooks.
    """
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    return any(not is_of_torch(function) for function in (module._load_from_state_dict, *hooks))


def is_of_torch(function: Callable[..., Any]) -> bool:
    """Return whether ``function`` is defined in torch."""
    return str(getattr(function, "__module__", "")).startswith("torch.")


def has_packed_shards() -> bool:
    """Return whether this version of DTensor can gather a weight that packs several sharded projections.

    The placement of such a weight is a ``_StridedShard``. In torch 2.11, DTensor tries to express this placement as an
    order of mesh axes, which is impossible. It raises "unable to be interpreted into a corresponding shard_order".
    """
    return hasattr(_dtensor_spec, "_StridedShardNotDecodableError")


def get_optional_function(node: Any) -> Any:
    """Return the ``torch.autograd.Function`` that made a node of the autograd graph.

    Return None for nodes of torch's own operations. torch has no public way to get the function.
    """
    return getattr(type(node), "_forward_cls", None)


def is_fsdp_pass_through(node: Any) -> bool:
    """Return whether a node of the autograd graph comes from FSDP2's identity function.

    FSDP2 inserts this function to detect the end of a unit's backward.
    """
    return get_optional_function(node) is _fsdp_param_group.RegisterPostBackwardFunction


def get_dtensor_crossing(node: Any) -> Sequence[Any] | None:
    """Return a DTensor's placements, given the node of the autograd graph that its ``to_local`` made.

    If ``to_local`` was called with ``grad_placements``, return the ``grad_placements`` instead. For any other node,
    return None.
    """
    if get_optional_function(node) is not _api._ToTorchTensor:
        return None
    return node.grad_placements or node.dtensor_spec.placements


def unflatten_mesh(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a view of a one-dimensional mesh in which its axis is split into several axes.

    FSDP2 with tensor parallelism needs several such views of the mesh of all ranks, all with the same root mesh. In
    torch 2.11 to 2.15, only ``DeviceMesh._unflatten`` makes such views. The alternative, slicing a root mesh by the
    names of axes that ``_flatten`` made, is deprecated. Replace ``_unflatten`` when torch has a public equivalent.
    """
    return mesh._unflatten(0, sizes, names)


def assert_async(condition: Tensor, message: str) -> None:
    """Check ``condition`` on the device, without making the CPU wait, and fail with ``message`` if it is false.

    ``torch._assert_async`` has no public equivalent. torchtitan uses this function too.
    """
    torch._assert_async(condition, message)


def record_memory_history(enabled: bool) -> None:
    """Start or stop recording allocations on GPUs with their stack traces. torch keeps the last 100 000 entries.

    torch documents this private function (https://pytorch.org/docs/stable/torch_cuda_memory.html).
    """
    if enabled:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def dump_memory_snapshot(path: Path) -> None:
    """Write the allocations recorded by :func:`record_memory_history`, and the current allocations, to ``path``."""
    torch.cuda.memory._dump_snapshot(str(path))


def all_gather_with_gradient(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather ``tensor`` along dim 0. In backward, each rank gets the sum of all ranks' gradients for its part.

    torch 2.13 deprecated the public ``torch.distributed.nn.functional.all_gather``, and renamed the functional
    collective that is used here.
    """
    from torch.distributed import _functional_collectives as collectives

    gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
    return collectives.wait_tensor(gather(tensor, 0, group))


def all_reduce_tensor(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of ``tensor`` over the ranks of ``group``. ``torch.compile`` can trace this function.

    torch's functional collectives are not public.
    """
    from torch.distributed import _functional_collectives as collectives

    return _wait(collectives.all_reduce(tensor.contiguous(), "sum", group))


def all_gather_tensor(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the equally sized tensors of all ranks of ``group`` along ``dim``.

    The collective always runs along dim 0, because torch 2.11 reads strides for other dims in a way that
    ``torch.compile`` cannot trace. torch 2.13 renamed the collective.
    """
    from torch.distributed import _functional_collectives as collectives

    gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
    gathered = _wait(gather(tensor.contiguous(), 0, group))
    return gathered if dim == 0 else torch.cat(gathered.chunk(group.size()), dim)


def reduce_scatter_tensor(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum ``tensor`` over the ranks of ``group``, and return this rank's part of the sum along ``dim``.

    torch 2.13 renamed the collective.
    """
    from torch.distributed import _functional_collectives as collectives

    scatter = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor
    return _wait(scatter(tensor.contiguous(), "sum", dim, group))


def all_to_all_tensor(
    tensor: Tensor,
    group: dist.ProcessGroup,
    *,
    received: list[int] | None = None,
    sent: list[int] | None = None,
) -> Tensor:
    """Send the n-th part of ``tensor`` along dim 0 to rank n of ``group``, and concatenate the received parts.

    Args:
        tensor: Parts for all ranks of the group, one after the other.
        group: Ranks that exchange parts.
        received: Number of rows to receive from each rank. None if all parts have the same size.
        sent: Number of rows to send to each rank. None if all parts have the same size.
    """
    from torch.distributed import _functional_collectives as collectives

    return _wait(collectives.all_to_all_single(tensor.contiguous(), received, sent, group))


def _wait(tensor: Tensor) -> Tensor:
    """Wait for the result of a functional collective, unless the traced graph already contains this wait.

    A second ``wait_tensor`` would prevent inductor from fusing the collective with a matrix product.
    """
    from torch.distributed import _functional_collectives as collectives

    return collectives.wait_tensor(tensor) if isinstance(tensor, collectives.AsyncCollectiveTensor) else tensor


def has_symmetric_memory(device_type: str) -> bool:
    """Return whether ranks on this type of device can read each other's memory.

    Inductor requires this to fuse collectives with matrix products.
    """
    return device_type == "cuda" and dist.is_nccl_available()


def enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Register ``group`` so that inductor fuses its collectives.

    Up to torch 2.14, inductor silently skips groups that are not registered. torch's registration function emits a
    deprecation warning, which wrongly says that the call is unnecessary (pytorch#193027, torchtitan#3869,
    torchtitan#4045, torchtitan#4634).
    """
    if TorchVersion(torch.__version__) >= "2.15":
        return
    from torch.distributed import _symmetric_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)


def get_fusion_options(visit: Callable[[torch.fx.Graph], None]) -> dict[str, Any]:
    """Return the private options that make ``torch.compile`` fuse collectives with matrix products.

    Args:
        visit: Function that inductor calls with each compiled graph. Because of such a function, inductor does not
            store graphs in its disk cache, so a later run compiles the graphs and calls ``visit`` again.
    """
    return {"_micro_pipeline_tp": True, "post_grad_custom_post_pass": visit}


def get_fusion_targets() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return two tuples of graph operations: the fused collectives, and the collectives that inductor could fuse."""
    fused, collectives = torch.ops.symm_mem, torch.ops._c10d_functional
    return (
        (fused.fused_all_gather_matmul.default, fused.fused_matmul_reduce_scatter.default),
        (collectives.all_gather_into_tensor.default, collectives.reduce_scatter_tensor.default),
    )


def is_backward_graph(graph: torch.fx.Graph) -> bool:
    """Return whether ``graph`` computes a backward. AOTAutograd names such a graph's gradient inputs ``tangents``."""
    return any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes)


@contextmanager
def compile_layers_of_many_kinds() -> Iterator[None]:
    """Allow ``torch.compile``, inside the block, to compile many different layers of one model.

    Dynamo applies one limit to the graphs of all modules that were compiled with ``module.compile()``. By default, the
    limit is eight graphs. A model with first, middle and last layers of several kinds, run with and without gradients,
    needs more.

    With activation checkpointing, a layer may replace its parameters with this rank's shards during its forward. Dynamo
    rejects this side effect, unless an option tells Dynamo not to repeat the side effect in backward.

    The options for the limit and for the side effect are not public.
    """
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=64, skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        yield


def get_graph_breaks() -> Counter[str]:
    """Return how many graph breaks Dynamo has had so far, by reason. torch has no public count."""
    from torch._dynamo.utils import counters

    return Counter(counters["graph_break"])


def get_stance() -> str:
    """Return the current stance, which ``torch.compiler.set_stance`` sets. torch has no public way to read it."""
    from torch._dynamo import eval_frame

    return eval_frame._stance.stance


def can_compile_checkpointed_collectives() -> bool:
    """Return whether torch can compile a layer in which activation checkpointing recomputes collectives on a mesh.

    torch 2.13 raises "expected all tensors_saved_with_vc_check to be Tensors, got ... DeviceMesh". torch 2.11, 2.14 and
    2.15 do not raise this error. torch 2.12 was not tested, so the result is False.
    """
    version = TorchVersion(torch.__version__)
    return version < "2.12" or version >= "2.14"


def is_in_backward() -> bool:
    """Return whether a backward is running. Any forward inside a backward recomputes checkpointed activations."""
    return torch._C._current_graph_task_id() != -1


def scale_in_float32(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply 16-bit tensors in place by a scalar in float32, with few kernel launches.

    ``torch._foreach_mul_`` either rounds the factor to 16 bits or launches a kernel for each tensor. The function that
    ``GradScaler`` calls to unscale gradients does neither, so it is used here where it supports the dtype.

    Args:
        tensors: Tensors of one 16-bit dtype on one device.
        factor: [] on the same device.
    """
    factor = factor.float()
    # the function requires this output tensor, and sets it to 1 if a value is not finite
    found = torch.zeros((), device=factor.device)
    try:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, factor)
    except NotImplementedError:  # in torch 2.11, CUDA's function has no bfloat16
        for tensor in tensors:
            tensor.copy_(tensor.float() * factor)


def has_fused_optimizers(device: torch.device) -> bool:
    """Return whether torch's optimizers support ``fused=True`` on ``device``."""
    return device.type in _get_fused_kernels_supported_devices()


def leave_unscaling_to_scaler(optimizer: Optimizer) -> None:
    """Mark a fused optimizer as one that does not unscale gradients itself, like an optimizer with ``fused=False``.

    A ``GradScaler`` then unscales the gradients before the step. Without the mark, Lightning's mixed precision does not
    allow gradient clipping, even in bfloat16, where there is no scaler.
    """
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def get_saved_tensors_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return the pack and unpack functions of the innermost active ``saved_tensors_hooks``.

    A new pair of hooks can use this function to call the active pair too. Otherwise the new pair would replace the
    active pair, and torch has no public way to avoid this.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of ``group``, after which a hanging collective raises an error.

    The timeout has to be set after the group is made, because ``DeviceMesh._unflatten``, which makes the groups, has no
    argument for it. ``set_timeout`` has been public since torch 2.15.
    """
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


def get_group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of ``group``, the shortest of its backends' timeouts. torch has no public way to read it.

    A group that is implemented in Python has no backends, and the backend of a simulated group has no options. For such
    a group, return torch's default timeout.
    """
    options = [group._get_backend(device).options for device in group._device_types]
    timeouts = [option._timeout for option in options if option is not None]
    return min(timeouts, default=dist.distributed_c10d.default_pg_timeout)


def read_flight_record() -> dict[str, Any]:
    """Return torch's record of this rank's latest gloo collectives.

    In the record, the list ``entries`` holds the collectives, oldest first. This function works with torch
    2.11 to 2.15. NCCL groups write their own record when they time out.
    """
    record: dict[str, Any] = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined]
    return record
