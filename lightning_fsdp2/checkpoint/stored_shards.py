"""Descriptions of unusual shards for checkpoints, so that no shard is copied or moved between ranks.

``torch.distributed.checkpoint`` (DCP) expects one piece of each tensor per rank, at the offset that ``Shard`` would
give it. Two kinds of tensors do not meet this expectation (see :mod:`~lightning_fsdp2.ranks.pieces`):

* *packed* tensors: under tensor parallelism, weights that hold several projections, such as gate and up;
* *uneven* tensors: the tensors of Megatron-FSDP, which may be cut at any row.

For these, DCP gets a :class:`PiecewiseTensor`, which tells it where in the full tensor each of the rank's pieces
belongs.
"""

from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from lightning_fsdp2.compat.torch import make_wrapper_subclass
from lightning_fsdp2.ranks.coordination import gather_objects
from lightning_fsdp2.ranks.pieces import Piece, get_packed_placements, get_pieces, get_uneven_group, is_uneven
from lightning_fsdp2.sizes import TENSOR_PARALLEL


class PiecewiseTensor(Tensor):
    """Tensor without memory that tells DCP which pieces of a DTensor this rank holds.

    DCP accepts any object with the methods ``__create_write_items__``, ``__create_chunk_list__`` and
    ``__get_tensor_shard__``. Through these, it reads and writes the memory of the DTensor directly
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/_checkpointable.py).

    Args:
        tensor: The DTensor.
        pieces: The pieces of ``tensor`` that this rank holds.
        copies: Number of ranks that hold the same pieces, among which DCP divides the writing. 0 if other ranks write
            this rank's pieces.
    """

    @staticmethod
    def __new__(cls, tensor: DTensor, pieces: list[Piece], *, copies: int = 1) -> "PiecewiseTensor":
        made: PiecewiseTensor = make_wrapper_subclass(cls, tensor)
        return made

    def __init__(self, tensor: DTensor, pieces: list[Piece], *, copies: int = 1) -> None:
        self._local = tensor.to_local().detach()
        self._pieces = {torch.Size(part.start for part in piece.whole): piece for piece in pieces}
        self._copies = copies

    def get_written_bytes(self) -> int:
        """Return roughly how many bytes this rank writes."""
        return self._local.nbytes // self._copies if self._copies else 0

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        """List what this rank writes. DCP calls this method with the key of the tensor."""
        if not self._copies:
            return []
        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """List the parts of the whole tensor that this rank holds."""
        return [
            ChunkStorageMetadata(offsets=offset, sizes=self._local[piece.local].size())
            for offset, piece in self._pieces.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory of a piece, for DCP to write it or to read into it."""
        assert index.offset is not None
        return self._local[self._pieces[index.offset].local]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse operations, because the tensor has no values."""
        raise NotImplementedError(
            f"{func} is not possible: this tensor has no values, because it only describes what a checkpoint holds"
        )


def is_unusual(tensor: Any) -> TypeGuard[DTensor]:
    """Return whether DCP needs a description of the shards of ``tensor``. An empty tensor needs none."""
    if not isinstance(tensor, DTensor) or not tensor.numel():
        return False
    return is_uneven(tensor) or bool(get_packed_placements(tensor))


def get_first_rows(tensors: Iterable[Any], group: dist.ProcessGroup | None = None) -> dict[int, int]:
    """Return, for each tensor with uneven shards, how many of its rows are on the ranks before this one.

    The ranks exchange the row counts of all tensors in a single message.

    Args:
        tensors: Tensors and other values, in the same order on every rank. Every rank must call this function.
        group: Process group of all ranks for the message. A CPU group keeps the message off the accelerator.

    Returns:
        The number of rows on the ranks before this one, by the tensor's index in ``tensors``. Tensors without uneven
        shards are left out.
    """
    uneven = {index: tensor for index, tensor in enumerate(tensors) if is_uneven(tensor)}
    if not uneven:
        return {}
    counts = gather_objects([tensor.to_local().size(0) for tensor in uneven.values()], group)
    first_rows = {}
    for position, (index, tensor) in enumerate(uneven.items()):
        own = get_uneven_group(tensor)
        ranks = [] if own is None else dist.get_process_group_ranks(own)[: own.rank()]
        first_rows[index] = sum(counts[rank][position] for rank in ranks)
    return first_rows


def describe_shards(tensor: DTensor, first_row: int = 0) -> PiecewiseTensor:
    """Describe, for DCP, the shards of a ``tensor`` for which :func:`is_unusual` is true.

    Args:
        tensor: The DTensor, with uneven or packed shards. DCP writes its memory to the checkpoint, or reads into it.
        first_row: For an uneven tensor, the number of its rows on the ranks before this one.
    """
    return PiecewiseTensor(tensor, get_pieces(tensor, first_row), copies=_count_copies(tensor))


def _count_copies(tensor: DTensor) -> int:
    """Return the number of ranks that share the writing of this rank's pieces, or 0 if other ranks write them.

    If several ranks hold the same piece, DCP writes it once. But DCP considers two pieces the same only if they begin
    at the same row. Tensor parallel ranks that hold copies of an uneven tensor may cut it at different rows, so only
    the first of these ranks writes its pieces.
    """
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or ()
    copies = 1
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            continue
        if not (is_uneven(tensor) and names[axis] == TENSOR_PARALLEL):
            copies *= mesh.size(axis)
        elif mesh.get_local_rank(axis) > 0:
            return 0
    return copies
