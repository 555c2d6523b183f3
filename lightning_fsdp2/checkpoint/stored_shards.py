"""Description of unusual shards for checkpoints, so that no shard is copied or moved between ranks.

DCP expects one piece of each tensor per rank, at the offset that ``Shard`` would give it. Two kinds of tensors are
different, see :mod:`~lightning_fsdp2.ranks.pieces`: packed weights under tensor parallelism, and the uneven shards of
Megatron-FSDP. For these, DCP gets a :class:`PiecewiseTensor`, which says where each piece of the rank is.
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
from lightning_fsdp2.mesh import TENSOR_PARALLEL
from lightning_fsdp2.ranks.coordination import gather_objects
from lightning_fsdp2.ranks.pieces import Piece, get_packed_placements, get_pieces, get_uneven_group, is_uneven


class PiecewiseTensor(Tensor):
    """Tensor without memory that tells DCP which pieces of a DTensor this rank holds.

    DCP asks any object for the three methods with two underscores. It then reads and writes the memory of the DTensor
    directly (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/_checkpointable.py).

    Args:
        tensor: The DTensor.
        pieces: The pieces of ``tensor`` that this rank holds.
        is_written: Whether this rank writes its pieces, and not another rank that holds the same ones.
    """

    @staticmethod
    def __new__(cls, tensor: DTensor, pieces: list[Piece], *, is_written: bool = True) -> "PiecewiseTensor":
        made: PiecewiseTensor = make_wrapper_subclass(cls, tensor)
        return made

    def __init__(self, tensor: DTensor, pieces: list[Piece], *, is_written: bool = True) -> None:
        self._local = tensor.to_local().detach()
        self._pieces = {torch.Size(part.start for part in piece.whole): piece for piece in pieces}
        self._is_written = is_written

    def get_written_bytes(self) -> int:
        """Return the size of the pieces that this rank writes, in bytes."""
        return self._local.nbytes if self._is_written else 0

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        """List what this rank writes. DCP calls this method with the key of the tensor."""
        if not self._is_written:
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
        raise NotImplementedError(f"{func} of a tensor that only describes what a checkpoint holds")


def is_unusual(tensor: Any) -> TypeGuard[DTensor]:
    """Return whether DCP needs a description of the shards of ``tensor``."""
    return isinstance(tensor, DTensor) and (is_uneven(tensor) or bool(get_packed_placements(tensor)))


def get_first_rows(tensors: Iterable[Any], group: dist.ProcessGroup | None = None) -> dict[int, int]:
    """Return the number of rows of each uneven tensor that lie on the ranks before this one, with a single message.

    Args:
        tensors: Tensors and other values, in the same order on every rank. Every rank must call this function.
        group: Process group of all ranks for the message. A CPU group keeps it off the accelerator.

    Returns:
        Dict by the index of the tensor in ``tensors``. Tensors that are not uneven are left out.
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
    """Describe the shards of an unusual ``tensor`` for DCP.

    Args:
        tensor: The DTensor, whose memory DCP writes or reads into.
        first_row: For an uneven tensor, the number of its rows on the ranks before this one.
    """
    return PiecewiseTensor(tensor, get_pieces(tensor, first_row), is_written=not _is_copy(tensor))


def _is_copy(tensor: DTensor) -> bool:
    """Return whether this rank only has a copy of uneven shards that another tensor parallel rank writes.

    DCP leaves out copies only if they begin at the same row, but the rows of a copy may be cut elsewhere.
    """
    names = tensor.device_mesh.mesh_dim_names or ()
    if not is_uneven(tensor) or TENSOR_PARALLEL not in names:
        return False
    axis = names.index(TENSOR_PARALLEL)
    return tensor.placements[axis].is_replicate() and tensor.device_mesh.get_local_rank(axis) > 0
