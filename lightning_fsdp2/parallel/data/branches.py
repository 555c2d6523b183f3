"""Checks that all data parallel ranks run the same parts of a model, such as an image tower that some batches skip.

The weights of each part are gathered by all ranks together. A rank whose batch has no image would skip the image
tower and start to gather the language model, while the other ranks gather the tower. Such a mismatch of collectives
crashes, hangs, or mixes the weights of parts of the same shape.
"""

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from lightning_fsdp2.compat.torch import is_in_backward
from lightning_fsdp2.modules.structure import get_hf_models, get_layer_lists
from lightning_fsdp2.parallel.data.fully_shard import is_unsharded_by_user
from lightning_fsdp2.ranks.failures import describe_ranks

_CHECK_ATTRIBUTE = "_lightning_fsdp2_branches"

_FIRST_BACKWARDS = 3
"""Number of backward passes after which single layers are no longer checked, so that later steps are not slower.

Ranks that skip layers at random are told apart by then, unless they skip very rarely.
"""

End = Literal["the backward pass", "the end of the step"]
"""Names of the events that may follow the last part of the model."""


def check_branches(
    root: nn.Module, units: Iterable[Any], group: dist.ProcessGroup, *, layers: Iterable[Any] = ()
) -> None:
    """Make the ranks check that they all enter the same part of ``root``, before the weights of that part are gathered.

    A part is a list of layers, or a module of ``units`` outside these lists. Before the ranks enter a part, and
    once more after the last part (:func:`check_end`), they exchange one number on the CPU. If there is only one list of
    layers, and every part is inside a Hugging Face model, all ranks always enter the same parts, so nothing is
    exchanged.

    Args:
        root: Module that is sharded.
        units: Modules of ``root`` whose weights are gathered when the module is called.
        group: Process group of all ranks, for tensors on the CPU.
        layers: Modules that are parts in the first training steps only, because ranks that draw other random numbers
            may skip other layers.
    """
    lists = get_layer_lists(root)
    inside = {root, *(module for blocks in lists for block in blocks for module in block.modules())}
    # a rank is considered to enter a list of layers when it calls the first layer of the list
    entered = ({*units} - inside) | {blocks[0] for blocks in lists}
    models = {module for model in get_hf_models(root) for module in model.modules()}
    has_choice = len(lists) > 1 or (models and not entered <= models)
    always = entered if has_choice else set()
    at_first = {*layers} - {root} - always
    parts = [module for module in root.modules() if module in always or module in at_first]
    if not parts or dist.get_backend(group) == "fake":
        return
    names = {module: name for name, module in root.named_modules()}
    check = _Check([*(names[part] for part in parts), *get_args(End)], group, bool(always), bool(at_first))
    root.__dict__[_CHECK_ATTRIBUTE] = check
    for index, part in enumerate(parts):
        part.register_forward_pre_hook(check.make_hook(index, is_at_first=part in at_first), prepend=True)


def check_end(root: nn.Module, end: End) -> None:
    """Check, together with all other ranks, that every rank has left the last part and has reached ``end``.

    This does nothing if :func:`check_branches` found that all ranks always enter the same parts.

    Raises:
        RuntimeError: On every rank, if any rank enters another part instead.
    """
    check: _Check | None = root.__dict__.get(_CHECK_ATTRIBUTE)
    if check is None:
        return
    is_training = end == "the backward pass"
    if check.always or (is_training and check.backwards_left):
        check.compare(check.names.index(end))
    if is_training and check.backwards_left:
        check.backwards_left -= 1


class _Check:
    """Comparison of the parts that the ranks enter.

    Args:
        names: Names of all parts and ends.
        group: Process group of all ranks, for tensors on the CPU.
        always: Whether some parts are compared in every step.
        at_first: Whether some parts are compared in the first training steps only.
    """

    def __init__(self, names: list[str], group: dist.ProcessGroup, always: bool, at_first: bool) -> None:
        self.names = names
        self.group = group
        self.always = always
        self.backwards_left = _FIRST_BACKWARDS if at_first else 0

    def make_hook(self, index: int, *, is_at_first: bool) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if is_at_first and not (self.backwards_left and torch.is_grad_enabled() and not is_in_backward()):
                return
            if not is_unsharded_by_user(module):
                self.compare(index)

        return torch.compiler.disable(hook)  # otherwise dynamo would trace the hook of a compiled layer

    def compare(self, index: int) -> None:
        """Compare the part that this rank enters with the parts that the other ranks enter.

        Raises:
            RuntimeError: On every rank, if the parts differ. The message names the parts and the ranks that enter each.
        """
        entered = [torch.tensor(0) for _ in range(self.group.size())]
        dist.all_gather(entered, torch.tensor(index), group=self.group)
        ranks: dict[int, list[int]] = {}
        for rank, other in enumerate(entered):
            ranks.setdefault(int(other), []).append(rank)
        if len(ranks) > 1:
            places = "; ".join(f"{self.names[part]} (ranks {describe_ranks(found)})" for part, found in ranks.items())
            raise RuntimeError(
                f"Ranks run different parts of the model in the same step: {places}. All ranks gather the weights of a"
                " part together, so a part must be used by every micro-batch or by none. If a batch has no"
                " images, let the collator add a dummy image: its placeholder tokens come after the text, with labels"
                " of -100 (`lightning_fsdp2.data.add_dummy_image`). If random numbers choose the parts, such as the"
                ' layers that a step skips, set random_numbers="shared" of the strategy.'
            )
