"""Advice for errors of torch and Lightning that do not name their cause."""

from collections.abc import Sequence
from itertools import takewhile
from traceback import walk_tb
from types import CodeType, FrameType, ModuleType

import torch
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import grad_norm
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from lightning_fsdp2.strategies.launch.rendezvous import say_who_answers

_PEER_IS_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "No route to host",
    "remote server shutdown",
    "remote process exited",
    "Timed out waiting",
    "collective operation timeout",
)
"""Texts in the errors of gloo, NCCL and the store when another rank is gone or does not answer in time."""

_PEER_IS_LATE = ("Timed out waiting", "collective operation timeout")
"""Those of them for a rank that does not answer in time, as ranks do that wait in different collectives."""


_CALLS_OF_MODULES = ("forward", "_call_impl", "training_step", "validation_step", "test_step", "predict_step")
"""Functions in which units gather their weights. Other code, such as a hook, sees shards."""

_BACKWARDS = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_SHARE_NUMBERS = (
    "If all ranks answer, they may have run different parts of the model. If random numbers choose the parts, such as"
    ' the layers that a step skips, set random_numbers="shared" of the strategy: by default, each data parallel rank'
    " draws its own."
)

_GATHER_WEIGHTS = "gather them first: `with torch.no_grad(), lightning_fsdp2.parallelizer.unshard_fsdp2_model(module):`"

_WHOLE_PENALTY = (
    "The loss of a batch was combined with a value of sharded weights (a DTensor), such as a penalty. Use `+`, `-`, `*`"
    " or `/` for it, not in place, as in `loss + 0.1 * penalty`, or first make the value whole:"
    " `penalty.full_tensor()`."
)


_REMEDIES_BY_TEXT = (
    (
        ("is a view and its base or another view of its base has been modified inplace",),
        "Under tensor parallelism, the forward of a layer computes with views of its weights. If it changes a weight in"
        " place, change it between steps instead, as in `on_train_batch_start`, or use tp_size=1.",
    ),
    (
        ("setStorage", "storage of size 0"),
        "The backward needs weights that were freed after their forward. One possible cause is a gradient of a gradient"
        " (`create_graph=True`): sharded weights have no second-order gradients, so train such a loss under a strategy"
        " that does not shard. Another possible cause is a module whose forward reads another module's weights without"
        " calling that module: under MegatronFSDPStrategy, name the class that contains both modules in"
        " `megatron_fsdp_unit_modules`, or use `zero_dp_strategy=2`.",
    ),
    (
        ("can't start new thread",),
        "This process may start no more threads or processes. Raise the limit (`ulimit -u`, or `pids` of the container"
        " or the SLURM job), or start fewer: a smaller `num_workers` of the data loaders, `devices`, or"
        " OMP_NUM_THREADS.",
    ),
)
"""Parts of a message that occur together, and the remedy."""


def add_remedy(
    exception: BaseException,
    hosts: Sequence[str],
    *,
    context_parallel: bool = False,
    own_random_numbers: bool = False,
) -> None:
    """Append advice to the message of ``exception``, if its cause is known; see :func:`get_optional_remedy`."""
    remedy = get_optional_remedy(
        exception, hosts, context_parallel=context_parallel, own_random_numbers=own_random_numbers
    )
    if remedy is not None:
        exception.args = (f"{exception}\n{remedy}",)


def get_optional_remedy(
    exception: BaseException,
    hosts: Sequence[str],
    *,
    context_parallel: bool = False,
    own_random_numbers: bool = False,
) -> str | None:
    """Return advice on an error of torch or Lightning that does not name its cause, or None if no advice is known.

    Args:
        exception: Error that ended a stage.
        hosts: Host names of all ranks. Empty if the ranks have not connected yet.
        context_parallel: Whether each rank computes a part of every sequence.
        own_random_numbers: Whether data parallel ranks that gather weights together draw different random numbers.
    """
    if "mixed torch.Tensor and DTensor" in str(exception):
        return _get_remedy_for_mixed_tensors(exception)
    if isinstance(exception, AssertionError) and _is_raised_in_dtensor(exception):
        return _WHOLE_PENALTY  # `loss += penalty` fails without a message
    if "must have the same mesh" in str(exception) and _find_calls(clip_grad, exception):
        return (
            "torch's functions that clip gradients cannot add up norms over several meshes, such as those of experts"
            " and of other weights. Use `Trainer(gradient_clip_val=...)`, or `lightning_fsdp2.clip_grad_norm_` in your"
            " own code."
        )
    if context_parallel and _is_raised_in_loss(exception):
        return (
            "Under context parallelism (cp_size > 1), logits hold this rank's part of each sequence. Pass `labels` to"
            " the model and use its loss, or compute the loss from this rank's labels or from gathered logits, as"
            " docs/context_parallel.md shows."
        )
    for texts, remedy in _REMEDIES_BY_TEXT:
        if all(text in str(exception) for text in texts):
            return remedy
    if isinstance(exception, RuntimeError) and len(hosts) > 1 and _contains(exception, _PEER_IS_LOST):
        return _get_remedy_for_lost_ranks(exception, hosts, own_random_numbers)
    if is_raised_in(grad_norm.__code__, exception):
        return (
            "Lightning's grad_norm cannot add up the norms of sharded gradients. Use the callback"
            " `lightning_fsdp2.callbacks.GradientNorm`, and for a single parameter `p.grad.norm().full_tensor()` on all"
            " ranks of its pipeline stage."
        )
    return None


def _contains(exception: BaseException, texts: Sequence[str]) -> bool:
    return any(text in str(exception) for text in texts)


def _get_remedy_for_lost_ranks(exception: BaseException, hosts: Sequence[str], own_random_numbers: bool) -> str:
    remedy = f"Another rank has ended or no longer answers. {say_who_answers(hosts)}"
    may_differ = own_random_numbers and _contains(exception, _PEER_IS_LATE) and _is_raised_in_step(exception)
    return f"{remedy} {_SHARE_NUMBERS}" if may_differ else remedy


def _get_remedy_for_mixed_tensors(exception: BaseException) -> str:
    """Return advice on an operation on a plain tensor and a sharded one, by the code that called the operation."""
    if _is_raised_in_loss(exception):
        return (
            "Under `loss_parallel`, the logits are sharded over the vocabulary, which torch's losses do not accept."
            " Pass `labels` to the model and use its loss, or use lightning_fsdp2.token_mean_loss, or set"
            " loss_parallel=False."
        )
    frames = [frame for frame, _ in walk_tb(exception.__traceback__)]
    if _is_raised_by_autograd(frames):
        return _WHOLE_PENALTY
    for frame in reversed(frames):
        if frame.f_code.co_name in _CALLS_OF_MODULES:
            break
        caller = frame.f_locals.get("self")
        if frame.f_code.co_name == "step" and isinstance(caller, Optimizer):
            return (
                f"The step of {type(caller).__name__} mixes sharded parameters with whole tensors. Use an optimizer"
                " whose states are made from the parameters, such as those of torch.optim, or a strategy that does not"
                " shard."
            )
        if frame.f_globals.get("__name__") == call.__name__:
            return (
                "Outside of a forward, parameters and their gradients are sharded (DTensors). In hooks, make other"
                " tensors from them, as with `torch.zeros_like(p.grad)` or `torch.randn_like(p.grad)`, or read the"
                f" whole value with `p.grad.full_tensor()` on all ranks. To compute with weights, {_GATHER_WEIGHTS}."
            )
    return (
        "A part of a sharded module was used outside of its unit's forward. Call the model or a whole layer; or, to"
        f" read weights, {_GATHER_WEIGHTS}; or, to train through a"
        " method other than `forward`, make this method gather the weights, in `on_fit_start`:"
        ' `torch.distributed.fsdp.register_fsdp_forward_method(self.vae, "encode")`.'
    )


def _is_raised_by_autograd(frames: Sequence[FrameType]) -> bool:
    """Return whether autograd raised an error in backward, and not in a hook of the user's."""
    names = [frame.f_globals.get("__name__", "").partition(".")[0] for frame in reversed(frames)]
    own = len(list(takewhile(lambda name: name in ("torch", __name__.partition(".")[0]), names)))
    return any(frame.f_code in _BACKWARDS for frame in frames[len(frames) - own :])


def _is_raised_in_dtensor(exception: BaseException) -> bool:
    frames = [frame for frame, _ in walk_tb(exception.__traceback__)]
    return any(frame.f_globals.get("__name__", "").startswith(f"{DTensor.__module__}.") for frame in frames[-1:])


def _is_raised_in_step(exception: BaseException) -> bool:
    """Return whether a forward of a training step, or its backward, was running when ``exception`` was raised."""
    names = {frame.f_code.co_name for frame, _ in walk_tb(exception.__traceback__)}
    return not names.isdisjoint(("training_step", "backward", "manual_backward"))


def _is_raised_in_loss(exception: BaseException) -> bool:
    return any("loss" in name or "cross_entropy" in name for name in _find_calls(functional, exception))


def _find_calls(module: ModuleType, exception: BaseException) -> list[str]:
    """Return the names of the functions of ``module`` that were running when ``exception`` was raised."""
    frames = [frame for frame, _ in walk_tb(exception.__traceback__)]
    return [frame.f_code.co_name for frame in frames if frame.f_globals.get("__name__") == module.__name__]


def is_raised_in(code: CodeType, exception: BaseException) -> bool:
    """Return whether ``exception`` comes directly from the function with the code object ``code``."""
    return [frame.f_code for frame, _ in walk_tb(exception.__traceback__)][-1:] == [code]
