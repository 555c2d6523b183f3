"""What a step computes and keeps, read from torch's dispatcher."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product_flash_attention_for_cpu"}


class Products(TorchDispatchMode):
    """Dtypes of the results of matrix products and attention, and the most rows of one with ``vocabulary`` columns."""

    def __init__(self, vocabulary: int = 0) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.dtypes: set[torch.dtype] = set()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # outer products are the angles of rotary embeddings, which transformers keeps in float32
        if func._schema.name in PRODUCTS and args[0].size(-1) > 1:
            product = result if isinstance(result, Tensor) else result[0]
            self.dtypes.add(product.dtype)
            if product.size(-1) == self.vocabulary:
                self.rows = max(self.rows, product.numel() // self.vocabulary)
        return result


class LiveBytes(TorchDispatchMode):
    """Bytes of what was computed inside its block and is still alive, without the model's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        own = (to_local(tensor) for tensor in (*model.parameters(), *model.buffers()))
        self.own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self.storages: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            # of a DTensor the local tensor comes by, too
            if type(tensor) in (Tensor, nn.Parameter) and tensor.untyped_storage().data_ptr() not in self.own:
                self.storages.add(StorageWeakRef(tensor.untyped_storage()))
        return result

    def count(self) -> int:
        """The bytes, after a moment: threads of gloo let go of what they have sent only after the collective ends."""
        counts = []
        for _ in range(10):
            time.sleep(0.02)
            counts.append(self._count())
        return min(counts)

    def _count(self) -> int:
        alive = (torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference in self.storages)
        return sum(storage.nbytes() for storage in alive if storage is not None)


def to_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
