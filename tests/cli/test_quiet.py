"""What the command line does not show: known messages of other packages, and nothing else."""

import logging
import warnings

import pytest

from lightning_fsdp2.cli.quiet import leave_out_noise

NAMES = (
    "lightning.pytorch.utilities.rank_zero",
    "torchao",
    "lightning.fabric.utilities.seed",
    "torch.distributed.tensor._redistribute",
)


@pytest.fixture
def _noise() -> object:
    loggers = [logging.getLogger(name) for name in NAMES]
    before = [list(logger.filters) for logger in loggers]
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        leave_out_noise()
        leave_out_noise()  # as a second run in the same process does
        yield
    for logger, filters in zip(loggers, before, strict=True):
        logger.filters = filters


@pytest.mark.guarantees("quiet")
@pytest.mark.usefixtures("_noise")
def test_records_of_others(caplog: pytest.LogCaptureFixture) -> None:
    lightning, torchao, seeds, tensors = map(logging.getLogger, NAMES)
    with caplog.at_level(logging.INFO):
        lightning.info("💡 Tip: For seamless cloud logging, try installing something")
        lightning.info("TPU available: False, using: 0 TPU cores")
        lightning.info("GPU available: True (cuda), used: True")
        torchao.warning("Failed to load /a/_C_mxfp8.so: Could not load this library")
        torchao.warning("float8 failed")
        seeds.info("[rank: 12] Seed set to 1")
        seeds.info("Seed set to 1")
        tensors.warning("While redistributing from (_StridedShard(dim=0, sf=2), Shard(dim=0)) to (Replicate(), R), 2")
        tensors.warning("While redistributing from (Shard(dim=0), Shard(dim=0)) to (Replicate(), R), 2 sequential")
    *shown, last = caplog.messages
    assert shown == ["GPU available: True (cuda), used: True", "float8 failed", "Seed set to 1"]
    assert last.startswith("While redistributing from (Shard(dim=0), ")


@pytest.mark.guarantees("quiet")
@pytest.mark.parametrize(
    ("message", "module", "is_shown"),
    [
        ("`isinstance(treespec, LeafSpec)` is deprecated, use another", "lightning.pytorch.utilities._pytree", False),
        ("`isinstance(treespec, LeafSpec)` is deprecated, use another", "my_module", True),
        ("`is_gradient_checkpointing` is deprecated and will be removed", "transformers.modeling_utils", False),
        ("`is_gradient_checkpointing` is deprecated and will be removed", "my_module", True),
        ("No seed found, seed set to 0", "lightning.fabric.utilities.seed", False),
        ("the learning rate is 0", "lightning.pytorch.utilities._pytree", True),
    ],
)
def test_warnings_of_others(message: str, module: str, is_shown: bool) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        leave_out_noise()
        warnings.warn_explicit(message, FutureWarning, "file.py", 1, module=module)
    assert bool(shown) == is_shown
