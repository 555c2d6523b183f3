"""Statistics of the lengths of conversations and of the padding in packed sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class LengthStatistics:
    """Statistics of the lengths of conversations, in tokens. Lengths are measured before truncation."""

    conversations: int
    tokens: int
    """Number of tokens of all conversations together."""

    answer_tokens: int
    """Number of answer tokens that the model learns, after truncation."""

    median: int
    percentile_95: int
    longest: int
    cut: int
    """Number of conversations that are longer than a sequence."""

    left_out: int
    """Number of conversations that have no answer left after truncation."""

    empty: int
    """Number of conversations whose answers are all empty."""

    sequences: int | None
    """Number of sequences into which the conversations are packed; None if each conversation is its own sequence."""

    fill: float
    """Fraction of the sequences' tokens that is not padding."""

    def describe(self, split: str, sequence_length: int) -> str:
        """Return the statistics as one line of text for the log."""
        return (
            f"{split}: {self.conversations:,} conversations of {self.tokens:,} tokens, {self.answer_tokens:,} of them"
            f" in answers; median {self.median:,}, 95 % up to {self.percentile_95:,}, longest {self.longest:,}"
            + (f"; {self.sequences:,} sequences of {sequence_length:,}, {self.fill:.1%} full" if self.sequences else "")
        )

    def get_optional_warning(self, split: str, sequence_length: int) -> str | None:
        """Return a warning if conversations are truncated or have only empty answers, else None."""
        warnings = []
        if self.cut or self.left_out:
            warnings.append(
                f"{split}: {self.cut:,} of {self.conversations:,} conversations are longer than"
                f" sequence_length={sequence_length} and are cut at their end; {self.left_out:,} have no answer left"
                " and are left out. Use longer sequences to keep them whole."
            )
        if self.empty:
            warnings.append(
                f"{split}: {self.empty:,} of {self.conversations:,} conversations have only empty answers: a model"
                " only learns from them to end its turn. Delete them if this is not intended."
            )
        return "\n".join(warnings) or None


def measure_lengths(conversations: Dataset, *, sequences: int | None, sequence_length: int) -> LengthStatistics:
    """Measure the lengths of tokenised conversations.

    Args:
        conversations: Dataset with the columns ``length``, ``answer_tokens`` and ``is_empty``.
        sequences: Number of sequences into which the conversations are packed; None if each conversation is its own
            sequence.
        sequence_length: Tokens per sequence.
    """
    columns = conversations.select_columns(["length", "answer_tokens", "is_empty"]).with_format("numpy")[:]
    lengths, answers = columns["length"].astype(np.int64), columns["answer_tokens"].astype(np.int64)
    kept = np.minimum(lengths, sequence_length)[answers > 0].sum()
    return LengthStatistics(
        conversations=len(lengths),
        tokens=int(lengths.sum()),
        answer_tokens=int(answers.sum()),
        median=int(np.percentile(lengths, 50, method="lower")),
        percentile_95=int(np.percentile(lengths, 95, method="lower")),
        longest=int(lengths.max()),
        cut=int((lengths > sequence_length).sum()),
        left_out=int((answers == 0).sum()),
        empty=int(columns["is_empty"].sum()),
        sequences=sequences,
        fill=float(kept / (sequences * sequence_length)) if sequences else 1.0,
    )
