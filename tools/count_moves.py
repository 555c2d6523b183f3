"""Count the files, the calls and the moves between files that a reader must follow to understand a run.

    python tools/count_moves.py [--functions]

A tiny Llama is set up, trained and saved on two tensor parallel ranks with sequence parallelism, and its checkpoint is
loaded onto two data parallel ranks. Only calls of the package's functions on rank 0 count, without comprehensions and
lambdas. A *move* is a call into a different file than the previous call.
"""

import argparse
import collections
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PACKAGE = str(ROOT / "lightning_fsdp2") + os.sep
STRUCTURE = ("modules/structure.py", "parallel/structure.py")
"""Files that find a model's structure: the current file, and the file in commits before 2026-11-25."""

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}


class Counter:
    """Profiler that counts calls of the package's functions."""

    def __init__(self) -> None:
        self.functions: collections.Counter[tuple[str, str]] = collections.Counter()
        self.moves = 0
        self._last = ""

    def count(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` with the profiler on, and return the result."""
        sys.setprofile(self._see)
        try:
            return function()
        finally:
            sys.setprofile(None)

    def report(self, name: str, *, functions: bool) -> None:
        """Print one line on rank 0, and one for each function if asked to."""
        files = {file for file, _ in self.functions}
        in_structure = sum(count for (file, _), count in self.functions.items() if file in STRUCTURE)
        if os.environ["RANK"] != "0":
            return
        print(
            f"{name:<32}{self.functions.total():>7} calls {len(files):>4} files {self.moves:>5} moves"
            f"{in_structure:>7} calls in structure",
            flush=True,
        )
        for (file, function), count in self.functions.most_common() if functions else ():
            print(f"    {count:>6} {file}:{function}", flush=True)

    def _see(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        file = code.co_filename.removeprefix(PACKAGE)
        self.functions[file, code.co_qualname if sys.version_info >= (3, 11) else code.co_name] += 1
        self.moves += file != self._last
        self._last = file


def main() -> None:
    """Start the ranks, or run as one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--functions", action="store_true", help="list the calls of each function")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        run(arguments.rank_of / "tiny.ckpt", functions=arguments.functions)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        command += [f"--rank-of={folder}", *(["--functions"] if arguments.functions else [])]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"})


def run(path: Path, *, functions: bool) -> None:
    """Count a set-up, a step, a save, and a load on another mesh."""
    import torch
    from lightning.pytorch import Callback, Trainer, seed_everything
    from torch.utils.data import DataLoader

    from lightning_fsdp2 import CausalLM, FSDP2Config, FSDP2Strategy

    class Step(Callback):
        """Callback that counts the third step, in which nothing happens for the first time."""

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.counter = Counter()
                sys.setprofile(self.counter._see)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                sys.setprofile(None)
                self.counter.report("a step, tp 2 + SP", functions=functions)

    seed_everything(0, verbose=False)
    tokens = torch.randint(0, MODEL["vocab_size"], (32, 16))
    loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=2)
    for name, strategy, resumed in (
        ("tp 2 + SP", FSDP2Strategy(tp_size=2, config=FSDP2Config(sequence_parallel=True)), None),
        ("dp 2", FSDP2Strategy(), path),
    ):
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=2,
            max_steps=4 if resumed is None else 5,
            gradient_clip_val=1.0,
            callbacks=[Step()] if resumed is None else [],
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        for method in ("setup",) if resumed is None else ("load_checkpoint",):
            _count_method(strategy, method, f"{method}, {name}", functions=functions)
        trainer.fit(CausalLM(config=MODEL), loader, ckpt_path=resumed)
        if resumed is None:
            counter = Counter()
            counter.count(lambda trainer=trainer: trainer.save_checkpoint(path))
            counter.report("save_checkpoint, tp 2 + SP", functions=functions)


def _count_method(strategy: Any, name: str, title: str, *, functions: bool) -> None:
    method = getattr(strategy, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        counter = Counter()
        result = counter.count(lambda: method(*args, **kwargs))
        counter.report(title, functions=functions)
        return result

    setattr(strategy, name, counted)


if __name__ == "__main__":
    main()
