"""Checks of the parameters that a strategy is to shard."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fsdp2.compat.gradients import has_gradient_hooks
from lightning_fsdp2.compat.torch import get_storage_id
from lightning_fsdp2.modules.kept_parameters import KeptParameter
from lightning_fsdp2.modules.structure import get_entrances, get_parameter_names, get_parameter_owners
from lightning_fsdp2.modules.wrapping import wrap_method
from lightning_fsdp2.ranks.failures import list_names


def check_shardable(model: nn.Module, sharder: str) -> None:
    """Refuse parameters that cannot be sharded, and embeddings with sparse gradients.

    A parameter cannot be sharded if it has no dimension, or if it shares elements with another parameter. FSDP2 cannot
    shard parameters without elements either.

    Args:
        model: Model that is to be sharded.
        sharder: "FSDP2" or "Megatron-FSDP".

    Raises:
        ValueError: If the model has such parameters or embeddings; the message names them and ``sharder``.
    """
    names = get_parameter_names(model)
    if scalars := [names[parameter] for parameter in get_parameter_owners(model) if parameter.ndim == 0]:
        raise ValueError(
            f"{sharder} shards along dim 0, which the parameters {', '.join(scalars)} do not have; make each a 1-D"
            " parameter of one element (`nn.Parameter(torch.ones(1))`), or a buffer if it is not trained."
        )
    empty = [names[parameter] for parameter in get_parameter_owners(model) if parameter.numel() == 0]
    if empty and sharder == "FSDP2":
        raise ValueError(
            f"{sharder} cannot shard parameters without elements, such as {', '.join(empty)}; leave them out, or make"
            " them buffers."
        )
    if pair := _find_optional_views(list(get_parameter_owners(model))):
        first, second = (names[parameter] for parameter in pair)
        raise ValueError(
            f"The parameters {first} and {second} share memory, and would be trained as two separate weights, because"
            f" {sharder} gives each its own shards; use one parameter in both places, and take its part or its"
            " transpose in the forward."
        )
    embeddings = [
        (name, part) for name, part in model.named_modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)
    ]
    if sparse := [name for name, part in embeddings if part.sparse and part.weight.requires_grad]:
        raise ValueError(
            f"{sharder} reduces dense gradients, but the gradients of the embeddings {', '.join(sparse)} are sparse;"
            " build them with sparse=False, or train under a strategy that does not shard."
        )


def _find_optional_views(parameters: Sequence[nn.Parameter]) -> tuple[nn.Parameter, nn.Parameter] | None:
    """Return two parameters that share an element, if there are any."""
    plain = [p for p in parameters if not isinstance(p, DTensor) and p.numel()]
    ranges = sorted((*_get_range(p), number) for number, p in enumerate(plain))
    begun: list[tuple[int, int, int, int]] = []
    for storage, start, end, number in ranges:
        # ranges overlap where parameters are parts of the columns of one packed weight, but elements do not
        begun = [other for other in begun if other[0] == storage and other[2] > start]
        for *_, other in begun:
            if np.shares_memory(_describe_layout(plain[other]), _describe_layout(plain[number])):
                return plain[other], plain[number]
        begun.append((storage, start, end, number))
    return None


def _get_range(tensor: Tensor) -> tuple[int, int, int]:
    """Return the storage of ``tensor``, and the range of bytes in it from the first to the last element."""
    last: Any = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return get_storage_id(tensor), start, start + (last + 1) * tensor.itemsize


def _describe_layout(tensor: Tensor) -> Any:
    """Return an array that lies in imaginary memory as ``tensor`` lies in its storage. It must not be read."""
    layout = {
        "version": 3,
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
        "typestr": f"|V{tensor.itemsize}",
        "data": (1 + tensor.storage_offset() * tensor.itemsize, True),  # no address is 0
    }
    return np.asarray(SimpleNamespace(__array_interface__=layout))


def check_no_hooks(model: nn.Module, *, remedy: str = "Change") -> None:
    """Refuse parameters with hooks on their gradients.

    Args:
        model: Model that is to be sharded.
        remedy: Beginning of the sentence about gradients that ends the message.

    Raises:
        ValueError: If the model has such parameters; the message names them.
    """
    names = get_parameter_names(model)
    hooked = [names[parameter] for parameter in get_parameter_owners(model) if has_gradient_hooks(parameter)]
    if hooked:
        raise ValueError(
            f"The parameters {', '.join(hooked)} have hooks (`register_hook`). These would be lost, because sharding"
            f" replaces the parameters. {remedy} gradients in `on_before_optimizer_step`."
        )


def explain_kept_parameters(root: nn.Module, kept: Iterable[KeptParameter]) -> None:
    """Make methods of ``root`` that use kept parameters like whole tensors fail with an error that names them.

    Call this function before modules are sharded. A root without kept parameters is left alone.
    """
    names = dict.fromkeys(place.name for place in kept if not place.is_id)
    for method in get_entrances(root) if names else ():
        wrap_method(root, partial(_explain, list(names)), method)


def _explain(names: list[str], method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    try:
        return method(*args, **kwargs)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise RuntimeError(
            "A sharded parameter was combined with a whole tensor. Objects outside of modules, such as dicts, lists,"
            f" partials and closures, keep parameters: {list_names(names)}. A parameter is whole only in the forward of"
            " the module that owns it, so call this module. To use a weight twice, as a tied head does, give it to a"
            " second module: `self.head.weight = self.embedding.weight`."
        ) from error
