"""Cross entropy of a causal language model whose logits exist for one chunk of positions at a time.

With a vocabulary of 128 thousand tokens, the logits of a sequence are by far the largest tensor of a step. Here a
single forward of the head runs over chunks of positions. The logits of a chunk are turned into its token losses and
dropped; backward computes the logits again. Since there is one forward for all chunks, FSDP2 gathers the head once.
Since the model's own forward calls the head, every hook on the way to the head is called as usual.
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
from lightning_fsdp2.parallel.loss.cross_entropy import keep_logits_sharded, token_cross_entropy
from lightning_fsdp2.ranks.random_state import get_torch_random_state, set_torch_random_state

CHUNK_SIZE = 1024
"""Number of positions in a chunk, over all sequences of the batch. Matrix products of this size keep an accelerator
busy."""

_POINTWISE = {"add", "clamp", "contiguous", "div", "float", "mul", "neg", "sub", "tanh"}
"""Names of tensor methods that compute each element of their result from one logit alone, and work out of place."""

_HOOKS = ("torch.distributed.", "lightning_fsdp2.")
"""Prefixes of the Python modules whose forward hooks do not change logits; any other hook may change them."""

LogitsTail = tuple[Callable[[Tensor], Tensor], ...]
"""All operations of a model on the logits that its head returns, in order; often none."""


def trace_logits_tail(model: nn.Module) -> LogitsTail:
    """Find the operations of ``model`` on its logits after its head (soft capping, scaling), which chunks must repeat.

    This runs the model's own forward, with zeros in place of everything that is computed before the head.

    Args:
        model: A Hugging Face causal language model, or a wrapper of one; not sharded, on any device.

    Raises:
        ValueError: If the model does more than :func:`compute_chunked_token_losses` can do chunk by chunk. The message
            names the model.
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
    except Exception as error:  # the model's code may raise anything if it needs more than this forward gives it
        raise _make_error(hf_model, f"its forward could not be traced ({error})") from error
    if len(inputs) != 1 or inputs[0].shape[:-1] != input_ids.shape or not isinstance(logits, _TracedLogits):
        raise _make_error(hf_model, "it does not make its logits by one call of its head with all positions")
    return logits.tail


def compute_chunked_token_losses(
    model: nn.Module,
    compute_logits: Callable[[], Tensor],
    labels: Tensor,
    *,
    tail: LogitsTail,
    chunk_size: int = CHUNK_SIZE,
) -> Tensor:
    """Return what ``token_cross_entropy(compute_logits(), labels)`` would, without the logits of more than one chunk.

    This also works in a forward without gradients. The gradients are exact: those of the head's weights are summed over
    the chunks in float32 even if the weights are bfloat16, as one product over all positions would sum them.

    Args:
        model: A Hugging Face causal language model, or a wrapper of one; sharded or not.
        compute_logits: Function that calls ``model`` and returns its logits, whose values are not used.
        labels: [batch, sequence], int64; position t holds the label of its own logits.
        tail: Result of :func:`trace_logits_tail` from before the model was sharded.
        chunk_size: Number of positions in a chunk, over all sequences.

    Returns:
        The loss of every position, 0 where there is no label. [batch, sequence], float32.

    Raises:
        ValueError: If the model does not call its head exactly once with the hidden states of just these positions, if
            the head has a forward hook, which would see losses, or if parts of the head are gathered separately.
    """
    hf_model, head = _get_model_and_head(model)
    if any(not (hook.__module__ or "").startswith(_HOOKS) for hook in get_forward_hooks(head)):
        raise _make_error(hf_model, "a forward hook on its head would be given losses for logits")
    if any(isinstance(module, FSDPModule) for module in head.modules() if module is not head):
        raise _make_error(hf_model, "parts of its head, of another dtype, are units of FSDP2 of their own")
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
        # to the model these are logits, which it may change in place
        return results[0].clone()

    with _replace_forward(head, compute_losses):
        output = compute_logits()
    if len(results) != 1:
        raise _make_error(hf_model, f"it called its head {len(results)} times")
    # FSDP2 gathers a module's weights for backward when the gradient of its output arrives, so send a zero gradient
    return torch.where(torch.ones((), dtype=torch.bool, device=labels.device), results[0], output)


class _ChunkedLosses(torch.autograd.Function):
    """Token losses, chunk by chunk; backward computes each chunk again.

    Autograd alone would add up the chunks' gradients of a bfloat16 weight in bfloat16, and the error of the head's
    gradient would grow with the number of chunks: by two thirds at 64 chunks.
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
        ctx.save_for_backward(hidden, labels)  # freed after backward, though the loss may live on
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
    """Random state and autocast settings of a forward, for backward to repeat it. A head may have dropout (LoRA)."""

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
    """Stand-in for logits of any shape. It records the operations on them and refuses any that chunks cannot repeat."""

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
            # not a TypeError, which Python's operators would replace with their own
            raise ValueError(f"it applies {function.__name__!r} to its logits")
        return cls.make((*logits.tail, methodcaller(function.__name__, *arguments, **kwargs)))


class _BaseOutput:
    """Stand-in for any output class of a base model: hidden states, and None for every other attribute."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


@contextmanager
def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let ``module`` run ``forward`` in place of its own inside the block; its hooks are called as usual."""
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
    """Return the models inside of a model: its forward may call all of them, or the decoder alone."""
    return [module for module in hf_model.modules() if module is not hf_model and is_hf_model(module)]


def _check_hidden_states(model: nn.Module, hidden: Tensor, labels: Tensor) -> None:
    if isinstance(hidden, DTensor):
        raise _make_error(model, "its head is sharded by a style of torch's own; use FSDP2Strategy(tp_size=...) for it")
    if hidden.shape[:-1] != labels.shape:
        raise _make_error(
            model, f"its head got positions of shape {tuple(hidden.shape[:-1])} for labels of {tuple(labels.shape)}"
        )


def _make_error(model: nn.Module, reason: str) -> ValueError:
    return ValueError(f"loss='chunked' is not possible for {get_class_name(model)}: {reason}; use loss='full'.")
