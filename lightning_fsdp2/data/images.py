"""Dummy images for the text-only batches of models that take text and images."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_fsdp2.labels import IGNORE_INDEX


def add_dummy_image(
    batch: Mapping[str, Tensor], dummy: Mapping[str, Tensor], pad_token_id: int = 0
) -> dict[str, Tensor]:
    """Add a dummy image to a batch without images, so that the image tower runs on every rank.

    All ranks gather the weights of the image tower together, so in each micro-batch either all ranks or no ranks must
    run it. The image does not change the loss. Its placeholder tokens have no labels and come after the text of the
    first sequence, where causal attention hides them from the text. Call this function at the end of a collator::

        dummy = dict(processor(images=[Image.new("RGB", (56, 56))], text=[processor.image_token], return_tensors="pt"))
        loader = DataLoader(rows, collate_fn=lambda rows: add_dummy_image(collate(rows), dummy))

    Args:
        batch: Tensors, keyed by the names of the model's arguments. ``input_ids`` and all other tensors of the same
            shape, [sequences, length], become longer by the number of placeholders.
        dummy: Output of the model's processor for one image: ``input_ids`` of shape [1, placeholders], and the inputs
            of the image tower, such as ``pixel_values``.
        pad_token_id: Token with which all sequences except the first are padded.

    Returns:
        The batch with the dummy image, or ``batch`` unchanged if it already has all inputs of the image tower.

    Raises:
        ValueError: When ``batch`` has ``position_ids``, which would not cover the dummy image. Without
            ``position_ids``, the model computes its own.
    """
    shape, tokens = batch["input_ids"].shape, dummy["input_ids"].shape
    # image grids (`_thw`) and sizes are inputs of the image tower, even if they happen to have the shape of `input_ids`
    seen = {n: value for n, value in dummy.items() if value.shape != tokens or n.endswith(("_thw", "_sizes"))}
    if seen.keys() <= batch.keys():
        return dict(batch)
    if "position_ids" in batch:
        raise ValueError(
            "add_dummy_image: the batch has position_ids; leave them out, so that the model computes its own."
        )
    added = {"labels": torch.full(tokens, IGNORE_INDEX), "attention_mask": torch.ones(tokens), **dummy}
    fills = {"input_ids": pad_token_id, "labels": IGNORE_INDEX}
    # The processor may return per-token inputs that the batch lacks, such as token types. Set them to 0 for the text.
    # An attention mask need not be added: without one, the model attends to all tokens.
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
