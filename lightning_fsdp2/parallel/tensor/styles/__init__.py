"""Tensor parallel styles, which say how a module's parameters are sharded and how its inputs and results change.

Each style is a :class:`torch.distributed.tensor.parallel.ParallelStyle`, so
:func:`torch.distributed.tensor.parallel.parallelize_module` accepts it as well. Styles hold no state, so the same style
object can be used for any number of modules.
"""

from lightning_fsdp2.parallel.tensor.styles.attention import LatentKeyValue, LocalHeads, PerHeadModules
from lightning_fsdp2.parallel.tensor.styles.base import Replicated, ShardParameter, Style, SummedParameter
from lightning_fsdp2.parallel.tensor.styles.embeddings import FeatureEmbedding, VocabularyEmbedding, reads_token_ids
from lightning_fsdp2.parallel.tensor.styles.experts import IdentityExpert, SummedResult
from lightning_fsdp2.parallel.tensor.styles.norms import ShardedNorm
from lightning_fsdp2.parallel.tensor.styles.projections import ColumnWise, RowWise, VocabularyHead

__all__ = [
    "ColumnWise",
    "FeatureEmbedding",
    "IdentityExpert",
    "LatentKeyValue",
    "LocalHeads",
    "PerHeadModules",
    "Replicated",
    "RowWise",
    "ShardParameter",
    "ShardedNorm",
    "Style",
    "SummedParameter",
    "SummedResult",
    "VocabularyEmbedding",
    "VocabularyHead",
    "reads_token_ids",
]
