"""Megatron-FSDP, NVIDIA's package: parameters, gradients and optimizer states in flat buffers that ranks share.

The package wraps a model and swaps its parameters: *raw* ones, which it gathers, for forward and backward;
*distributed* ones, DTensors whose shards are whole rows of uneven number, for the optimizer and for checkpoints. It is
driven here step by step, since what it does by itself depends on what a model returns (hooks look for tensors in it)
and on the order in which optimizers and schedules are made.
"""

import importlib.util
import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fsdp2.mesh import DP_CP, DP_REPLICATE, DP_SHARD_CP, TENSOR_PARALLEL, get_mesh
from lightning_fsdp2.parallel.structure import get_class_name, get_layer_lists
from lightning_fsdp2.parallel.uneven_shards import UNEVEN_SHARD

HAVE_MEGATRON_FSDP = importlib.util.find_spec("megatron_fsdp") is not None

_INSTALL = 'pip install "lightning-fsdp2[megatron]"'


def apply_megatron_fsdp(
    model: nn.Module,
    device_mesh: DeviceMesh,
    *,
    device: torch.device,
    unit_classes: Sequence[type[nn.Module]],
    zero_dp_strategy: int,
    main_params_dtype: torch.dtype | None,
    main_grads_dtype: torch.dtype | None,
    **options: Any,
) -> Any:
    """Wrap ``model``, and install its distributed parameters.

    Args:
        model: On ``device``, in the dtype of compute, the same on every rank.
        device_mesh: A view of :func:`~lightning_fsdp2.create_device_mesh`.
        device: This rank's.
        unit_classes: Modules of these classes are gathered as one.
        zero_dp_strategy: 0 to 3.
        main_params_dtype: Of the weights that the optimizer sees; None for that of compute.
        main_grads_dtype: Of gradients that are added up and reduced; None for that of compute.
        **options: Others of ``megatron_fsdp.fully_shard_model``, for those that the installed version has.

    Returns:
        ``megatron_fsdp.MegatronFSDP``, to be called in place of ``model``.
    """
    package: Any = import_megatron_fsdp()
    known = inspect.signature(package.fully_shard_model).parameters
    missing = [name for name, value in options.items() if value and name not in known]
    if missing:
        raise ValueError(
            f"{missing[0]}={options[missing[0]]!r}: megatron-fsdp {_get_version()} has no such option; leave it"
            " out, or install a version that has it."
        )
    axes = (DP_REPLICATE, DP_SHARD_CP, TENSOR_PARALLEL)
    view = get_mesh(device_mesh, axes)
    # of the same groups, but named so that its tensors are known by it
    mesh = DeviceMesh.from_group(
        [view.get_group(axis) for axis in axes],
        view.device_type,
        mesh=view.mesh,
        mesh_dim_names=(DP_REPLICATE, UNEVEN_SHARD, TENSOR_PARALLEL),
    )
    if mesh.size(0) > 1:
        options["dp_outer_dim"] = DP_REPLICATE
        options["hybrid_fsdp_group"] = get_mesh(device_mesh, DP_CP).get_group()
    return package.fully_shard_model(
        model,
        device_mesh=mesh,
        dp_shard_dim=UNEVEN_SHARD,
        tp_dim=TENSOR_PARALLEL,
        fsdp_unit_modules=list(unit_classes),
        zero_dp_strategy=zero_dp_strategy,
        device=device,
        mixed_precision_policy=package.MixedPrecisionPolicy(
            main_params_dtype=main_params_dtype, main_grads_dtype=main_grads_dtype
        ),
        **{name: value for name, value in options.items() if name in known},
    )


def import_megatron_fsdp() -> Any:
    """Import the package.

    Raises:
        ImportError: When it is not installed, or too old.
    """
    if not HAVE_MEGATRON_FSDP:
        raise ImportError(f"Megatron-FSDP is a package of its own, which is not installed: {_INSTALL}.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*(Transformer Engine|Apex)")
        import megatron_fsdp
    if not hasattr(megatron_fsdp, "MixedPrecisionPolicy"):
        raise ImportError(f"megatron-fsdp {_get_version()} is too old; {_INSTALL}.")
    return megatron_fsdp


def get_unit_classes(model: nn.Module) -> list[type[nn.Module]]:
    """The classes of the layers of ``model``, wherever they hang.

    Raises:
        ValueError: When it has none.
    """
    classes = {type(layer): None for layers in get_layer_lists(model) for layer in layers}
    if not classes:
        raise ValueError(
            f"{get_class_name(model)} has no list of layers to gather one by one; name the classes of its parts in"
            " MegatronFSDPConfig(megatron_fsdp_unit_modules=[...]), or use zero_dp_strategy=2."
        )
    return list(classes)


def attach_optimizer(wrapper: Any, optimizer: Optimizer) -> None:
    """Let steps of ``optimizer`` reach the parameters that are computed with, and its ``zero_grad`` the buffers.

    In place of ``megatron_fsdp.fully_shard_optimizer``, which up to 0.6.1 begins with a step that moves weights
    (https://github.com/NVIDIA/Megatron-LM/issues/5974), and undoes what a schedule has put around ``step``.
    """
    zero_grad = optimizer.zero_grad

    def zero_all(set_to_none: bool = True) -> None:
        zero_grad(set_to_none)
        wrapper.zero_grad_buffer()

    def install_weights(*args: Any) -> None:
        wrapper.install_optimized_model_weights()
        # what a call between backward and step has gathered would be taken for the new weights
        wrapper.synchronize_param_gather()

    optimizer.zero_grad = zero_all  # type: ignore[method-assign]
    optimizer.register_step_post_hook(install_weights)


def prepare_for_backward(wrapper: Any) -> None:
    """To be called before a backward; the package leaves it to a hook that looks for tensors in the model's output."""
    install_raw_parameters(wrapper)
    wrapper.pre_backward()


def finish_backward(wrapper: Any) -> None:
    """To be called behind a backward: reduce what is left, and behind the last of a step install the gradients."""
    wrapper.post_backward()
    if wrapper.model_auto_sync:
        _fill_empty_gradients(wrapper.module)


def install_distributed_parameters(wrapper: Any) -> None:
    """Let the model hold the parameters that optimizers and checkpoints see."""
    wrapper._replace_param_with_distributed_if_needed()


def install_raw_parameters(wrapper: Any) -> None:
    """Let the model hold the parameters that it computes with."""
    wrapper._replace_param_with_raw_if_needed()


@contextmanager
def defer_sync(wrapper: Any) -> Iterator[None]:
    """A micro-batch that no optimizer step follows."""
    # not by its setter, which warns each time
    wrapper.model_auto_sync = False
    try:
        yield
    finally:
        wrapper.model_auto_sync = True


def _fill_empty_gradients(model: nn.Module) -> None:
    """Ranks without a row of a parameter get no gradient for it, and would miss the collectives of the others."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None and isinstance(parameter, DTensor):
            parameter.grad = torch.zeros_like(parameter)


def _get_version() -> str:
    try:
        return version("megatron-fsdp")
    except PackageNotFoundError:
        return "(of unknown version)"
