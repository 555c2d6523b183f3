"""Images for models that see them, where not every batch has one."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_fsdp2.labels import IGNORE_INDEX


def add_dummy_image(
    batch: Mapping[str, Tensor], dummy: Mapping[str, Tensor], pad_token_id: int = 0
) -> dict[str, Tensor]:
    """Give a batch without an image one that changes nothing, so that all ranks run the tower of images.

    Its placeholders come after the text of the first sequence, where no causal token sees them, and have no labels. For
    the end of a collator::

        dummy = dict(processor(images=[Image.new("RGB", (56, 56))], text=[processor.image_token], return_tensors="pt"))
        loader = DataLoader(rows, collate_fn=lambda rows: add_dummy_image(collate(rows), dummy))

    Args:
        batch: Tensors by the model's names. ``input_ids`` and what else has its shape, [sequences, length], grow by the
            dummy's length.
        dummy: What the model's processor makes of one image: ``input_ids`` of shape [1, placeholders], and what the
            tower takes, such as ``pixel_values``.
        pad_token_id: What the other sequences are filled with.

    Returns:
        ``batch``, as it is if it has all that the tower takes.

    Raises:
        ValueError: When ``batch`` has position_ids, which would have to go on over the dummy; the model makes its own.
    """
    shape, tokens = batch["input_ids"].shape, dummy["input_ids"].shape
    # grids and sizes of an image may have the shape of its tokens by chance
    seen = {n: value for n, value in dummy.items() if value.shape != tokens or n.endswith(("_thw", "_sizes"))}
    if seen.keys() <= batch.keys():
        return dict(batch)
    if "position_ids" in batch:
        raise ValueError(
            "add_dummy_image: the batch has position_ids; leave them out, so that the model makes its own."
        )
    added = {"labels": torch.full(tokens, IGNORE_INDEX), "attention_mask": torch.ones(tokens), **dummy}
    fills = {"input_ids": pad_token_id, "labels": IGNORE_INDEX}
    # what the processor says of each token, and the batch does not since it has text alone; without a mask all count
    of_tokens = dummy.keys() - seen.keys() - {"attention_mask"}
    whole = {name: dummy[name].new_zeros(shape) for name in of_tokens} | dict(batch)
    grown = dict(seen)
    for name, value in whole.items():
        grown[name] = value
        if value.shape == shape:
            tail = value.new_full((shape[0], tokens[1]), fills.get(name, 0))
            tail[:1] = added.get(name, tail[:1])
            grown[name] = torch.cat([value, tail], 1)
    return grown
