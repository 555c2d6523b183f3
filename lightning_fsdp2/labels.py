"""Labels for next-token prediction."""

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position that the loss leaves out, as in transformers and torch."""


def shift_left(labels: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Shift labels by one position, so that each position has the label of the token that it predicts.

    Labels have the shape [..., sequence]. The last position gets ``ignore_index``. Shifting the labels instead of the
    logits saves a copy of the logits, which are the largest tensor of a step.
    """
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
