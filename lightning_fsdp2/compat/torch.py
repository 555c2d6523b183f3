"""Use of private names of torch, with reasons and possible replacements. ``fsdp.py`` has those of FSDP2."""

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
"""Placement of packed weights, which have a shard of each of several parts. transformers also uses it for experts."""

StorageInfo: Any = filesystem._StorageInfo
"""Position of a tensor in the files of a checkpoint. The file ``.metadata`` has contained it since torch 2.1."""

StateDictStager: Any = _state_dict_stager.StateDictStager
"""Class that copies state dicts to host memory and reuses this memory for the next copy. In torch 2.11, the public
``DefaultStager`` closes it after each use, so that the next use fails. It is not closed in torch 2.13 and 2.15."""

tree_map_only: Any = _pytree.tree_map_only
"""Function that maps the leaves of one type in nested containers. Only its module is private (torch 2.11 to 2.15)."""

tree_leaves: Any = _pytree.tree_leaves
"""Function that lists the leaves of nested containers."""

tree_map_with_path: Any = _pytree.tree_map_with_path
"""Function that maps all leaves of nested containers, and also passes the path of keys to each leaf."""


TorchDispatchMode: Any = _python_dispatch.TorchDispatchMode
"""Base class of modes that see each operation below autograd. Only its module is private (torch 2.11 to 2.15)."""

is_traceable_wrapper_subclass_type: Any = _python_dispatch.is_traceable_wrapper_subclass_type
"""Function that tests whether a class is a tensor subclass that consists of other tensors."""

BatchNormBase: Any = _NormBase
"""Base class of torch's norms with running statistics."""

flex_attention_operation: Any = torch._higher_order_ops.flex_attention
"""Operation that appears in graphs when ``flex_attention`` is compiled."""


def get_operation(function: Any) -> Any:
    """Return the operation that a function made by ``torch.library.custom_op`` calls."""
    return function._opoverload


def get_schema(operation: Any) -> Any:
    """Return the schema of an operation: its name, its arguments, and which of them it changes."""
    return operation._schema


def get_forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the forward hooks of ``module``."""
    return list(module._forward_hooks.values())


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether a hook on the gradient of ``parameter`` was registered."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def is_module_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called before."""
    return module._compiled_call_impl is not None


def get_shard(tensor: DTensor) -> Tensor:
    """Return this rank's shard of ``tensor``, without the view that ``to_local`` would make for autograd."""
    return tensor._local_tensor


def split_evenly(tensor: Tensor, ranks: int) -> list[Tensor]:
    """Split ``tensor`` along dim 0 into the shards of a DTensor on this number of ranks."""
    return placement_types.Shard(0)._split_tensor(tensor, ranks, with_padding=False)[0]


def get_storage_id(tensor: Tensor) -> int:
    """Return a number that identifies the storage of ``tensor``, also for meta tensors, which have no address."""
    return tensor.untyped_storage()._cdata


def make_wrapper_subclass(cls: type[Tensor], like: Tensor) -> Any:
    """Make a tensor of the subclass ``cls`` that has no memory but the shape, strides, dtype and device of ``like``."""
    return Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)


def call_at_end_of_backward(function: Callable[[], None]) -> None:
    """Register a function that is called once at the end of the current backward."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def finish_static_graph(wrapper: DistributedDataParallel, *, reduces_all: bool) -> None:
    """Make DDP check now whether all gradients were reduced; by default it checks in the next forward.

    Args:
        wrapper: Wrapper that has just finished a backward with gradient synchronisation.
        reduces_all: Whether to reduce all gradients now. A wrapper with a static graph does not reduce them in its
            first backward.
    """
    reducer: Any = wrapper.reducer
    if reduces_all:
        reducer._delay_all_reduce()
    reducer._rebuild_buckets()


def replicate(module: nn.Module, *, broadcast_buffers: bool, **options: Any) -> DistributedDataParallel:
    """Wrap ``module`` in DDP, and pass ``broadcast_buffers`` under the name that this version of torch uses.

    In torch 2.13 and 2.15, ``broadcast_buffers`` is deprecated in favour of ``forward_sync_buffers``. If the new flag
    is False, buffers are still broadcast once when the module is wrapped, unless ``init_sync`` is False too.
    """
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    options["forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"] = broadcast_buffers
    return DistributedDataParallel(module, **options)


def has_own_loading(module: nn.Module) -> bool:
    """Return whether a hook or an overridden method changes how ``module`` itself loads a state dict.

    torch has no public way to list hooks. Hooks of torch itself do not count: FSDP2 registers some on every module with
    parameters.
    """
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    return any(not is_of_torch(function) for function in (module._load_from_state_dict, *hooks))


def is_of_torch(function: Callable[..., Any]) -> bool:
    """Return whether torch defines ``function``."""
    return str(getattr(function, "__module__", "")).startswith("torch.")


def has_packed_shards() -> bool:
    """Return whether DTensor can gather the ``_StridedShard`` of packed weights, which fits no order of mesh axes.

    In torch 2.11, DTensor raises "unable to be interpreted into a corresponding shard_order".
    """
    return hasattr(_dtensor_spec, "_StridedShardNotDecodableError")


def get_optional_function(node: Any) -> Any:
    """Return the ``torch.autograd.Function`` that made a node of the autograd graph.

    The result is None for nodes of torch's own operations. torch has no public way to get the function.
    """
    return getattr(type(node), "_forward_cls", None)


def is_fsdp_pass_through(node: Any) -> bool:
    """Return whether a node of the autograd graph is FSDP2's own, which returns its inputs unchanged.

    FSDP2 uses this node to notice the end of a unit's backward.
    """
    return get_optional_function(node) is _fsdp_param_group.RegisterPostBackwardFunction


def get_dtensor_crossing(node: Any) -> Sequence[Any] | None:
    """Return the placements of the DTensor if a node of the autograd graph comes from ``DTensor.to_local``, else None.

    If ``to_local`` was called with placements for the gradient, return these instead.
    """
    if get_optional_function(node) is not _api._ToTorchTensor:
        return None
    return node.grad_placements or node.dtensor_spec.placements


def unflatten_mesh(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a view of a one-dimensional mesh in which its axis is split into several axes.

    FSDP2 with tensor parallelism needs several such views of the world that share one root mesh. In torch 2.11 to 2.15,
    only ``DeviceMesh._unflatten`` makes them: slicing names made by ``_flatten`` from a root is deprecated. A public
    equivalent would replace it.
    """
    return mesh._unflatten(0, sizes, names)


def assert_async(condition: Tensor, message: str) -> None:
    """Fail with ``message`` on the device if ``condition`` is false. The CPU does not wait for the check.

    ``torch._assert_async`` has no public equivalent. torchtitan uses it too.
    """
    torch._assert_async(condition, message)


def record_memory_history(enabled: bool) -> None:
    """Start or stop recording the last 100 000 allocations on GPUs with their stack traces.

    torch documents this private function (https://pytorch.org/docs/stable/torch_cuda_memory.html).
    """
    if enabled:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def dump_memory_snapshot(path: Path) -> None:
    """Write the allocations that :func:`record_memory_history` has recorded, and the current ones, to ``path``."""
    torch.cuda.memory._dump_snapshot(str(path))


def all_gather_with_gradient(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather ``tensor`` along dim 0, and sum the gradients of all ranks in backward.

    In torch 2.13, ``torch.distributed.nn.functional.all_gather`` was deprecated and the functional collective was
    renamed.
    """
    from torch.distributed import _functional_collectives as collectives

    gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
    return collectives.wait_tensor(gather(tensor, 0, group))


def all_reduce_tensor(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of ``tensor`` over ``group``. ``torch.compile`` can trace this function.

    torch's functional collectives are not public.
    """
    from torch.distributed import _functional_collectives as collectives

    return _wait(collectives.all_reduce(tensor.contiguous(), "sum", group))


def all_gather_tensor(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the equally sized tensors of all ranks of ``group`` along ``dim``.

    torch 2.13 renamed the collective. It always runs along dim 0 here: for other dims, torch 2.11 reads strides in a
    way that ``torch.compile`` cannot trace.
    """
    from torch.distributed import _functional_collectives as collectives

    gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
    gathered = _wait(gather(tensor.contiguous(), 0, group))
    return gathered if dim == 0 else torch.cat(gathered.chunk(group.size()), dim)


def reduce_scatter_tensor(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum ``tensor`` over ``group`` and return this rank's part along ``dim``. torch 2.13 renamed the collective."""
    from torch.distributed import _functional_collectives as collectives

    scatter = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor
    return _wait(scatter(tensor.contiguous(), "sum", dim, group))


def all_to_all_tensor(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send the n-th part of ``tensor`` along dim 0 to rank n of ``group``, and return the received parts."""
    from torch.distributed import _functional_collectives as collectives

    return _wait(collectives.all_to_all_single(tensor.contiguous(), None, None, group))


def _wait(tensor: Tensor) -> Tensor:
    """Wait for the result of a functional collective, unless the traced graph already contains this wait.

    A second ``wait_tensor`` would prevent inductor from fusing the collective with a matrix product.
    """
    from torch.distributed import _functional_collectives as collectives

    return collectives.wait_tensor(tensor) if isinstance(tensor, collectives.AsyncCollectiveTensor) else tensor


def has_symmetric_memory(device_type: str) -> bool:
    """Return whether ranks on this type of device can read each other's memory. Inductor needs it for fusion."""
    return device_type == "cuda" and dist.is_nccl_available()


def enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Register ``group`` so that inductor fuses its collectives.

    Up to torch 2.14, inductor silently skips groups that are not registered. The deprecation warning of the registering
    function wrongly says that the call is unnecessary (pytorch#193027, torchtitan#3869, torchtitan#4045,
    torchtitan#4634).
    """
    if TorchVersion(torch.__version__) >= "2.15":
        return
    from torch.distributed import _symmetric_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)


def get_fusion_options(visit: Callable[[torch.fx.Graph], None]) -> dict[str, Any]:
    """Return the options with which ``torch.compile`` fuses collectives with matrix products; they are not public.

    Args:
        visit: Function that is called with each compiled graph. With such a function, inductor does not store graphs in
            its disk cache. A later run therefore compiles them again and calls ``visit`` again.
    """
    return {"_micro_pipeline_tp": True, "post_grad_custom_post_pass": visit}


def get_fusion_targets() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return two tuples of graph operations: the fused collectives, and the collectives that could be fused."""
    fused, collectives = torch.ops.symm_mem, torch.ops._c10d_functional
    return (
        (fused.fused_all_gather_matmul.default, fused.fused_matmul_reduce_scatter.default),
        (collectives.all_gather_into_tensor.default, collectives.reduce_scatter_tensor.default),
    )


def is_backward_graph(graph: torch.fx.Graph) -> bool:
    """Return whether ``graph`` computes a backward: AOTAutograd names the gradient inputs ``tangents``."""
    return any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes)


@contextmanager
def compile_layers_of_many_kinds() -> Iterator[None]:
    """Allow ``torch.compile``, inside the block, to compile many different layers of one model.

    Dynamo has one limit for the graphs of all modules that were compiled with ``module.compile()``, and gives up after
    eight graphs. More are needed for first, middle and last layers of several kinds, with gradients and without.

    With activation checkpointing, a layer may replace its parameters by this rank's part during its forward. Dynamo
    refuses this side effect, unless an option says that it need not be repeated in backward.

    Neither option is public.
    """
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=64, skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        yield


def get_graph_breaks() -> Counter[str]:
    """Return the number of graph breaks in dynamo so far, by reason. torch has no public count."""
    from torch._dynamo.utils import counters

    return Counter(counters["graph_break"])


def get_stance() -> str:
    """Return the stance that ``torch.compiler.set_stance`` has set. torch has no public way to read it."""
    from torch._dynamo import eval_frame

    return eval_frame._stance.stance


def can_compile_checkpointed_collectives() -> bool:
    """Return whether a layer can be compiled if activation checkpointing inside it recomputes collectives on a mesh.

    torch 2.13 raises "expected all tensors_saved_with_vc_check to be Tensors, got ... DeviceMesh". torch 2.11, 2.14 and
    2.15 have no such error. torch 2.12 was not tested.
    """
    version = TorchVersion(torch.__version__)
    return version < "2.12" or version >= "2.14"


def is_in_backward() -> bool:
    """Return whether the caller runs inside a backward. A forward there is a recomputation of a checkpoint."""
    return torch._C._current_graph_task_id() != -1


def scale_in_float32(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply 16-bit tensors in place by a scalar in float32, with few kernels.

    ``torch._foreach_mul_`` either rounds the factor to 16 bits or launches a kernel for each tensor. The function with
    which a ``GradScaler`` unscales gradients does neither.
    """
    found = torch.zeros((), device=factor.device)  # says whether a value is not finite; it is not read here
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, factor.float())


def has_fused_optimizers(device: torch.device) -> bool:
    """Return whether torch's optimizers support ``fused=True`` on ``device``."""
    return device.type in _get_fused_kernels_supported_devices()


def leave_unscaling_to_scaler(optimizer: Optimizer) -> None:
    """Mark a fused optimizer as one that does not unscale gradients itself, like an optimizer with ``fused=False``.

    A ``GradScaler`` then unscales them before the step. Without the mark, Lightning's mixed precision refuses to clip
    gradients, even in bfloat16, where there is no scaler.
    """
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def get_saved_tensors_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return the pack and unpack functions of the innermost active ``saved_tensors_hooks``.

    A new pair of hooks replaces the outer pair. torch has no public way to call the outer pair as well.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of ``group``, after which a hanging collective raises an error.

    ``_unflatten`` has no argument for the timeout of the groups that it makes. ``set_timeout`` is public since torch
    2.15.
    """
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


def get_group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of ``group``: the shortest one among its devices. torch has no public way to read it."""
    return min(group._get_backend(device).options._timeout for device in group._device_types)


def read_flight_record() -> dict[str, Any]:
    """Return the record of the last collectives of gloo groups on this rank, with the oldest first in ``entries``.

    It works with torch 2.11 to 2.15. NCCL groups write their own record when they time out.
    """
    record: dict[str, Any] = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined]
    return record
