"""Lets asynchronous tensor parallelism run on CPU ranks, its fused operations as torch's fallbacks for them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory
from torch.torch_version import TorchVersion

from lightning_fsdp2.parallel.tensor import fusion
from lightning_fsdp2.parallel.tensor.fusion import CollectiveFusion

FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


@contextmanager
def fuse_on_cpu() -> Iterator[list[Counter[str]]]:
    """Let this process fuse collectives on CPU for good; yields the collectives of each graph that is compiled."""
    library = torch.library.Library("symm_mem", "IMPL")
    for name in FUSED:
        library.impl(name, getattr(_symmetric_memory, f"_{name}_fallback"), "CPU")
    dist.is_nccl_available = lambda: True
    fusion.has_symmetric_memory = lambda device_type: True
    graphs = []
    count = CollectiveFusion.count

    def record(self: CollectiveFusion, graph: torch.fx.Graph) -> None:
        names = [str(node.target).split(".")[1] for node in graph.nodes if "." in str(node.target)]
        graphs.append(Counter(name for name in names if "all_gather" in name or "reduce_scatter" in name))
        count(self, graph)

    CollectiveFusion.count = record
    # from torch 2.15 on groups need no registration, but a GPU
    needs_gpu = TorchVersion(torch.__version__) >= "2.15"
    with _symmetric_memory._test_mode() if needs_gpu else nullcontext():
        yield graphs
