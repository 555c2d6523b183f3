"""Imports what the forked ranks would otherwise import one by one, and keeps the parent free of threads."""

import logging
import os
import warnings
from functools import partial

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the Trainer gives a process that trains alone more threads
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import benchmarks.gpu  # noqa: F401  first, since it keeps transformers from importing torchao, which starts CUDA

# isort: split
import datasets  # noqa: F401  half of the time of a command line that reads data
import lightning.pytorch  # noqa: F401
import peft  # noqa: F401
import pytest
import torch
import torch._inductor.compile_fx  # a second of each rank that compiles, with whatever backend
import torch.profiler._cupti_monitor
import torch.utils.serialization.config
import transformers.models.gemma3.modeling_gemma3
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401
from helpers.limits import pytest_fixture_setup, pytest_runtest_setup, pytest_runtest_teardown  # noqa: F401
from torch._dynamo.utils import counters

import lightning_fsdp2
import lightning_fsdp2.cli.app
from lightning_fsdp2.parallel.layers.compile import apply_compile

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # both tell of kernels for GPUs that they did not find
    import megatron_fsdp  # noqa: F401

    if not torch.backends.cuda.is_built():
        import torchao.quantization  # noqa: F401  which would start CUDA, after which processes cannot be forked
    logging.disable(logging.NOTSET)

torch.set_num_threads(1)

for _name in lightning_fsdp2.__all__:
    getattr(lightning_fsdp2, _name)  # imports it


@pytest.fixture(autouse=True)
def _no_seed_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's `seed_everything` leaves the seed to all later Trainers, those of forked ranks included."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "")  # so that what the test sets is undone
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _no_gpu_unless_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the machine's GPUs from tests that are not marked `gpu`, because those tests are about ranks on CPUs."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def compile_without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers are traced, with their backward, but no code is generated for them; none was before."""
    torch.compiler.reset()
    counters.clear()
    for name in ("lightning_fsdp2.recipes.fsdp2.apply_compile", "lightning_fsdp2.managers.fsdp2.apply_compile"):
        monkeypatch.setattr(name, partial(apply_compile, backend="aot_eager"))
