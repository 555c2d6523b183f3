"""Train a fixed run on each kind of mesh, and compare it bit by bit with the same run at another commit.

Use it to check that a change of the source changes no numbers. Copy this file into a checkout of the earlier commit,
and run::

    python tools/fixed_run.py before/                   # in the checkout of the earlier commit
    python tools/fixed_run.py after/ --compare before/  # in this checkout

Each run trains six optimizer steps, saves a checkpoint, and resumes from it for two more steps. Losses are written as
hexadecimal floats, and weights and optimizer states as a checksum. With ``--compare``, runs resume from the checkpoints
in the other folder, so these checkpoints must still load.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

RANKS = {"tp2_sp": 2, "dp2_tp2": 4, "cp2": 2, "ddp": 2, "megatron": 2}
"""Number of ranks of each run, by the name of the run."""

RESULT = "result.json"

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


def main() -> None:
    """Run everything, or with ``--only``, run as one rank of one run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder for the result and the checkpoints")
    parser.add_argument("--compare", type=Path, help="folder of another commit, whose checkpoints are resumed from")
    parser.add_argument("--only", choices=RANKS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        train(arguments.only, arguments.folder, arguments.compare or arguments.folder)
        return
    arguments.folder.mkdir(parents=True)
    result = {run: launch(run, arguments.folder, arguments.compare) for run in RANKS}
    (arguments.folder / RESULT).write_text(json.dumps(result, indent=2))
    print(json.dumps(result, indent=2))
    if arguments.compare is not None:
        expected = json.loads((arguments.compare / RESULT).read_text())
        different = [run for run in RANKS if result[run] != expected[run]]
        sys.exit(f"different: {', '.join(different)}" if different else None)


def launch(run: str, folder: Path, compare: Path | None) -> dict[str, Any]:
    """Start the ranks of a run, and return the losses and the checksum that rank 0 has written."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS[run]}"]
    command += [__file__, str(folder), "--only", run, *(["--compare", str(compare)] if compare else [])]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=sys.stderr)
    losses: dict[str, Any] = json.loads((folder / f"{run}.json").read_text())
    return losses | {"state": get_checksum(folder / f"{run}.ckpt", folder / f"{run}.consolidated")}


def train(run: str, folder: Path, resume_from: Path) -> None:
    """Train six steps and save, then resume from the same run's checkpoint in ``resume_from`` for two more steps."""
    from helpers.cuda_on_cpu import cuda_on_cpu

    with cuda_on_cpu() if run == "megatron" else nullcontext():
        losses = fit(run, 6, save_to=folder / f"{run}.ckpt")
        resumed = fit(run, 8, resume_from=resume_from / f"{run}.ckpt")
    if os.environ["RANK"] == "0":
        (folder / f"{run}.json").write_text(json.dumps({"losses": losses, "resumed": resumed}))


def fit(run: str, steps: int, *, save_to: Path | None = None, resume_from: Path | None = None) -> list[str]:
    """Train up to ``steps`` optimizer steps and return the loss of each micro-batch as a hexadecimal float."""
    import torch
    from lightning.pytorch import Callback, Trainer, seed_everything
    from torch.utils.data import DataLoader

    from lightning_fsdp2 import CausalLM

    losses: list[str] = []

    class Losses(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]).hex())

    seed_everything(0, verbose=False)
    tokens = torch.randint(0, MODEL["vocab_size"], (64, 32), generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        strategy=build_strategy(run),
        accelerator="cpu",
        devices=RANKS[run],
        max_steps=steps,
        precision="bf16-mixed" if run == "dp2_tp2" else "32-true",
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[Losses()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=2)
    dropout = 0.0 if run == "cp2" else 0.1
    trainer.fit(CausalLM(config={**MODEL, "attention_dropout": dropout}), data, ckpt_path=resume_from)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return losses


def build_strategy(run: str) -> Any:
    """Build the strategy of a run."""
    from lightning_fsdp2 import DDPStrategy, FSDP2Config, FSDP2Strategy, MegatronFSDPStrategy

    if run == "ddp":
        return DDPStrategy()
    if run == "megatron":
        return MegatronFSDPStrategy()
    if run == "cp2":
        return FSDP2Strategy(cp_size=2)
    config = FSDP2Config(
        sequence_parallel=True, activation_checkpointing="selective" if run == "dp2_tp2" else False, backend="gloo"
    )
    return FSDP2Strategy(tp_size=2, config=config)


def get_checksum(checkpoint: Path, file: Path) -> str:
    """Return a checksum of all weights and optimizer states of a checkpoint, as whole tensors."""
    import torch

    from lightning_fsdp2 import consolidate_checkpoint

    consolidate_checkpoint(checkpoint, file)
    digest = hashlib.sha256()
    for path, tensor in sorted(list_tensors(torch.load(file, weights_only=True), "")):
        digest.update(f"{path} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def list_tensors(value: Any, path: str) -> list[tuple[str, Any]]:
    """List the tensors in nested dicts and lists with their paths. Random states are left out."""
    import torch

    if isinstance(value, torch.Tensor):
        return [(path, value)]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in items if "random" not in str(key) for found in list_tensors(inner, f"{path}/{key}")]


if __name__ == "__main__":
    main()
