"""A hundred mistakes that people make: each ends soon in one line with code 2, and leaves no process.

Each case runs the real command line in a forked process of its own; ten run as programs besides, one of them in a fresh
interpreter, since a fork says nothing of launchers and exit handlers.
"""

import sys
from functools import partial
from pathlib import Path

import pytest
from helpers.fork_server import get_python
from helpers.mistakes import (
    CALLBACKS,
    CONFIG,
    DATA,
    FLAGS,
    MODEL,
    QUESTION,
    SMALL,
    STRATEGY,
    Case,
    TrainFirst,
    change_config,
    chat,
    check_run,
    cut_off,
    data,
    file,
    flag,
    flip_byte,
    flip_bytes,
    model,
    optimizer,
    remove,
    run_really,
    strategy,
    text,
    trainer,
)
from helpers.models import GPT2

SAMPLE = {
    "tp_size that does not divide",
    "key twice",
    "text that is not there",
    "other launcher's RANK",
    "export into itself",
}
"""Cases of `make test`; all are in `make test-all`."""

REAL = {
    "tp_size that does not divide",
    "devices=0",
    "key twice",
    "binary config",
    "text that is not there",
    "bert",
    "answers that are all empty",
    "flipped byte",
    "MASTER_PORT that is no number",
    "export into itself",
}
"""Cases that run as programs, too."""

FRESH = "tp_size that does not divide"
"""The one of them that starts with an interpreter of its own."""


CASES = {
    # ---------------------------------------------------------------- the Trainer
    "devices=0": trainer(0, "devices", "devices"),
    "devices=-3": trainer(-3, "devices", "devices"),
    "devices that are a word": trainer("some", "devices", "devices"),
    "max_steps=-5": trainer(-5, "max_steps", "max_steps"),
    "max_epochs=-3": trainer(-3, "max_epochs", "max_epochs"),
    "precision=fp8": trainer("fp8", "precision", "precision"),
    "precision=16-mixed": trainer("16-mixed", ("16-mixed", "bf16-mixed"), "precision"),
    "precision=64-true": trainer("64-true", "64-true", "precision"),
    "accumulate_grad_batches=0": trainer(0, "accumulate_grad_batches", "accumulate_grad_batches"),
    "gradient_clip_val=-1": trainer(-1.0, "gradient_clip_val", "gradient_clip_val"),
    "gradient_clip_val that is a word": trainer("much", "gradient_clip_val", "gradient_clip_val"),
    "gradient_clip_algorithm": trainer("size", "gradient_clip_algorithm", "gradient_clip_algorithm"),
    "accelerator=tpu": trainer("tpu", "torch_xla", "accelerator"),
    "accelerator=abacus": trainer("abacus", "abacus", "accelerator"),
    "num_nodes=0": trainer(0, "num_nodes", "num_nodes"),
    "val_check_interval=2.5": trainer(2.5, "val_check_interval", "val_check_interval"),
    "limit_train_batches=-1": trainer(-1, "limit_train_batches", "limit_train_batches"),
    "limit_val_batches=1.5": trainer(1.5, "limit_val_batches", "limit_val_batches"),
    "max_time": trainer("soon", ("duration", "soon"), "max_time"),
    "sync_batchnorm on a CPU": trainer(True, "sync_batchnorm", "sync_batchnorm"),
    "no strategy of that name": Case("fsdp3", args=("--trainer.strategy=fsdp3",)),
    # ---------------------------------------------------------------- sizes
    "tp_size that does not divide": strategy(3, ("tp_size=3", "does not divide"), "tp_size"),
    "tp_size=0": strategy(0, "tp_size", "tp_size"),
    "tp_size=-2": strategy(-2, "tp_size", "tp_size"),
    "tp_size=2.5": strategy(2.5, "tp_size", "tp_size"),
    "more ranks than there are": strategy(2, "tp_size", "tp_size"),
    "cp_size=0": strategy(0, "cp_size", "cp_size"),
    "dp_size that does not divide": strategy(3, "dp_size", "dp_size"),
    "more replicas than ranks": strategy(2, "dp_replicate_size", "dp_replicate_size"),
    "ep_size=2": strategy(2, "ep_size", "ep_size"),
    "pp_size=2": strategy(2, "pp_size", "pp_size"),
    "timeout below zero": strategy("-00:00:05", "timeout", "timeout"),
    # ---------------------------------------------------------------- flags
    "flag that is no boolean": flag("maybe", ("sequence_parallel", "maybe"), "sequence_parallel"),
    "activation_checkpointing": flag("some", "activation_checkpointing", "activation_checkpointing"),
    "activation_checkpointing_scope": flag("brain", "brain", "activation_checkpointing_scope"),
    "reshard_after_forward=-1": flag(-1, "reshard_after_forward", "reshard_after_forward"),
    "context_parallel_method": flag("ring", "context_parallel_method", "context_parallel_method"),
    "tp_plan that is nowhere": Case(
        ("tp_plan", "nowhere"),
        {f"{STRATEGY}.tp_size": 2, f"{FLAGS}.tp_plan": "nowhere.plan"},
        command=("describe", "--config=run.yaml", "--world_size=2"),
    ),
    "tp_plan of other names": Case(
        ("tp_plan", "nothing.here"),
        {f"{STRATEGY}.tp_size": 2, f"{FLAGS}.tp_plan": {"nothing.here": "colwise"}},
        command=("describe", "--config=run.yaml", "--world_size=2"),
    ),
    "backend that is none": flag("mpi", "mpi", "backend"),
    "float8 recipe that is none": flag({"recipe": "blockwise"}, ("recipe", "blockwise"), "float8"),
    "float8 of no type": flag("fast", ("float8", "fast"), "float8"),
    "float8 without the layers of skip": flag(
        {"skip": ["head"]}, ("float8", "head"), "float8", command=("describe", "--config=run.yaml", "--world_size=2")
    ),
    **{
        f"float8 under {kind}": trainer(
            optimizer(f"lightning_fsdp2.{kind}", config={"float8": True}), ("float8", "FSDP2Strategy"), "strategy"
        )
        for kind in ("DDPStrategy", "MegatronFSDPStrategy")
    },
    "dtype of integers": flag({"param_dtype": "int8"}, "int8", "mp_policy"),
    "flag that is none": flag(True, "gradient_checkpointing", "gradient_checkpointing"),
    "async TP without TP": flag(True, "enable_async_tensor_parallel", "enable_async_tensor_parallel"),
    "checkpoint format": strategy({"format": "zip"}, "format", "checkpoint"),
    # ---------------------------------------------------------------- the model
    "model_type that is none": model({**SMALL, "model_type": "lama"}, "lama", "config"),
    "no model_type": model({"hidden_size": 32}, "model_type", "config"),
    "hidden_size=0": model({**SMALL, "hidden_size": 0}, "hidden_size=0", "config"),
    "heads that do not divide": model({**SMALL, "num_attention_heads": 3}, "3", "config"),
    "field of the config that is none": model({**SMALL, "hiden_size": 3}, "hiden_size", "config"),
    "bert": model({"model_type": "bert", "vocab_size": 300}, ("bert", "causal"), "config"),
    "t5": model({"model_type": "t5", "vocab_size": 300}, "t5", "config"),
    "config and pretrained": model("somewhere", ("pretrained", "config"), "pretrained"),
    "pretrained that is nowhere": Case("./nothing", {f"{MODEL}.pretrained": "./nothing", CONFIG: None}),
    "pretrained that is a file": Case("text.txt", {f"{MODEL}.pretrained": "text.txt", CONFIG: None}),
    "pretrained that is a checkpoint": Case(
        "run.ckpt", {f"{MODEL}.pretrained": "./run.ckpt", CONFIG: None}, prepare=TrainFirst()
    ),
    "vocabulary that is too small": model({**SMALL, "vocab_size": 64}, ("vocab", "64"), "config"),
    "attention that is none": model("flashy", "flashy", "attn_implementation"),
    "loss that is none": model("chunky", "chunky", "loss"),
    "rank of LoRA": model({"r": 0}, "`r`", "lora"),
    "LoRA on nothing": model({"target_modules": ["nothing"]}, "nothing", "lora"),
    "negative learning rate": model(optimizer("torch.optim.AdamW", lr=-1.0), "learning rate", "optimizer"),
    "learning rate that is a word": model(optimizer("torch.optim.AdamW", lr="small"), "small", "optimizer"),
    "optimizer that is none": model(optimizer("torch.optim.AdamX", lr=1.0), "AdamX", "optimizer"),
    "LBFGS": model(optimizer("torch.optim.LBFGS", lr=1.0), "LBFGS", "optimizer"),
    "scheduler's own argument": model(
        optimizer("lightning_fsdp2.schedulers.WarmupCosine", warmup_steps=-1), "warmup_steps", "lr_scheduler"
    ),
    # ---------------------------------------------------------------- text
    "text that is not there": data("nothing.txt", "nothing.txt", "path"),
    "text without a word": Case(("text.txt", "no "), prepare=text("")),
    "text of spaces": Case("sequence_length", prepare=text("  \n \n")),
    "folder without text": Case("empty", {f"{DATA}.path": "empty"}, prepare=lambda folder: (folder / "empty").mkdir()),
    "text that is binary": Case("text.txt", prepare=text(bytes(range(256)) * 20)),
    "text in UTF-16": Case("text.txt", prepare=text("some words\n".encode("utf-16") * 100)),
    "less text than a sequence": Case("sequence_length", {f"{DATA}.sequence_length": 64}, prepare=text("few words")),
    "sequence_length=0": data(0, "sequence_length", "sequence_length"),
    "sequence_length=-5": data(-5, "sequence_length", "sequence_length"),
    "longer than positions": Case(
        ("sequence_length=64", "n_positions"),
        {CONFIG: {**GPT2, "vocab_size": 257}, f"{DATA}.sequence_length": 64},
    ),
    "batch_size=0": data(0, "batch_size", "batch_size"),
    "num_workers=-1": data(-1, "num_workers", "num_workers"),
    "global_batch_size": data(3, "global_batch_size=3", "global_batch_size"),
    "validation_fraction=-0.1": data(-0.1, "validation_fraction=-0.1", "validation_fraction"),
    "validation_fraction=1.5": data(1.5, "validation_fraction=1.5", "validation_fraction"),
    "tokenizer that is nowhere": data("./nothing", "./nothing", "tokenizer"),
    "dataset and path": data("somewhere", ("dataset", "path"), "dataset"),
    "broken parquet": Case("text.parquet", {f"{DATA}.path": "text.parquet"}, prepare=file("text.parquet", "PAR1?")),
    "broken JSON": Case("text.jsonl", {f"{DATA}.path": "text.jsonl"}, prepare=file("text.jsonl", '{"text": "a"\n{')),
    "JSON without text": Case("text", {f"{DATA}.path": "text.jsonl"}, prepare=file("text.jsonl", '{"words": "a"}\n')),
    # ---------------------------------------------------------------- conversations
    "answers that are all empty": chat("empty", {"messages": [QUESTION, {"role": "assistant", "content": ""}]}),
    "questions without an answer": chat("assistant", {"messages": [QUESTION]}),
    "ShareGPT": chat("from", {"conversations": [{"from": "human", "value": "hello"}]}),
    "Alpaca": chat("instruction", {"instruction": "say something", "output": "something"}),
    "images": chat(
        "image",
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "a cat"}]},
    ),
    "roles that are none": chat("robot", {"messages": [QUESTION, {"role": "robot", "content": "hello"}]}),
    # ---------------------------------------------------------------- YAML
    "config that is not there": Case("absent.yaml", command=("fit", "--config", "absent.yaml")),
    "config that is a folder": Case(
        "folder", command=("fit", "--config", "folder"), prepare=lambda f: (f / "folder").mkdir()
    ),
    "empty config": Case("config", command=("fit", "--config", "empty.yaml"), prepare=file("empty.yaml", "")),
    "config that is a list": Case(
        "mapping", command=("fit", "--config", "list.yaml"), prepare=file("list.yaml", "- a")
    ),
    "binary config": Case(
        ("bin.yaml", "utf-8"), command=("fit", "--config", "bin.yaml"), prepare=file("bin.yaml", bytes(range(256)))
    ),
    "key twice": Case(
        ("twice", "max_steps", "line"), prepare=change_config("trainer:\n", "trainer:\n  max_steps: 9\n")
    ),
    "tab in YAML": Case("run.yaml", prepare=change_config("trainer:\n", "trainer:\n\tmax_time: null\n")),
    "section that is none": Case("trainr", prepare=change_config("trainer:\n", "trainr:\n")),
    "option that is none": Case("max_stepz", args=("--trainer.max_stepz=3",)),
    "command that is none": Case("train", command=("train", "--config", "run.yaml")),
    # ---------------------------------------------------------------- checkpoints
    "ckpt_path that is nowhere": Case("absent.ckpt", args=("--ckpt_path=absent.ckpt",)),
    "ckpt_path without a name": Case("ckpt_path", args=("--ckpt_path=",)),
    "ckpt_path=best without a monitor": Case("best", args=("--ckpt_path=best",)),
    "ckpt_path that is text": Case("text.txt", args=("--ckpt_path=text.txt",)),
    "ckpt_path that is some folder": Case(
        "folder", args=("--ckpt_path=folder",), prepare=lambda f: (f / "folder").mkdir()
    ),
    "flipped byte": Case("damaged", args=("--ckpt_path=run.ckpt",), prepare=TrainFirst(flip_byte)),
    "half a file": Case("run.ckpt", args=("--ckpt_path=run.ckpt",), prepare=TrainFirst(cut_off)),
    "file that is lost": Case("run.ckpt", args=("--ckpt_path=run.ckpt",), prepare=TrainFirst(remove("*.distcp"))),
    "metadata that are lost": Case("run.ckpt", args=("--ckpt_path=run.ckpt",), prepare=TrainFirst(remove(".metadata"))),
    "checkpoint of another model": Case(
        "run.ckpt",
        {CONFIG: {**SMALL, "hidden_size": 64}},
        args=("--ckpt_path=run.ckpt",),
        prepare=TrainFirst(),
    ),
    "export of nothing": Case("absent", command=("export", "absent", "out")),
    "export into itself": Case("run.ckpt", command=("export", "run.ckpt", "run.ckpt/sub"), prepare=TrainFirst()),
    "export of a flipped byte": Case("damaged", command=("export", "run.ckpt", "out"), prepare=TrainFirst(flip_bytes)),
    "export to a dtype that is none": Case(
        "int3", command=("export", "run.ckpt", "out", "--dtype=int3"), prepare=TrainFirst()
    ),
    "export in shards of nothing": Case(
        "max_shard_size", command=("export", "run.ckpt", "out", "--max_shard_size=0"), prepare=TrainFirst()
    ),
    "consolidate into a folder": Case(
        "out", command=("consolidate", "run.ckpt", "out"), prepare=TrainFirst(lambda c: (c.parent / "out").mkdir())
    ),
    "verify without a name": Case("path", command=("verify",)),
    # ---------------------------------------------------------------- variables
    "MASTER_PORT that is no number": Case("MASTER_PORT", env={"MASTER_PORT": "abc"}),
    "other launcher's RANK": Case("RANK", env={"RANK": "7"}),
    "other launcher's WORLD_SIZE": Case("WORLD_SIZE", env={"WORLD_SIZE": "8"}),
    "NODE_RANK of no node": Case("NODE_RANK", env={"NODE_RANK": "3"}),
    "LOCAL_RANK of no device": Case("LOCAL_RANK", env={"LOCAL_RANK": "5"}),
    # ---------------------------------------------------------------- callbacks
    "callback that is none": trainer([{"class_path": f"{CALLBACKS}.Nothing"}], "Nothing", "callbacks"),
    "monitor that is none": trainer(
        [optimizer(f"{CALLBACKS}.EarlyStopping", monitor="nothing")], "nothing", "callbacks"
    ),
    "save_top_k=-2": trainer([optimizer(f"{CALLBACKS}.ModelCheckpoint", save_top_k=-2)], "save_top_k", "callbacks"),
    "callback that is refused": trainer(
        [optimizer(f"{CALLBACKS}.StochasticWeightAveraging", swa_lrs=0.1)], "StochasticWeightAveraging", "callbacks"
    ),
    # ---------------------------------------------------------------- plans
    "plan for no rank": Case("world_size", command=("plan", "--config=run.yaml", "--world_size=0")),
    "describe for no rank": Case("world_size", command=("describe", "--config=run.yaml", "--world_size=-1")),
    "device that is none": Case("h9000", command=("plan", "--config=run.yaml", "--world_size=2", "--device=h9000")),
    "memory below zero": Case("memory", command=("plan", "--config=run.yaml", "--world_size=2", "--memory=-1")),
    "rank that is none": Case("99", command=("plan", "--config=run.yaml", "--world_size=2", "--ranks=[99]")),
    "plot that is no picture": Case("plot", command=("plan", "--config=run.yaml", "--world_size=2", "--plot=x.txt")),
}


@pytest.mark.guarantees("one-line-errors", "contradicting-variables", "one-line", "libraries-mistakes")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in CASES]
)
@pytest.mark.usefixtures("_parsed")
def test_a_mistake_is_said(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if CASES[name].begins_with_checkpoint:
        request.getfixturevalue("_trained")
    check_run(CASES[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REAL))
@pytest.mark.usefixtures("_trained")
def test_a_mistake_is_said_by_a_real_process(name: str, tmp_path: Path) -> None:
    check_run(CASES[name], tmp_path, partial(run_really, python=sys.executable if name == FRESH else get_python()))
