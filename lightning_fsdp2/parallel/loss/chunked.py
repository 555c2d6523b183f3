"""Cross entropy of a causal language model that computes the logits of only one chunk of positions at a time.

With a vocabulary of 128 thousand tokens, the logits of a sequence are by far the largest tensor of a training step. To
avoid this tensor, a single forward of the head goes through the positions chunk by chunk. It computes the token losses
from each chunk's logits, and then frees these logits. Backward recomputes the logits of each chunk.

All chunks are computed in one forward of the head, so FSDP2 gathers the head's weights only once. The model's own
forward calls the head, so all hooks run as usual.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_fsdp2.compat.torch import get_forward_hooks
from lightning_fsdp2.modules.structure import (
    get_class_name,
    get_hf_models,
    get_optional_head,
    is_hf_model,
)
from lightning_fsdp2.modules.stubs import is_head_elsewhere
from lightning_fsdp2.parallel.loss.cross_entropy import keep_logits_sharded, token_cross_entropy
from lightning_fsdp2.ranks.random_state import get_torch_random_state, set_torch_random_state

CHUNK_SIZE = 1024
"""Number of positions in a chunk, in all sequences together. Matrix products of this size keep an accelerator busy."""

_POINTWISE = {"add", "clamp", "contiguous", "div", "float", "mul", "neg", "sub", "tanh"}
"""Names of tensor methods that compute each element of their result from a single logit and change nothing in place."""

_HOOKS = ("torch.distributed.", "lightning_fsdp2.", "megatron_fsdp")
"""Prefixes of the Python modules whose forward hooks do not change logits. Any other forward hook may change them."""

LogitsTail = tuple[Callable[[Tensor], Tensor], ...]
"""Operations that a model applies to the logits after its head, in order. Most models have none."""


def trace_logits_tail(model: nn.Module) -> LogitsTail:
    """Find the operations that ``model`` applies to the logits after its head, such as soft capping or scaling.

    :func:`compute_chunked_token_losses` repeats these operations for each chunk. To find them, this function runs the
    model's own forward with zeros as the input of the head.

    Args:
        model: A Hugging Face causal language model, or a wrapper of one. It must not be sharded yet, and may be on any
            device.

    Raises:
        ValueError: If :func:`compute_chunked_token_losses` cannot repeat the model's operations chunk by chunk. The
            message names the model and the reason.
    """
    hf_model, head = _get_model_and_head(model)
    input_ids = torch.zeros(1, 2, dtype=torch.long, device=hf_model.device)
    inputs: list[Tensor] = []

    def return_hidden_states(*args: Any, **kwargs: Any) -> _BaseOutput:
        size = hf_model.config.get_text_config().hidden_size
        return _BaseOutput(torch.zeros(1, 2, size, dtype=hf_model.dtype, device=hf_model.device))

    def return_traced(hidden: Tensor) -> Tensor:
        inputs.append(hidden)
        return _TracedLogits.make(())

    try:
        with ExitStack() as stack:
            for base in _get_base_models(hf_model):
                stack.enter_context(_replace_forward(base, return_hidden_states))
            stack.enter_context(_replace_forward(head, return_traced))
            logits = hf_model(input_ids=input_ids, use_cache=False).logits
    except Exception as error:  # any error is possible, because the model's code may need real inputs
        raise _make_error(hf_model, f"its forward could not be traced ({error})") from error
    if len(inputs) != 1 or inputs[0].shape[:-1] != input_ids.shape or not isinstance(logits, _TracedLogits):
        raise _make_error(hf_model, "it does not compute its logits with one call of its head for all positions")
    return logits.tail


def compute_chunked_token_losses(
    model: nn.Module,
    compute_logits: Callable[[], Tensor],
    labels: Tensor,
    *,
    tail: LogitsTail,
    chunk_size: int = CHUNK_SIZE,
) -> Tensor:
    """Compute the cross entropy of each token, with the logits of only one chunk of positions in memory at a time.

    The result equals ``token_cross_entropy(compute_logits(), labels)``. This function also works under
    ``torch.no_grad``. The gradients are as precise as without chunks, because the gradients of the head's weights are
    summed over the chunks in float32, even for bfloat16 weights.

    Args:
        model: A Hugging Face causal language model, or a wrapper of one, sharded or not.
        compute_logits: Function that calls ``model`` and returns its logits. The values of the logits are not used,
            because the head computes token losses instead during this call.
        labels: [batch, sequence], int64. Position t holds the label for the logits at position t.
        tail: Result of :func:`trace_logits_tail`, which was called before the model was sharded.
        chunk_size: Number of positions in a chunk, counted over all sequences of the batch.

    Returns:
        The loss of each position, or 0 where there is no label. [batch, sequence], float32.

    Raises:
        ValueError: If the model does not call its head exactly once for all positions of ``labels``, if the head has a
            forward hook, which would get losses instead of logits, or if FSDP2 gathers parts of the head separately.
    """
    if is_head_elsewhere(get_hf_models(model)[0]):
        return compute_logits()  # the step ends in this call, because a later pipeline stage computes the losses
    hf_model, head = _get_model_and_head(model)
    if any(not (hook.__module__ or "").startswith(_HOOKS) for hook in get_forward_hooks(head)):
        raise _make_error(hf_model, "a forward hook on its head would get losses instead of logits")
    if any(isinstance(module, FSDPModule) for module in head.modules() if module is not head):
        raise _make_error(hf_model, "FSDP2 gathers parts of its head separately, because they have another dtype")
    compute_head = head.forward
    results: list[Tensor] = []

    def compute_chunk(hidden: Tensor, labels: Tensor) -> Tensor:
        with keep_logits_sharded(head):
            logits = compute_head(hidden)
        for operation in tail:
            logits = operation(logits)
        return token_cross_entropy(logits, labels, model=hf_model)

    def compute_losses(hidden: Tensor) -> Tensor:
        _check_hidden_states(hf_model, hidden, labels)
        flat = hidden.flatten(0, -2), labels.flatten()
        if torch.is_grad_enabled():
            parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
            losses = _ChunkedLosses.apply(compute_chunk, chunk_size, *flat, *parameters)
        else:
            losses = torch.cat([compute_chunk(*chunk) for chunk in _split(*flat, chunk_size)])
        results.append(losses.view_as(labels))
        # return a copy, because the model handles these losses like logits and may change them in place
        return results[0].clone()

    with _replace_forward(head, compute_losses):
        output = compute_logits()
    if len(results) != 1:
        raise _make_error(hf_model, f"it called its head {len(results)} times")
    # keep the model's output in the autograd graph: its gradient is zero, but backward through it makes FSDP2 gather
    # the weights
    return torch.where(torch.ones((), dtype=torch.bool, device=labels.device), results[0], output)


class _ChunkedLosses(torch.autograd.Function):
    """Computation of token losses chunk by chunk, in which backward recomputes each chunk.

    Backward sums the gradients of each weight over the chunks in float32. Autograd would sum the gradients of a
    bfloat16 weight in bfloat16, and the error of the head's gradient would grow with the number of chunks, for example
    by two thirds with 64 chunks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        compute_chunk: Callable[[Tensor, Tensor], Tensor],
        chunk_size: int,
        hidden: Tensor,
        labels: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        ctx.save_for_backward(hidden, labels)  # autograd frees these tensors after backward, even if the loss is kept
        ctx.compute_chunk, ctx.chunk_size, ctx.parameters = compute_chunk, chunk_size, parameters
        ctx.surroundings = _Surroundings(hidden.device)
        return torch.cat([compute_chunk(*chunk) for chunk in _split(hidden, labels, chunk_size)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, labels = ctx.saved_tensors
        hidden_gradients: list[Tensor] = []
        sums: list[Tensor | None] = [None] * len(ctx.parameters)
        with ctx.surroundings.restore(), torch.enable_grad():
            chunks = _split(hidden.detach(), labels, ctx.chunk_size)
            for (inputs, chunk_labels), loss_gradient in zip(chunks, gradient.split(ctx.chunk_size), strict=True):
                losses = ctx.compute_chunk(inputs.requires_grad_(), chunk_labels)
                hidden_gradient, *gradients = torch.autograd.grad(
                    losses, (inputs, *ctx.parameters), loss_gradient, allow_unused=True
                )
                hidden_gradients.append(hidden_gradient)
                for index, part in enumerate(gradients):
                    if part is not None:
                        total = sums[index]
                        sums[index] = part.to(torch.float32, copy=True) if total is None else total.add_(part)
        rounded = [s if s is None else s.to(p.dtype) for s, p in zip(sums, ctx.parameters, strict=True)]
        return None, None, torch.cat(hidden_gradients), None, *rounded


class _Surroundings:
    """Random state and autocast settings of a forward, which are restored for its recomputation.

    The random state matters for heads with dropout, such as a head with LoRA.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        self.random_state = get_torch_random_state(device)

    @contextmanager
    def restore(self) -> Iterator[None]:
        enabled, dtype = self.autocast
        random_state = get_torch_random_state(self.device)
        try:
            set_torch_random_state(self.random_state, self.device)
            with torch.autocast(self.device.type, dtype, enabled=enabled, cache_enabled=False):
                yield
        finally:
            set_torch_random_state(random_state, self.device)


def _split(hidden: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(hidden.split(size), labels.split(size), strict=True)


class _TracedLogits(Tensor):
    """Placeholder for logits that records the operations on them.

    Operations that are not elementwise raise an error, because they cannot be repeated chunk by chunk.
    """

    tail: LogitsTail

    @classmethod
    def make(cls, tail: LogitsTail) -> "_TracedLogits":
        traced = torch.zeros(()).as_subclass(cls)
        traced.tail = tail
        return traced

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        logits, *arguments = args
        are_constants = all(
            isinstance(value, int | float | torch.dtype | None) for value in (*arguments, *kwargs.values())
        )
        if function.__name__ not in _POINTWISE or not isinstance(logits, cls) or not are_constants:
            # do not raise a TypeError, because Python's operators would replace it with their own TypeError
            raise ValueError(f"it applies {function.__name__!r} to its logits")
        return cls.make((*logits.tail, methodcaller(function.__name__, *arguments, **kwargs)))


class _BaseOutput:
    """Placeholder for a base model's output. It has only the hidden states; every other attribute is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


@contextmanager
def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of ``module`` inside the block. The module's hooks still run."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


def _get_model_and_head(model: nn.Module) -> tuple[Any, nn.Module]:
    hf_model = get_hf_models(model)[0]
    head = get_optional_head(hf_model)
    if head is None:
        raise _make_error(hf_model, "it declares no output head (`get_output_embeddings`)")
    return hf_model, head


def _get_base_models(hf_model: nn.Module) -> list[nn.Module]:
    """Return all Hugging Face models inside a model, because its forward may call any of them as its base model."""
    return [module for module in hf_model.modules() if module is not hf_model and is_hf_model(module)]


def _check_hidden_states(model: nn.Module, hidden: Tensor, labels: Tensor) -> None:
    if isinstance(hidden, DTensor):
        raise _make_error(model, "its head is sharded by one of torch's styles; name this package's styles in tp_plan")
    if hidden.shape[:-1] != labels.shape:
        raise _make_error(
            model, f"its head got positions of shape {tuple(hidden.shape[:-1])}, but labels of {tuple(labels.shape)}"
        )


def _make_error(model: nn.Module, reason: str) -> ValueError:
    return ValueError(f"loss='chunked' is not possible for {get_class_name(model)}: {reason}; use loss='full'.")
