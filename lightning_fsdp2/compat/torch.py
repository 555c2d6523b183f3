"""Private names of torch, with the reason and what would make each unnecessary. See also ``fsdp.py``."""

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
"""The placement of packed weights: a shard of each of several parts. transformers uses it for its experts too."""

StorageInfo: Any = filesystem._StorageInfo
"""The position of a checkpoint's tensor in its file. ``.metadata`` on disk has consisted of these since torch 2.1."""

StateDictStager: Any = _state_dict_stager.StateDictStager
"""The class that copies state dicts to host memory and keeps that memory for the next copy. On torch 2.11 the public
``DefaultStager`` around it closes it after each use, and the next use fails; 2.13 and 2.15 do not close it."""

tree_map_only: Any = _pytree.tree_map_only
"""Function that maps leaves of a type in nested containers. Only its module's name is private (torch 2.11 to 2.15)."""

tree_leaves: Any = _pytree.tree_leaves
"""Function that lists the leaves of nested containers."""

tree_map_with_path: Any = _pytree.tree_map_with_path
"""Function that maps all leaves of nested containers, given the keys that lead to each."""


TorchDispatchMode: Any = _python_dispatch.TorchDispatchMode
"""The base of modes that see each operation below autograd. Only its module's name is private (torch 2.11 to 2.15)."""

is_traceable_wrapper_subclass_type: Any = _python_dispatch.is_traceable_wrapper_subclass_type
"""Function that tests whether a class is a tensor subclass that consists of other tensors."""

BatchNormBase: Any = _NormBase
"""The base class of torch's norms with running statistics."""

flex_attention_operation: Any = torch._higher_order_ops.flex_attention
"""The operation that compiled ``flex_attention`` becomes."""


def get_operation(function: Any) -> Any:
    """Return the operation of a function made by ``torch.library.custom_op``, which its calls dispatch to."""
    return function._opoverload


def get_schema(operation: Any) -> Any:
    """Return the schema of an operation: its name, its arguments and what it writes to."""
    return operation._schema


def get_forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the forward hooks of ``module``."""
    return list(module._forward_hooks.values())


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether a user's hook sees the gradient of ``parameter``."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def is_module_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def get_shard(tensor: DTensor) -> Tensor:
    """Return this rank's shard of ``tensor`` itself; ``to_local`` would return a view that autograd tracks."""
    return tensor._local_tensor


def split_evenly(tensor: Tensor, ranks: int) -> list[Tensor]:
    """Split ``tensor`` along dim 0 into the shards that a DTensor on ``ranks`` ranks has."""
    return placement_types.Shard(0)._split_tensor(tensor, ranks, with_padding=False)[0]


def get_storage_id(tensor: Tensor) -> int:
    """Return a number that identifies the storage of ``tensor`` while it lives; meta tensors have no address."""
    return tensor.untyped_storage()._cdata


def make_wrapper_subclass(cls: type[Tensor], like: Tensor) -> Any:
    """Make a tensor of subclass ``cls`` without memory, with the shape, strides, dtype and device of ``like``."""
    return Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)


def call_at_end_of_backward(function: Callable[[], None]) -> None:
    """Call ``function`` at the end of the current backward."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def finish_static_graph(wrapper: DistributedDataParallel, *, reduces_all: bool) -> None:
    """Let DDP check now, and not in the next forward, whether all gradients were reduced.

    Args:
        wrapper: Wrapper that has just run a backward with synchronisation.
        reduces_all: Whether the wrapper has a static graph and has not reduced the gradients of its first backward.
    """
    reducer: Any = wrapper.reducer
    if reduces_all:
        reducer._delay_all_reduce()
    reducer._rebuild_buckets()


def replicate(module: nn.Module, *, broadcast_buffers: bool, **options: Any) -> DistributedDataParallel:
    """Wrap ``module`` in DDP, with ``broadcast_buffers`` under the name that this version of torch wants.

    In torch 2.13 and 2.15, ``broadcast_buffers`` warns in favour of ``forward_sync_buffers``. If the new flag is
    False, buffers are still shared when the module is wrapped, unless ``init_sync=False`` is given too.
    """
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    options["forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"] = broadcast_buffers
    return DistributedDataParallel(module, **options)


def has_own_loading(module: nn.Module) -> bool:
    """Return whether custom code (a hook, overridden method) controls what ``module`` itself loads from a state dict.

    There is no public way to list hooks. FSDP2's own hooks, which every module with parameters has, do not count.
    """
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    return any(not is_of_torch(function) for function in (module._load_from_state_dict, *hooks))


def is_of_torch(function: Callable[..., Any]) -> bool:
    """Return whether torch defines ``function``."""
    return str(getattr(function, "__module__", "")).startswith("torch.")


def has_packed_shards() -> bool:
    """Return whether DTensor can gather a ``_StridedShard`` that no order of mesh axes explains, as for packed weights.

    The DTensor of torch 2.11 raises "unable to be interpreted into a corresponding shard_order".
    """
    return hasattr(_dtensor_spec, "_StridedShardNotDecodableError")


def get_optional_function(node: Any) -> Any:
    """Return the ``torch.autograd.Function`` that made a node of the autograd graph; None for torch's own operations.

    There is no public way to get the function of a node.
    """
    return getattr(type(node), "_forward_cls", None)


def is_fsdp_pass_through(node: Any) -> bool:
    """Return whether a node of the autograd graph is FSDP2's, which returns its inputs as they are.

    FSDP2 uses it to notice the end of a unit's backward.
    """
    return get_optional_function(node) is _fsdp_param_group.RegisterPostBackwardFunction


def get_dtensor_crossing(node: Any) -> Sequence[Any] | None:
    """Return the placements of the DTensor whose local part a node returns; None if it returns something else.

    If ``to_local`` was given placements of the gradient, these are returned instead.
    """
    if get_optional_function(node) is not _api._ToTorchTensor:
        return None
    return node.grad_placements or node.dtensor_spec.placements


def unflatten_mesh(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """View the one axis of ``mesh`` as several axes.

    FSDP2 with tensor parallel needs several views of one world that all share a root. ``DeviceMesh._unflatten`` (torch
    2.11 to 2.15) is the only way to get them: names made by ``_flatten`` and sliced from a root are deprecated. It can
    go once there is a public equivalent.
    """
    return mesh._unflatten(0, sizes, names)


def assert_async(condition: Tensor, message: str) -> None:
    """Fail with ``message`` on the device if ``condition`` is false; the host does not wait for it.

    ``torch._assert_async`` has no public equivalent; torchtitan guards its steps with it too.
    """
    torch._assert_async(condition, message)


def record_memory_history(enabled: bool) -> None:
    """Start or stop recording the last 100 000 allocations on GPUs, with their stacks.

    torch documents it under this private name (https://pytorch.org/docs/stable/torch_cuda_memory.html).
    """
    if enabled:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def dump_memory_snapshot(path: Path) -> None:
    """Write the record of :func:`record_memory_history` and the current allocations to ``path``."""
    torch.cuda.memory._dump_snapshot(str(path))


def all_gather_with_gradient(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather along dim 0; backward sums the gradients of all ranks.

    ``torch.distributed.nn.functional.all_gather`` is deprecated since torch 2.13, and the functional collective was
    renamed in the same version.
    """
    from torch.distributed import _functional_collectives as collectives

    gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
    return collectives.wait_tensor(gather(tensor, 0, group))


def all_reduce_tensor(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of ``tensor`` over ``group``; ``torch.compile`` can trace this.

    The functional collectives are not public.
    """
    from torch.distributed import _functional_collectives as collectives

    return _wait(collectives.all_reduce(tensor.contiguous(), "sum", group))


def all_gather_tensor(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the equally sized tensors of ``group`` along ``dim``. torch 2.13 renamed the collective.

    Along a dim other than 0, torch 2.11 reads strides in a way that ``torch.compile`` cannot trace.
    """
    from torch.distributed import _functional_collectives as collectives

    gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
    gathered = _wait(gather(tensor.contiguous(), 0, group))
    return gathered if dim == 0 else torch.cat(gathered.chunk(group.size()), dim)


def reduce_scatter_tensor(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over ``group`` and keep this rank's part along ``dim``. torch 2.13 renamed the collective."""
    from torch.distributed import _functional_collectives as collectives

    scatter = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor
    return _wait(scatter(tensor.contiguous(), "sum", dim, group))


def all_to_all_tensor(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send the n-th part of ``tensor`` (along dim 0) to rank n of ``group``, and return the parts received."""
    from torch.distributed import _functional_collectives as collectives

    return _wait(collectives.all_to_all_single(tensor.contiguous(), None, None, group))


def _wait(tensor: Tensor) -> Tensor:
    """Wait for the result of a functional collective, unless it is traced and already waits by itself.

    Inductor's pass for asynchronous tensor parallelism does not look through a second ``wait_tensor``.
    """
    from torch.distributed import _functional_collectives as collectives

    return collectives.wait_tensor(tensor) if isinstance(tensor, collectives.AsyncCollectiveTensor) else tensor


def has_symmetric_memory(device_type: str) -> bool:
    """Return whether ranks on these devices can read each other's memory, which inductor uses to fuse collectives."""
    return device_type == "cuda" and dist.is_nccl_available()


def enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Let inductor fuse the collectives of ``group``.

    Up to torch 2.14, inductor silently skips a group that was not registered, although the function that registers it
    says that calling it is unnecessary (pytorch#193027, torchtitan#3869, torchtitan#4045, torchtitan#4634).
    """
    if TorchVersion(torch.__version__) >= "2.15":
        return
    from torch.distributed import _symmetric_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)


def get_fusion_options(visit: Callable[[torch.fx.Graph], None]) -> dict[str, Any]:
    """Return the options of ``torch.compile`` that fuse collectives with matrix products; there is no public option.

    ``visit`` is then called with each graph. Inductor does not put a graph that a plain function has seen into its disk
    cache, so a later run compiles the graph and calls ``visit`` again.
    """
    return {"_micro_pipeline_tp": True, "post_grad_custom_post_pass": visit}


def get_fusion_targets() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the graph operations that are fused collectives, and the collectives that could be fused."""
    fused, collectives = torch.ops.symm_mem, torch.ops._c10d_functional
    return (
        (fused.fused_all_gather_matmul.default, fused.fused_matmul_reduce_scatter.default),
        (collectives.all_gather_into_tensor.default, collectives.reduce_scatter_tensor.default),
    )


def is_backward_graph(graph: torch.fx.Graph) -> bool:
    """Return whether ``graph`` is that of a backward: AOTAutograd names its gradient inputs ``tangents``."""
    return any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes)


@contextmanager
def compile_layers_of_many_kinds() -> Iterator[None]:
    """Let ``torch.compile`` compile many kinds of layers of one model in the block.

    Dynamo counts the graphs of all modules that were compiled with ``module.compile()`` together, and would give up at
    the eighth. More are needed for first, middle and last layers of several kinds, with gradients and without.

    Under activation checkpointing, a layer may replace its parameters by this rank's part during its forward. Dynamo
    refuses that, unless it is told not to repeat this side effect in backward.

    There is no public option for either.
    """
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=64, skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        yield


def get_graph_breaks() -> Counter[str]:
    """Return how often dynamo has broken a graph so far, by reason; there is no public count."""
    from torch._dynamo.utils import counters

    return Counter(counters["graph_break"])


def get_stance() -> str:
    """Return the stance last set by ``torch.compiler.set_stance``; there is no public way to read it."""
    from torch._dynamo import eval_frame

    return eval_frame._stance.stance


def can_compile_checkpointed_collectives() -> bool:
    """Return whether a compiled layer may contain an activation checkpoint that recomputes collectives of a DeviceMesh.

    Torch 2.13 raises "expected all tensors_saved_with_vc_check to be Tensors, got ... DeviceMesh"; 2.11, 2.14 and 2.15
    do not, and 2.12 was not tried.
    """
    version = TorchVersion(torch.__version__)
    return version < "2.12" or version >= "2.14"


def is_in_backward() -> bool:
    """Return whether this runs in a backward, where a forward is the recomputation of activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def scale_in_float32(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply 16-bit tensors in place by a scalar, in float32, with one kernel for many of them.

    ``torch._foreach_mul_`` rounds the factor to 16 bits first, or launches a kernel for each tensor. The function that
    unscales gradients for a ``GradScaler`` does neither.
    """
    found = torch.zeros((), device=factor.device)  # whether a value is not finite; this is not read
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, factor.float())


def has_fused_optimizers(device: torch.device) -> bool:
    """Return whether torch's optimizers support ``fused=True`` on ``device``; otherwise their first step fails."""
    return device.type in _get_fused_kernels_supported_devices()


def leave_unscaling_to_scaler(optimizer: Optimizer) -> None:
    """Let a ``GradScaler`` unscale gradients before the step of a fused optimizer, as for one with ``fused=False``.

    Lightning's mixed precision refuses to clip the gradients of an optimizer that unscales by itself, even in bfloat16,
    where there is no scaler.
    """
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def get_saved_tensors_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return the functions that save tensors for backward here: the hooks of the innermost ``saved_tensors_hooks``.

    Inner hooks replace the outer ones; torch has no public way to call the outer ones.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of ``group``, after which a hang becomes an error.

    ``_unflatten`` takes no timeout for the groups that it makes. The function is public since torch 2.15.
    """
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


def get_group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of ``group``, the smallest over its devices; there is no public way to read it."""
    return min(group._get_backend(device).options._timeout for device in group._device_types)


def read_flight_record() -> dict[str, Any]:
    """Return the last collectives of gloo's groups on this rank, oldest first in ``entries`` (torch 2.11 to 2.15).

    NCCL's groups write theirs by themselves when they time out.
    """
    record: dict[str, Any] = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined]
    return record
