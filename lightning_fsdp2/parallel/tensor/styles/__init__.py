"""The tensor parallel styles: how a module's parameters are sharded, and what happens to its inputs and results.

Each style is a :class:`torch.distributed.tensor.parallel.ParallelStyle`, so that
:func:`torch.distributed.tensor.parallel.parallelize_module` accepts it as well. Styles hold no state, so one style can
serve any number of modules.
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
