"""Forward of a context parallel model, which takes whole sequences but computes only this rank's positions."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fsdp2.compat.torch import all_reduce_tensor, is_module_compiled
from lightning_fsdp2.compat.transformers import (
    CACHE_NAMES,
    assume_unpacked_sequences,
    get_optional_own_loss,
    set_own_loss,
)
from lightning_fsdp2.labels import IGNORE_INDEX, shift_left
from lightning_fsdp2.modules.structure import get_class_name, get_layer_lists
from lightning_fsdp2.parallel.context.attention import (
    SequenceMask,
    get_optional_whole_positions,
    is_running_sharded,
    run_sharded,
)
from lightning_fsdp2.parallel.context.attention_blocks import Documents, find_documents
from lightning_fsdp2.parallel.context.sharding import SequenceSharding
from lightning_fsdp2.ranks.collectives import gather_for_ranks
from lightning_fsdp2.ranks.layer_random import LayerRandom, draws_random_numbers

_REFUSED = {
    **dict.fromkeys(CACHE_NAMES, "which holds keys of tokens before this sequence (a prefix)"),
    "use_cache": "but a rank cannot build a cache from only its own positions (`generate` works)",
    "output_attentions": "but the attention scores of the whole sequence are never computed",
    "start_positions": "which are positions in the whole sequence",
    "end_positions": "which are positions in the whole sequence",
}
"""Arguments that only make sense for whole sequences, each with the reason why it is refused."""

_NOT_TEXT = ("pixel_", "image_", "video_", "audio_", "input_features", "input_values")

_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments that tell flash attention where packed documents begin and end."""


_known_documents: ContextVar[Documents | None] = ContextVar("_known_documents", default=None)
"""Documents to assume for every batch in a simulation, where tensors have no values."""


@contextmanager
def assume_documents(position_ids: Tensor) -> Iterator[None]:
    """Assume inside the block that every batch is packed like ``position_ids``.

    Simulations need this, because tensors without values cannot be searched for documents.

    Args:
        position_ids: [batch, sequence], position ids that restart at each document. The tensor must have values.
    """
    numbers = (F.pad(position_ids.diff(dim=-1) != 1, (1, 0))).cumsum(-1).cpu()
    token = _known_documents.set(find_documents(numbers, position_ids.device))
    try:
        yield
    finally:
        _known_documents.reset(token)


class ShardedForward:
    """Wrapper around a model's or base model's forward. It runs the forward on only this rank's positions."""

    def __init__(self, model: nn.Module, sharding: SequenceSharding) -> None:
        self.model = model
        self.sharding = sharding
        self.name = get_class_name(model)
        self._parameters = list(inspect.signature(model.forward).parameters)
        # some position embeddings, such as OPT's, derive positions by counting the tokens in the attention mask
        self._counts_tokens = any(
            isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(module.forward).parameters
            for module in model.modules()
        )
        # some models, such as RoBERTa, do not count positions from 0
        self._makes_positions = any(hasattr(m, "create_position_ids_from_input_ids") for m in model.modules())
        config: Any = model.config
        self._has_image_positions = "mrope_section" in str(getattr(config.get_text_config(), "rope_parameters", ""))
        self._draws_random_numbers = draws_random_numbers(model)
        self._is_checked = False

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        given = {name: value for name, value in given.items() if value is not None}
        if not self.sharding.is_active or _is_generating(given):
            return forward(*args, **kwargs)
        if is_running_sharded():  # an outer model, which has already split the inputs, called this model
            return self._gather_router_logits(forward(*args, **kwargs))
        inputs = given.get("input_ids", given.get("inputs_embeds"))
        if not isinstance(inputs, Tensor) or inputs.ndim < 2:
            raise self._make_error("was called without input_ids [batch, sequence] or inputs_embeds")
        self._check_given(given)
        length = inputs.size(1)
        self.sharding.get_chunks(length)
        loss = self._take_loss(given)
        documents, padding = self._take_documents(given, inputs)
        local = {name: self._shard(name, value, length) for name, value in given.items()}
        with ExitStack() as stack:
            # Each rank holds two chunks of the sequence. The position ids jump from one chunk to the other, so
            # transformers would mistake the chunks for two documents.
            stack.enter_context(assume_unpacked_sequences())
            sequences = run_sharded(
                self.name,
                given["position_ids"],
                batch_size=inputs.size(0),
                documents=documents,
                padding=padding,
                method=self.sharding.method,
                group=self.sharding.group,
            )
            attended = stack.enter_context(sequences)
            stack.enter_context(self._draw_own_random_numbers(inputs.device))
            if loss is not None:
                stack.enter_context(loss.watch())
            output = self._run(forward, {**local, "use_cache": False}, attended)
        self._check_output(output, length)
        return output if loss is None else loss.finish(output)

    def _run(self, forward: Callable[..., Any], local: dict[str, Any], attended: set[nn.Module]) -> Any:
        """Run the model's own forward.

        The first run also checks that every layer that ran has attended to the whole sequence.
        """
        ran: set[nn.Module] = set()
        lists = [] if self._is_checked else self._get_layer_lists()
        hooks = [layer.register_forward_hook(lambda layer, *_: ran.add(layer)) for layers in lists for layer in layers]
        try:
            output = forward(**local)
        except (AttributeError, TypeError) as error:
            if SequenceMask.__name__ not in str(error):
                raise
            raise self._make_error(
                "uses its attention mask as a tensor, but context parallelism replaces the mask with another object"
                f" ({error})"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        for layers in lists:
            deaf = [layer for layer in layers if layer in ran and attended.isdisjoint(layer.modules())]
            # Accept a list in which all layers lack attention, such as a list of projections, if layers in another
            # list have attention.
            if deaf and (not attended or any(layer not in deaf for layer in layers if layer in ran)):
                raise self._make_error(
                    f"has a layer, {get_class_name(deaf[0])}, that calls no attention function of transformers; this"
                    " layer would see only this rank's part of the sequence"
                )
        self._is_checked = True
        return output

    def _get_layer_lists(self) -> list[list[nn.Module]]:
        lists = get_layer_lists(self.model)
        # skip the check for compiled layers, because hooks cannot observe calls inside compiled code
        return [] if any(is_module_compiled(layer) for layers in lists for layer in layers) else lists

    def _check_given(self, given: dict[str, Any]) -> None:
        """Refuse arguments that only make sense for whole sequences, and drop flash attention's arguments for packing.

        Context parallel attention finds packed documents by their position ids instead.
        """
        for name, reason in _REFUSED.items():
            if name in given and given[name] is not False and not (name == "use_cache" and torch.is_grad_enabled()):
                raise self._make_error(f"was given {name}, {reason}; leave it out, or use cp_size=1")
        images = [name for name in given if name.startswith(_NOT_TEXT)]
        if images:
            raise self._make_error(
                f"was given {images[0]}, which would be merged into only this rank's part of the sequence; merge"
                f" {images[0]} into inputs_embeds outside the model, and pass inputs_embeds instead"
            )
        if isinstance(given.get("logits_to_keep"), Tensor) or given.get("logits_to_keep"):
            raise self._make_error(
                "was given logits_to_keep, which counts positions of the whole sequence; leave it out"
            )
        packed = [name for name in _PACKED if name in given]
        if packed and "position_ids" not in given:
            raise self._make_error(
                f"was given {packed[0]} without position_ids, but context parallel attention finds documents by their"
                " position_ids; pass position_ids that restart at each document"
            )
        for name in packed:
            del given[name]

    def _take_documents(self, given: dict[str, Any], inputs: Tensor) -> tuple[Documents | None, Tensor | None]:
        """Remove the attention mask from ``given``, and return the batch's documents and its padding.

        As in transformers, documents begin where position ids restart, but only if there is no attention mask. Reading
        the position ids or the mask makes the CPU wait for the device once, as it does in transformers.
        """
        batch, length = inputs.shape[:2]
        mask, positions = given.pop("attention_mask", None), given.get("position_ids")
        if positions is None:
            given["position_ids"] = torch.arange(length, device=inputs.device)[None]
            if self._makes_positions:
                raise self._make_error("computes position ids that do not start at 0; pass position_ids")
        if mask is not None:
            return self._number_padding(given, mask, batch, length, has_positions=positions is not None)
        if positions is None or self.sharding.assumes_unpacked:
            return None, None
        if (known := _known_documents.get()) is not None:
            return known, None
        if positions.ndim == 3:  # [4, batch, sequence]: one row of position ids for the text, and three for images
            positions = positions[0] if positions.size(0) == 4 else None
        if positions is None or not (restarts := F.pad(positions.diff(dim=-1) != 1, (1, 0)).cpu()).any():
            return None, None
        if given["position_ids"].ndim == 2 and self._has_image_positions:
            raise self._make_error(
                "can only separate documents if position_ids have the shape [4, batch, sequence]: one row for the text"
                " and three for images"
            )
        return find_documents(restarts.cumsum(-1).expand(batch, length), inputs.device), None

    def _number_padding(
        self, given: dict[str, Any], mask: Any, batch: int, length: int, *, has_positions: bool
    ) -> tuple[Documents | None, Tensor | None]:
        if not isinstance(mask, Tensor) or mask.shape != (batch, length):
            what = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"that is a {type(mask).__name__}"
            raise self._make_error(
                f"was given an attention_mask {what}; context parallel attention takes only padding masks, of shape"
                f" {(batch, length)}; for packed documents, pass position_ids that restart at each document"
            )
        is_token = mask.bool().cpu()
        if is_token.all():
            return None, None
        if given.get("output_router_logits", getattr(self.model.config, "output_router_logits", False)):
            raise self._make_error(
                "was asked for the router's auxiliary loss (output_router_logits=True) of a padded batch, but it cannot"
                " exclude the padding from this loss; set output_router_logits to False, or pack the sequences"
            )
        if (is_token[:, 1:] <= is_token[:, :-1]).all():
            return None, None  # if all padding is after the tokens, causal attention never sees it
        if self._counts_tokens and not has_positions:
            raise self._make_error(
                "derives positions from its attention_mask, in which padding precedes tokens; pass position_ids"
            )
        # treat padding as a separate document, because the softmax of a query that sees no key is undefined
        return find_documents((~is_token).long(), mask.device), ~mask.bool()

    def _take_loss(self, given: dict[str, Any]) -> "_ShardedLoss | None":
        """Shift and count the labels in ``given`` before they are split, and return a :class:`_ShardedLoss`.

        Return None if there are no labels.
        """
        if "labels" not in given and "shift_labels" not in given:
            return None
        ignore_index = given.get("ignore_index", IGNORE_INDEX)
        labels = given["shift_labels"] if "shift_labels" in given else shift_left(given["labels"], ignore_index)
        tokens = given.get("num_items_in_batch", (labels != ignore_index).sum())
        given.update(labels=labels, shift_labels=labels, num_items_in_batch=tokens / self.sharding.group.size())
        return _ShardedLoss(self)

    def _shard(self, name: str, value: Any, length: int) -> Any:
        if not isinstance(value, Tensor) or (name not in self.sharding.inputs and value.ndim < 2):
            return value
        if name not in self.sharding.inputs:
            raise self._make_error(
                f"was given {name}, a tensor of shape {tuple(value.shape)}; set FSDP2Config(context_parallel_inputs="
                f"{{'{name}': ...}}) to the dim along which this tensor has one value per position, or to None if every"
                " rank needs the whole tensor"
            )
        dim = self.sharding.inputs[name]
        if dim is None:
            return value
        if not -value.ndim <= dim < value.ndim or value.size(dim) != length:
            raise self._make_error(
                f"was given {name} of shape {tuple(value.shape)}, which does not have the {length} positions of the"
                f" sequence in dim {dim}"
            )
        return self.sharding.shard(value, dim)

    def _gather_router_logits(self, output: Any) -> Any:
        """Gather the router logits in ``output``, each [tokens, experts], over all ranks.

        The auxiliary loss of an MoE model needs the logits of all tokens, but does not depend on their order.
        """
        if getattr(output, "router_logits", None) is not None:
            group = self.sharding.group
            output.router_logits = tuple(gather_for_ranks(logits, 0, group) for logits in output.router_logits)
        return output

    @contextmanager
    def _draw_own_random_numbers(self, device: torch.device) -> Iterator[None]:
        """Make each rank draw its own random numbers inside the block, so that dropout differs between positions.

        Outside the block, all ranks draw the same random numbers.
        """
        random = LayerRandom(self.model, self.sharding.group, device)
        if self._draws_random_numbers:
            random.begin_shards()
        try:
            yield
        finally:
            random.end_shards()

    def _check_output(self, output: Any, length: int) -> None:
        local = length // self.sharding.group.size()
        for name in ("logits", "last_hidden_state"):
            result = getattr(output, name, None)
            # check only the sequence dim: with the chunked loss, the logits have the shape [batch, sequence]
            if result is not None and result.size(1) != local:
                raise self._make_error(
                    f"returned {name} of shape {tuple(result.shape)}, which does not have one value for each of this"
                    f" rank's {local} positions"
                )

    def _make_error(self, what: str) -> ValueError:
        return ValueError(f"cp_size={self.sharding.group.size()}: {self.name} {what}.")


def computes_by_length(module: nn.Module) -> bool:
    """Return whether ``module`` is a rotary embedding whose frequencies depend on the largest position id."""
    rope_type = getattr(module, "rope_type", None)
    names = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any(isinstance(name, str) and ("dynamic" in name or name == "longrope") for name in names)


class WholeRotary:
    """Wrapper around the forward of a rotary embedding. It calls the forward with the whole sequence's position ids.

    The wrapper returns this rank's part of each result. The shape of a result is [..., sequence, dim].
    """

    def __init__(self, sharding: SequenceSharding) -> None:
        self.sharding = sharding

    def __call__(self, forward: Callable[..., Any], x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        positions = get_optional_whole_positions()
        if positions is None:
            return forward(x, position_ids, *args, **kwargs)
        return tuple(self.sharding.shard(part, -2) for part in forward(x, positions, *args, **kwargs))


class _ShardedLoss:
    """Conversion of a model's loss over this rank's labels into the loss over all labels."""

    def __init__(self, forward: ShardedForward) -> None:
        self.forward = forward
        self.model: Any = forward.model
        self._is_shifted = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record whether, inside the block, the model passes the already shifted labels to its loss function."""
        own = get_optional_own_loss(self.model)
        function = self.model.loss_function
        takes_shifted = "shift_labels" in inspect.signature(function).parameters

        def compute(*args: Any, **kwargs: Any) -> Any:
            self._is_shifted = takes_shifted and kwargs.get("shift_labels") is not None
            return function(*args, **kwargs)

        self.model.loss_function = compute
        try:
            yield
        finally:
            set_own_loss(self.model, own)

    def finish(self, output: Any) -> Any:
        """Replace the loss in the model's output with the mean of all ranks' losses.

        Raises:
            ValueError: If the model shifted the labels itself, which loses a label at the end of each rank's chunks.
        """
        if not self._is_shifted:
            raise self.forward._make_error(
                "does not pass shift_labels to its loss function, and would shift the labels of only a part of the"
                " sequence; call the model without labels, and compute the loss from its logits and"
                " shard_sequence(model, shifted_labels)"
            )
        loss = output[0]
        mean = _MeanOfValues.apply(loss, self.forward.sharding.group)
        if isinstance(output, tuple):
            return (mean, *output[1:])
        output.loss = mean
        return output


class _MeanOfValues(torch.autograd.Function):
    """Mean of a value over the ranks.

    In backward, each rank's value gets the whole gradient, because FSDP later averages gradients over the ranks.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce_tensor(value, group) / group.size()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def _is_generating(given: dict[str, Any]) -> bool:
    """Return whether the model is generating text.

    A sequence to which tokens are added one by one cannot be split, so every rank then computes all tokens.
    """
    return not torch.is_grad_enabled() and any(name in given for name in CACHE_NAMES)
