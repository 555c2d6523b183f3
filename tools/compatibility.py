"""Try every option of Lightning's Trainer under every strategy, and write docs/compatibility.md if nothing fails.

Usage: python tools/compatibility.py [--output docs/compatibility.md]
"""

import argparse
import os
import platform
import sys
import tempfile
import warnings
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from helpers import callback_options, trainer_options  # noqa: F401 - these imports fill OPTIONS
from helpers.compatibility import OPTIONS, Option, try_options
from helpers.ranks import RankError
from helpers.strategies import STRATEGIES

HEADINGS = {"Trainer": "Arguments of the Trainer", "callbacks": "Callbacks", "Tuner": "Tuner"}


class Difference(NamedTuple):
    """A use of Lightning that differs from Lightning's own strategy, on purpose or because it must."""

    what: str
    under_ddp: str
    here: str
    reason: str


DIFFERENCES = (
    Difference(
        "`X.ckpt`",
        "a file",
        'a directory; a file with `CheckpointConfig(format="full")`; `lightning_fsdp2.load_from_checkpoint` reads both,'
        " for modules and data modules, where `load_from_checkpoint` of the class reads files",
        "each rank writes what it holds",
    ),
    Difference(
        "end of a fit with `ModelCheckpoint`",
        "keeps the last checkpoint that was saved before",
        "`last.ckpt` has the last step, unless `CheckpointConfig(save_at_end=False)`",
        "no step is lost",
    ),
    Difference(
        "a run that resumes from `trainer.save_checkpoint(...)` after a fit with `max_steps`",
        "skips the rest of an epoch that was cut short, and begins the next epoch too far on",
        "continues where the fit ended",
        "if data loaders have a state, the run trains what an uninterrupted run would have trained",
    ),
    Difference(
        "the order of a `DistributedSampler` in a resumed run",
        "the first epoch has the order of epoch 0",
        "the first epoch has its own order",
        "Lightning creates the iterators before it calls `set_epoch` (2.6.6)",
    ),
    Difference(
        "`ModelCheckpoint(every_n_train_steps=...)` with accumulation",
        "may save in the middle of an accumulation",
        "saves after optimizer steps",
        "a checkpoint does not hold accumulated gradients",
    ),
    Difference(
        "`on_load_checkpoint` before an evaluation",
        "gets `optimizer_states`",
        "does not get them",
        "reading them would take time and memory",
    ),
    Difference(
        "a checkpoint of another model",
        "`RuntimeError`",
        "`ValueError` on every rank, with a remedy",
        "a user's mistake is a `ValueError`",
    ),
    Difference(
        "`self.log(..., sync_dist=True)` with different numbers of samples on the ranks",
        "divides by the mean number, rounded down: 3 for 4 and 3 samples",
        "the mean over all samples",
        "the rounding makes Lightning's result inexact (2.6.6)",
    ),
    Difference(
        "`trainer.predict` with fewer samples than ranks",
        "hangs until its timeout",
        "a `ValueError` on every rank",
        "a rank without a batch cannot take part",
    ),
    Difference(
        "`trainer.init_module(empty_init=True)`",
        "memory without values on the device",
        "the meta device under FSDP2; weights come from the module's `reset_parameters`, or a checkpoint",
        "no rank holds the whole module",
    ),
    Difference(
        "random numbers after `seed_everything`",
        "all ranks draw the same dropout masks, noise and timesteps; iterators of loaders draw their seed from the"
        " global generator",
        'in training, each data parallel rank draws its own, unless `random_numbers="shared"`; what orders samples is'
        " shared, and iterators have their own generator. So the same seed gives other dropout masks, and another order"
        " for a loader with `shuffle=True` and `use_distributed_sampler=False`",
        "ranks that read different data need different masks, and a resumed run draws the same numbers as an"
        " uninterrupted one",
    ),
    Difference(
        "`trainer.callbacks` during a run, reports of profilers",
        "contain the user's callbacks",
        "also contain one or two callbacks of the strategy until the run ends",
        "they handle signals and logs: [callbacks.md](callbacks.md)",
    ),
    Difference(
        "rows and hyperparameters in loggers",
        "a row for each call",
        "one row per step, and the hyperparameter `run`",
        "[tracking.md](tracking.md)",
    ),
    Difference(
        "`trainer.fit(torch.compile(module))`",
        "compiles the module",
        "Lightning's error, which names its own strategies; use `enable_compile` of the config",
        "layers are compiled one by one, before they are wrapped",
    ),
    Difference(
        '`precision="bf16-mixed"`, output of the module',
        "bfloat16",
        "float32 under FSDP2",
        "losses are computed in float32",
    ),
    Difference(
        "`trainer.model` while it trains",
        "`DistributedDataParallel`",
        "the LightningModule itself under FSDP2",
        "torch shards it in place",
    ),
    Difference(
        "parameters that the loss does not use",
        "an error, or `find_unused_parameters`",
        "not changed under FSDP2; the same as in Lightning under DDP",
        "nothing waits for their gradients",
    ),
    Difference(
        "weights that are used without calling their module: `F.linear(x, self.layer.weight)`",
        "work",
        "under FSDP2 an error that says what to do instead",
        "weights are whole only in the forward of their module",
    ),
    Difference(
        "a penalty on `self.parameters()`, added to the loss",
        "works",
        "works under FSDP2, except over pipeline stages; under Megatron-FSDP, use the optimizer's `weight_decay`",
        "FSDP2 computes the penalty of the whole weights from the shards",
    ),
    Difference(
        "`self.load_state_dict(...)` with whole tensors in `on_fit_start` or later",
        "works",
        "under FSDP2 an error; load in `__init__`, `setup` or `configure_model`",
        "the module is sharded between `setup` and `on_fit_start`",
    ),
    Difference(
        "a gradient of a gradient (`create_graph=True`)",
        "works",
        "under FSDP2 an error that says so",
        "weights are freed after their forward",
    ),
    Difference(
        "parameters without a dimension or without elements, or that share memory; embeddings with `sparse=True`",
        "work",
        "refused if parameters are sharded",
        "there is nothing to shard; sparse gradients have no reduce-scatter",
    ),
    Difference(
        "parameters of the LightningModule itself under manual optimisation",
        "work",
        "refused if parameters are sharded",
        "they are gathered once for the whole step",
    ),
    Difference(
        "`LBFGS`, `Rprop`, `Adafactor`; optimizers of bitsandbytes and torchao, transformers' `Adafactor`",
        "work",
        "refused if parameters are sharded",
        "their implementations cannot step on shards",
    ),
    Difference(
        "`Muon` for a matrix of one row",
        "works",
        "under FSDP2 torch's error; use another optimizer for this matrix, as for a vector",
        "its products change how the row is sharded",
    ),
    Difference(
        "`p.grad.norm().item()`, `float(...)`, `if torch.isnan(p.grad).any()` on one rank only",
        "the value on this rank",
        "under FSDP2 an error that names the line, after half of `timeout` at most; on all ranks, the value of one"
        " process",
        "each rank holds a part, so all of them must read",
    ),
    Difference(
        "`lightning.pytorch.utilities.grad_norm`",
        "works",
        "under FSDP2 an error that says what to use, such as the callback `GradientNorm`",
        "it reads gradients as if they were whole",
    ),
    Difference(
        "`TensorBoardLogger(log_graph=True)` with an `example_input_array`",
        "traces on rank 0",
        "refused if parameters are sharded",
        "a forward needs all ranks",
    ),
    Difference(
        "`copy.deepcopy(module)`, `pickle.dumps(module)`, `module.to_torchscript()` after a fit",
        "work",
        "an error if parameters are sharded; load a checkpoint into a new module",
        "a rank has only a part of the module",
    ),
)


def main() -> int:
    """Try every option under every strategy, and return 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="Markdown file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failures = [
        failure for row in OPTIONS for strategy in STRATEGIES if (failure := get_optional_failure(row, strategy))
    ]
    if failures:
        print(*failures, sep="\n")
    elif arguments.output:
        arguments.output.write_text(describe_options(get_versions()))
        print(f"wrote {arguments.output}")
    return int(bool(failures))


def get_optional_failure(row: Option, strategy: str) -> str | None:
    """Try a single option, and return the failure as text, so that all other options are tried, too."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            try_options(strategy, [row], Path(folder))
        except RankError as error:
            return f"{strategy}: {error}"
    print(f"{row.group}, {row.name}, {strategy}: {row.describe(strategy)}", flush=True)
    return None


def get_versions() -> str:
    """Return a line with the date, the versions and the program that wrote the page."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "megatron-fsdp"))
    return (
        f"{datetime.now(timezone.utc):%Y-%m-%d}, Python {platform.python_version()}, {versions}. Written by"
        " tools/compatibility.py (`make compatibility`)."
    )


def describe_differences() -> list[str]:
    """Return the lines of the section on differences from Lightning's own strategy."""
    return [
        "",
        "## What differs from Lightning's `ddp`",
        "",
        "We ran about 175 uses of `fit`, `validate`, `test`, `predict`, loops, checkpoints, callbacks and the Tuner",
        'under Lightning\'s `"ddp"`, `FSDP2Strategy` and `DDPStrategy`, on two ranks and most of them also on one. We',
        "compared values, files, errors and the order of hooks. `tests/strategies/test_beside_ddp.py` keeps a part of",
        "these comparisons. These uses differ:",
        "",
        "| | Lightning's `ddp` | here | because |",
        "|---|---|---|---|",
        *(f"| {' | '.join(difference)} |" for difference in DIFFERENCES),
    ]


def describe_options(made_with: str) -> str:
    """Return the page as Markdown. ``made_with`` is the line with the date and the versions of the checks."""
    lines = [
        "# What works under which strategy",
        "",
        made_with,
        "",
        "This page lists every argument of Lightning's Trainer, every callback of Lightning, and its Tuner. *works*",
        "means that on two CPU ranks the option did the same as in one process, with the values and at the times in",
        "the second column. If the option can change weights, they were compared. *refused* means that an error before",
        "the first step names the option. Megatron-FSDP needs GPUs, so it ran with a stand-in for CUDA's streams.",
        "Other common features of the strategies are in [strategies.md](strategies.md).",
    ]
    for group, heading in HEADINGS.items():
        names = [f"`{kind.strategy.__name__}`" for kind in STRATEGIES.values()]
        lines += ["", f"## {heading}", "", f"| | tried | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
        for row in OPTIONS:
            if row.group == group:
                cells = " | ".join(row.describe(strategy) for strategy in STRATEGIES)
                lines.append(f"| `{row.name}` | {row.tried} | {cells} |")
    return "\n".join([*lines, *describe_differences(), ""])


if __name__ == "__main__":
    sys.exit(main())
