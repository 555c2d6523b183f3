"""Part that writes a trace of training steps."""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.gpu.arms import make_optimizer
from benchmarks.gpu.parts import TOY, Table, get_device_type, part
from benchmarks.gpu.shapes import LLAMA_1_5B, TINY
from benchmarks.memory import run_forked
from benchmarks.trainings import make_loader, make_trainer, process_group
from lightning_fsdp2 import CausalLM, FSDP2Strategy
from lightning_fsdp2.callbacks import StepProfiler

WAIT, WARMUP, ACTIVE = 3, 1, 2


@part("trace", toy=30, real=90)
def write_trace(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Write a trace of two steps of 1.5B for ui.perfetto.dev, to explain time that other figures do not explain."""
    run_forked(partial(train, args), 1)
    files = sorted(args.output.glob("step*.json.gz"))
    yield [Table("Traces", ("file", "MiB"), [[file.name, file.stat().st_size / 2**20] for file in files])]


def train(args: argparse.Namespace, worker: int) -> None:
    """Train with a profiler that writes the trace."""
    fields, shape = (TINY, (1, 16)) if args.scale == TOY else (LLAMA_1_5B, (2, 4096))
    profiler = StepProfiler(dirpath=args.output, wait=WAIT, warmup=WARMUP, active=ACTIVE)
    steps = WAIT + WARMUP + ACTIVE
    with process_group():
        trainer = make_trainer(
            FSDP2Strategy(),
            steps,
            [profiler],
            accelerator=get_device_type(),
            precision="bf16-mixed",
            gradient_clip_val=1.0,
        )
        trainer.fit(CausalLM(config=fields, optimizer=make_optimizer), make_loader(steps, *shape, fields["vocab_size"]))
