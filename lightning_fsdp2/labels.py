"""Labels of tokens: which position predicts which token, and which positions do not count."""

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
"""The label of a position that does not count, as in transformers and torch."""


def shift_left(labels: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Move the label of t + 1 to position t, which predicts it; the last position gets ``ignore_index``.

    Labels are [..., sequence]. Shifting them instead of the logits saves a copy of the largest tensor of the step.
    """
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
