"""Checks that all data parallel ranks run the same parts of a model, such as an image tower that some batches skip.

The weights of each part are gathered by all ranks together. A rank whose batch has no image would skip the image
tower and start to gather the language model, while the other ranks gather the tower. Such a mismatch of collectives
crashes or hangs.
"""

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from lightning_fsdp2.modules.structure import get_hf_models, get_layer_lists
from lightning_fsdp2.parallel.data.fully_shard import is_unsharded_by_user
from lightning_fsdp2.ranks.failures import describe_ranks

_CHECK_ATTRIBUTE = "_lightning_fsdp2_branches"

End = Literal["the backward pass", "the end of the step"]
"""Names of the events that may follow the last part of the model."""


def check_branches(root: nn.Module, units: Iterable[Any], group: dist.ProcessGroup) -> None:
    """Make the ranks check that they all enter the same part of ``root``, before the weights of that part are gathered.

    A part is a list of layers, or a module of ``units`` outside these lists. Before the ranks enter a part, and
    once more after the last part (:func:`check_end`), they exchange one number on the CPU. If there is only one list of
    layers, and every part is inside a Hugging Face model, all ranks always enter the same parts, so nothing is
    exchanged.

    Args:
        root: Module that is sharded.
        units: Modules of ``root`` whose weights are gathered when the module is called.
        group: Process group of all ranks, for tensors on the CPU.
    """
    lists = get_layer_lists(root)
    inside = {root, *(module for blocks in lists for block in blocks for module in block.modules())}
    # a rank is considered to enter a list of layers when it calls the first layer of the list
    entered = ({*units} - inside) | {blocks[0] for blocks in lists}
    parts = [module for module in root.modules() if module in entered]
    models = {module for model in get_hf_models(root) for module in model.modules()}
    has_choice = len(lists) > 1 or (models and not entered <= models)
    if not has_choice or dist.get_backend(group) == "fake":
        return
    names = {module: name for name, module in root.named_modules()}
    check = _Check([*(names[part] for part in parts), *get_args(End)], group)
    root.__dict__[_CHECK_ATTRIBUTE] = check
    for index, part in enumerate(parts):
        part.register_forward_pre_hook(check.make_hook(index), prepend=True)


def check_end(root: nn.Module, end: End) -> None:
    """Check, together with all other ranks, that every rank has left the last part and has reached ``end``.

    This does nothing if :func:`check_branches` found that all ranks always enter the same parts.

    Raises:
        RuntimeError: On every rank, if any rank enters another part instead.
    """
    if (check := root.__dict__.get(_CHECK_ATTRIBUTE)) is not None:
        check.compare(check.names.index(end))


class _Check:
    def __init__(self, names: list[str], group: dist.ProcessGroup) -> None:
        self.names = names
        self.group = group

    def make_hook(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
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
                " of -100 (`lightning_fsdp2.data.add_dummy_image`)."
            )
