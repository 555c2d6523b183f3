"""Runs a planned step on fake CUDA tensors, and writes down what mixes devices and what the host waits for.

A CUDA build of torch is needed, but no GPU: ``tests/helpers/cuda_stub.cpp`` stands in for the driver below Python, and
this file for what ``torch.cuda`` asks it. ``make test-cuda-build`` builds the stub and preloads it, since torch looks
for its driver while it is imported. Autograd's thread for the device, the dispatch of every operation, and FSDP2's
streams are those of a GPU. Races between streams are not seen.
"""

import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_fsdp2.plan.simulation import fake_managers
from lightning_fsdp2.plan.simulation import model as simulated
from lightning_fsdp2.plan.simulation import step as planned

CUDA = torch.device("cuda", 0)
HOST = torch.device("cpu")

_aten: Any = torch.ops.aten

needs_stub = pytest.mark.skipif(
    "cuda_stub.so" not in os.environ.get("LD_PRELOAD", ""),
    reason="needs a CUDA build of torch and the stub of its driver: `make test-cuda-build`",
)


@dataclass
class Step:
    """What happened in an optimizer step; each event is counted by its name and the line that caused it."""

    operations: Counter[str] = field(default_factory=Counter)
    copies_to_host: Counter[str] = field(default_factory=Counter)
    copies_to_device: Counter[str] = field(default_factory=Counter)
    mixed: Counter[str] = field(default_factory=Counter)
    """Operations that are no copies and see tensors of both devices."""

    host_reads: Counter[str] = field(default_factory=Counter)
    """Values of CUDA tensors that Python asks for, and waits for."""

    waits: Counter[str] = field(default_factory=Counter)
    """Streams, events and devices that the host waits for."""


def simulate_on_cuda(trainer: Trainer, module: LightningModule, batch: dict[str, Tensor], *, world_size: int) -> Step:
    """Run the step that :func:`~lightning_fsdp2.plan.simulation.step.simulate` plans, on device 0 in place of the CPU.

    Args:
        trainer: As for ``simulate``.
        module: As there.
        batch: On the host, as a loader gives it. The step begins with its copy to the device.
        world_size: Number of ranks.

    Returns:
        The step that ``simulate`` records, with all micro-batches that it runs.
    """
    strategy: Any = trainer.strategy
    strategy.parallel_devices = [CUDA]
    is_offloaded = bool(getattr(strategy.config, "offload_policy", None))
    step = Step()

    def run_step(trainer: Any, batch: Any, *, recorder: Any = None, **options: Any) -> None:
        with _Watch(Step() if recorder is None else step):
            batch = module.transfer_batch_to_device(batch, CUDA, 0)
            planned_step(trainer, batch, recorder=recorder, **options)

    planned_step = planned._run_step
    with ExitStack() as stack:
        stack.enter_context(_fake_torch_cuda(step))
        stack.enter_context(_place_models(HOST if is_offloaded else CUDA))
        stack.enter_context(_run_transformers_checks())
        stack.enter_context(patch.object(planned, "_run_step", run_step))
        planned.simulate(trainer, module, batch, world_size=world_size)
    return step


class _Watch(TorchDispatchMode):
    """Writes an optimizer step down, operation by operation."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._step = step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors come by next
        kwargs = kwargs or {}
        name = func._schema.name
        given = _get_devices((args, kwargs))
        self._step.operations[name] += 1
        if name == "aten::_local_scalar_dense" and given == {"cuda"}:
            self._step.host_reads[_find_line()] += 1
            return False  # fake tensors have no values
        result = func(*args, **kwargs)
        devices = given | _get_devices(result)
        if devices >= {"cpu", "cuda"}:
            self._note_both(name, args, result)
        return result

    def _note_both(self, name: str, args: Any, result: Any) -> None:
        event = f"{name} in {_find_line()}"
        if name not in ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_"):
            self._step.mixed[event] += 1
        elif _get_devices(result) == {"cuda"}:
            self._step.copies_to_device[event] += 1
        else:
            self._step.copies_to_host[event] += 1


def _get_devices(values: Any) -> set[str]:
    return {leaf.device.type for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


def _find_line() -> str:
    """The innermost line outside of torch, as ``folder/file.py:line``; in a thread of autograd's it may be torch's."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    torch_folder = Path(torch.__file__).parent
    outside = [frame for frame in frames if torch_folder not in Path(frame.filename).parents]
    frame = (outside or frames)[-1]
    path = Path(frame.filename)
    return f"{path.parent.name}/{path.name}:{frame.lineno}"


# ---------------------------------------------------------------------- what would ask the driver


class _Event:
    waits: Counter[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.waits[f"event in {_find_line()}"] += 1


class _Stream:
    waits: Counter[str]
    device = CUDA

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or torch.cuda.Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.waits[f"stream in {_find_line()}"] += 1


@contextmanager
def _fake_torch_cuda(step: Step) -> Iterator[None]:
    """Answer for a machine with 8 H100, inside the block, and note what the host waits for."""

    def synchronize(device: Any = None) -> None:
        step.waits[f"device in {_find_line()}"] += 1

    stream = type("Stream", (_Stream,), {"waits": step.waits})
    current = stream()
    fakes = {
        "Event": type("Event", (_Event,), {"waits": step.waits}),
        "Stream": stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: current,
        "default_stream": lambda device=None: current,
        "synchronize": synchronize,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device: torch.zeros(16, dtype=torch.uint8),  # a seed and an offset
        "set_rng_state": lambda state, device: None,
        "_lazy_init": lambda: None,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **fakes))
        stack.enter_context(patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False))
        stack.enter_context(patch.object(F, "scaled_dot_product_attention", _attend))
        stack.enter_context(patch.object(Tensor, "pin_memory", lambda tensor: tensor))  # fake tensors lack it
        yield


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call the kernel that torch takes on an H100, whose own choice asks the driver; flash stands for cuDNN's too."""
    if torch.is_autocast_enabled("cuda"):  # it casts what the function is given
        query, key, value = (tensor.to(torch.get_autocast_dtype("cuda")) for tensor in (query, key, value))
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        options = (dropout_p, is_causal, False)
        return _aten._scaled_dot_product_flash_attention(query, key, value, *options, scale=scale)[0]
    if enable_gqa:
        key, value = (tensor.repeat_interleave(query.size(1) // key.size(1), 1) for tensor in (key, value))
    if attn_mask is not None:
        shape = (*query.shape[:3], key.size(2))
        attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype).expand(shape)
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


# ---------------------------------------------------------------------- where a plan takes a CPU


@contextmanager
def _place_models(weights: torch.device) -> Iterator[None]:
    """Let plans put meshes on CUDA inside the block, and models on ``weights``."""
    build_device_mesh, allocate = simulated.build_device_mesh, fake_managers.allocate

    def build_cuda_mesh(sizes: Any, config: Any, **options: Any) -> Any:
        return build_device_mesh(sizes, config, **{**options, "device_type": "cuda"})

    def allocate_there(model: Any, device: torch.device) -> Any:
        return allocate(model, weights)

    with ExitStack() as stack:
        stack.enter_context(patch.object(simulated, "build_device_mesh", build_cuda_mesh))
        stack.enter_context(patch.object(fake_managers, "allocate", allocate_there))
        # DDP sorts its buckets anew after the first step, by numbers that it reads back from the device
        stack.enter_context(patch.object(fake_managers._Reducer, "_rebuild_buckets", lambda reducer: False))
        manager: Any = fake_managers._FakeFSDP2Manager
        stack.enter_context(patch.object(manager, "parallelize", _with_fake_buffers(manager.parallelize)))
        yield


def _with_fake_buffers(parallelize: Callable[..., Any]) -> Callable[..., Any]:
    def parallelize_with_fake_buffers(manager: Any, model: Any, **options: Any) -> Any:
        with _FakeBuffers(manager._mode):
            return parallelize(manager, model, **options)

    return parallelize_with_fake_buffers


class _FakeBuffers(TorchFunctionMode):
    """Makes a fake tensor of the empty one that FSDP2 allocates for each unit while the model is still on meta."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_on_cuda = func is torch.empty and torch.device(kwargs.get("device") or "cpu").type == "cuda"
        with self._mode if is_on_cuda else nullcontext():
            return func(*args, **kwargs)


@contextmanager
def _run_transformers_checks() -> Iterator[None]:
    """Let transformers look for packed sequences and padding as it does in a run, and not as it does for a plan."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(planned, "assume_unpacked_sequences", nullcontext))
        stack.enter_context(patch.object(transformers.utils.import_utils, "is_fake_tensor", lambda tensor: False))
        yield
