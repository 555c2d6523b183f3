"""More than a hundred mistakes of newcomers: each ends in one line with code 2, which names the option and a remedy.

A row is the place of the mistake, the value, and words that the line has to contain.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
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
    file,
    flip_byte,
    optimizer,
    remove,
    text,
)

Row = tuple[str, Any, tuple[str, ...]]
TRAINER, OURS, ADAMW = "trainer", "lightning_fsdp2", "torch.optim.AdamW"
TYPED = ("fit", "--config=run.yaml")
DESCRIBE = ("describe", "--config=run.yaml", "--world_size=4")
PLAN = ("plan", "--config=run.yaml", "--world_size=2")
HUGE = 10**30

COMMANDS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("fit",), ("model", "--config")),
    (("--config=run.yaml",), ("no command", "fit --config")),
    (("fit", "run.yaml"), ("did you mean --config run.yaml?",)),
    (("describe", "sft.yml", "--world_size=2"), ("did you mean --config sft.yml?",)),
    ((*TYPED, "--trainer.strategy.config.float8=rowwise"), ("float8=rowwise", "{recipe: rowwise}")),
    ((*DESCRIBE, "--trainer.strategy=auto"), ("no trainer.strategy", "--trainer.strategy=fsdp2")),
    (("fit", "--model=gpt.LitGPT"), ("No module named 'gpt'",)),
    (("fit", "--config"), ("--config", "expected one argument")),
    (("fit", "-config", "run.yaml"), ("-config", "--config")),
    (("FIT", "--config=run.yaml"), ("FIT", "fit")),
    (("validte", "--config=run.yaml"), ("validte", "'validate'?")),
    ((*TYPED, "--trainer.max_steps", "=", "3"), ("max_steps=",)),
    ((*TYPED, "--trainer.max_steps"), ("max_steps", "expected one argument")),
    ((*TYPED, "--trainer.max_steps=1e3"), ("max_steps=1000.0", "an int")),
    ((*TYPED, "--max_steps=3"), ("max_steps", "'trainer.max_steps'?")),
    ((*TYPED, "--model.lr=3e-4"), ("lr", "'optimizer.lr'?")),
    ((*TYPED, "--model.optimiser=x"), ("optimiser", "'optimizer'?")),
    ((*TYPED, "--data.seq_length=8"), ("seq_length", "'sequence_length'?")),
    ((*TYPED, "--trainer.logger=wandb"), ("trainer.logger=wandb", "WandbLogger")),
    ((*TYPED, "--trainer.callbacks=EarlyStoppin"), ("EarlyStoppin", "'EarlyStopping'?")),
    ((*TYPED, "--trainer.precision=bf16-mxied"), ("precision=bf16-mxied", "'bf16-mixed'")),
    ((*TYPED, "--seed_everything=lucky"), ("seed_everything=lucky", "an int")),
    ((*TYPED, "--model=CausalLMM"), ("model=CausalLMM", "'lightning_fsdp2.CausalLM'?")),
    (("quickstart", "--steps=3"), ("--steps=3",)),
    (("quickstart", "--trainer.max_steps=few"), ("max_steps=few", "an int")),
    (("test", "--config=run.yaml"), ("test_path",)),
    (("predict", "--config=run.yaml"), ("test_path",)),
    (("validate", "--config=run.yaml", f"--{DATA.partition('.')[0]}.validation_fraction=0"), ("validation_fraction",)),
    (("validate", "--config=run.yaml", "--ckpt_path=absent.ckpt"), ("absent.ckpt",)),
    (("predict", "--config=run.yaml", "--return_predictions=sometimes"), ("return_predictions=sometimes", "true")),
    (("describe", "--config=run.yaml", "--world_size=many"), ("world_size=many", "an int")),
    (("describe", "--config=run.yaml", "--world_size=100000000000"), ("world_size=100000000000", "1048576")),
    ((*DESCRIBE, "--format=xml"), ("format=xml", "'json'")),
    ((*DESCRIBE, "--trainer.strategy=ddp"), ("DDPStrategy", "trainer.strategy=fsdp2")),
    ((*PLAN, "--ranks=first"), ("ranks=first", "an int")),
    ((*PLAN, "--json=nowhere/x.json"), ("json='nowhere/x.json'", "writable")),
    ((*PLAN, "--search=x.yaml", "--ranks=0"), ("ranks=0", "search")),
    ((*PLAN, "--processes=0"), ("processes=0", "null")),
    ((*PLAN, "--devices_per_node=-8"), ("devices_per_node=-8", "more than 0")),
    ((*PLAN, "--memory_bandwidth=0"), ("memory_bandwidth=0", "more than 0")),
    (("verify", "absent"), ("absent",)),
    (("verify", "text.txt"), ("text.txt", "torch.save")),
    (("consolidate", "text.txt", "out"), ("text.txt", "torch.save")),
    (("consolidate", "a", "b", "--verify=perhaps"), ("verify=perhaps", "true or false")),
    (("export", "run.ckpt"), ("output",)),
    (("export", "a", "b", "c"), ("unrecognized arguments: c",)),
    (("export", "a", "b", "--dtype=bfloat"), ("dtype=bfloat", "'bfloat16'?")),
    (("export", "a", "--output", "b"), ("--output", "output is the second argument")),
    (("verify", "--path=a"), ("--path", "path is the first argument")),
    (("--print_completion=fishy",), ("print_completion", "zsh")),
]
"""What is typed."""

CHECKPOINTS: list[tuple[tuple[str, ...], Callable[[Path], None] | None, tuple[str, ...]]] = [
    (("verify", "run.ckpt"), cut_off, ("run.ckpt", "earlier checkpoint")),
    (("verify", "run.ckpt"), remove(".metadata"), ("run.ckpt", ".metadata")),
    (("consolidate", "run.ckpt", "run.ckpt"), None, ("output='run.ckpt'", "file")),
    (("consolidate", "run.ckpt", "out.ckpt"), flip_byte, ("damaged", "earlier checkpoint")),
    (("export", "run.ckpt", "text.txt"), None, ("text.txt", "directory")),
    (("export", "out", "run.ckpt"), None, ("There is no checkpoint 'out'",)),
    (("export", "run.ckpt", "out", "--tokenizer=./nothing"), None, ("tokenizer='./nothing'", "directory")),
    (("export", "run.ckpt", "out", "--pretrained=./nothing"), None, ("pretrained='./nothing'", "leave it out")),
    (("export", "run.ckpt", "out", "--merge=true"), None, ("merge", "leave merge out")),
    (("export", "run.ckpt", "out", "--model=modle"), None, ("model='modle'", "'model'")),
    (("export", "run.ckpt", "out", "--max_shard_size=5 parsecs"), None, ("max_shard_size='5 parsecs'", "5GB")),
    ((*TYPED, "--ckpt_path=run.ckpt/__0_0.distcp"), None, ("__0_0.distcp", "earlier checkpoint")),
    ((*TYPED, "--ckpt_path=run.ckpt"), lambda c: (c / "meta.pt").write_bytes(b"x") and None, ("meta.pt", "truncated")),
    ((*TYPED, "--ckpt_path=run.ckpt"), lambda c: (c / "meta.json").write_text("{") and None, ("meta.json", "damaged")),
    ((*TYPED, "--ckpt_path=latest"), None, ("latest",)),
    ((*TYPED, "--ckpt_path=run.ckpt", "--model.lora={r: 4}"), None, ("run.ckpt", "does not fit")),
    (
        (*TYPED, "--ckpt_path=run.ckpt", "--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.1"),
        None,
        ("SGD", "optimizer of the checkpoint"),
    ),
]
"""What is typed, and what was done to the checkpoint before."""

OPTIONS: list[Row] = [
    ("trainer.log_every_n_steps", -1, ("log_every_n_steps=-1", "at least 1")),
    ("trainer.log_every_n_steps", 2.5, ("log_every_n_steps=2.5", "an int")),
    ("trainer.num_sanity_val_steps", -5, ("num_sanity_val_steps=-5", "-1")),
    ("trainer.check_val_every_n_epoch", -2, ("check_val_every_n_epoch=-2", "limit_val_batches=0")),
    ("trainer.min_steps", 10, ("min_steps=10", "max_steps=2")),
    ("trainer.devices", 9999, ("devices=9999", "torchrun")),
    ("trainer.devices", "2x", ("devices='2x'", "int > 0")),
    ("trainer.devices", 1.5, ("devices=1.5", "an int")),
    ("trainer.accelerator", "gpu", ("accelerator='gpu'",)),
    ("trainer.num_nodes", -1, ("num_nodes", "-1")),
    ("trainer.profiler", "magic", ("profiler='magic'", "simple")),
    ("trainer.default_root_dir", "text.txt", ("default_root_dir='text.txt'",)),
    ("trainer.plugins", ["magic"], ("plugins=magic", "class path")),
    ("trainer.strategy", "fsdp_2", ("fsdp_2", "'fsdp2'?")),
    ("trainer.strategy", ["fsdp2"], ("trainer.strategy=['fsdp2']", "text")),
    ("trainer.strategy", {"class_path": f"{OURS}.FSDPStrategy"}, ("FSDPStrategy", "FSDP2Strategy'?")),
    ("trainer.strategy", {"class_path": f"{OURS}.FSDP2Config"}, ("FSDP2Config", "Strategy")),
    ("trainer.strategy", optimizer(f"{OURS}.DDPStrategy", tp_size=2), ("tp_size", "such as FSDP2Strategy")),
    (
        "trainer.strategy",
        optimizer(f"{OURS}.DDPStrategy", config={"sequence_parallel": True}),
        ("sequence_parallel", "it has"),
    ),
    (
        "trainer.strategy",
        optimizer(f"{OURS}.MegatronFSDPStrategy", config={"zero_dp_strategy": 5}),
        ("zero_dp_strategy=5", "3"),
    ),
    ("trainer.callbacks", [{"class_path": f"{OURS}.callbacks.Throughputt"}], ("Throughputt", "Throughput'?")),
    (
        "trainer.callbacks",
        [optimizer(f"{OURS}.callbacks.GarbageCollection", every_n_steps=0)],
        ("every_n_steps", "'every_n_batches'?"),
    ),
    (
        "trainer.callbacks",
        [optimizer(f"{OURS}.callbacks.ExponentialMovingAverage", decay=1.5)],
        ("decay=1.5", "between 0 and 1"),
    ),
    ("trainer.callbacks", [optimizer(f"{CALLBACKS}.LearningRateMonitor")], ("LearningRateMonitor", "logger")),
    (
        "trainer.callbacks",
        [optimizer(f"{CALLBACKS}.ModelCheckpoint", dirpath="text.txt", every_n_train_steps=1)],
        ("text.txt", "dirpath"),
    ),
    ("trainer.logger", {"class_path": "WandbLoger"}, ("WandbLoger", "WandbLogger")),
    (
        "trainer.logger",
        optimizer("lightning.pytorch.loggers.CSVLogger", save_dir="text.txt"),
        ("logger.save_dir='text.txt'",),
    ),
    (f"{STRATEGY}.tp_size", "two", ("tp_size=two", "an int")),
    (f"{STRATEGY}.dp_size", "all", ("dp_size=all", "'auto'")),
    (f"{STRATEGY}.dp_replicate_size", 0, ("dp_replicate_size=0", ">= 1")),
    (f"{STRATEGY}.ep_size", 0, ("ep_size=0", ">= 1")),
    (f"{STRATEGY}.tensor_parallel_size", 2, ("tensor_parallel_size", "'tp_size'?")),
    (f"{STRATEGY}.dp_shard_size", 2, ("dp_shard_size", "'dp_size'?")),
    (f"{STRATEGY}.tp", 2, ("tp", "'tp_size'?")),
    (f"{STRATEGY}.auto_wrap_policy", "layers", ("auto_wrap_policy", "leave it out")),
    (f"{STRATEGY}.find_unused_parameters", True, ("find_unused_parameters", "DDPConfig")),
    (f"{FLAGS}.tp_size", 2, ("tp_size", "FSDP2Strategy")),
    (f"{FLAGS}.float8", "tensorwise", ("float8=tensorwise", "{recipe: tensorwise}")),
    (
        "trainer.callbacks",
        [optimizer(f"{CALLBACKS}.ModelCheckpoint", every_n_steps=2)],
        ("every_n_steps", "'every_n_train_steps'?"),
    ),
    (f"{STRATEGY}.pipeline_model_parallel_size", 2, ("pipeline_model_parallel_size", "'pp_size'?")),
    (f"{STRATEGY}.config", "full", ("config=full", "a mapping", "activation_checkpointing")),
    (f"{STRATEGY}.checkpoint", "sharded", ("checkpoint=sharded", "a mapping", "format")),
    (f"{STRATEGY}.checkpoint", {"async_sav": True}, ("async_sav", "'async_save'?")),
    (f"{STRATEGY}.checkpoint", {"trust_checkpoint": True, "weights_only": True}, ("contradict", "leave one")),
    (f"{STRATEGY}.timeout", "long", ("timeout", "long", "h:m:s")),
    (f"{FLAGS}.tp_plan", "hff", ("tp_plan='hff'", '"hf"')),
    (f"{FLAGS}.tp_plan", "torch.nonsense", ("tp_plan='torch.nonsense'", "my_package")),
    (f"{FLAGS}.tp_plan", {"model.layers.*.mlp.up_proj": "colwize"}, ("tp_plan", "colwize", "colwise")),
    (f"{FLAGS}.tp_plan", ["colwise"], ("tp_plan=['colwise']", "a mapping or text")),
    (f"{FLAGS}.mp_policy", "bf16", ("mp_policy=bf16", "param_dtype", "trainer.precision")),
    (f"{FLAGS}.mp_policy", {"parm_dtype": "bf16"}, ("parm_dtype", "'param_dtype'?")),
    (f"{FLAGS}.mp_policy", {"param_dtype": "bf61"}, ("param_dtype", "bf61", "bfloat16")),
    (f"{FLAGS}.offload_policy", "cpu", ("offload_policy=cpu", "true", "pin_memory")),
    (f"{FLAGS}.offload_policy", {"pin": False}, ("pin", "pin_memory")),
    (f"{FLAGS}.autocast_dtype", "float16", ("autocast_dtype", "bfloat16")),
    (f"{FLAGS}.activation_checkpointing_scope", [], ("activation_checkpointing_scope=[]", "activation_checkpointing=")),
    (f"{FLAGS}.reshard_after_forward", "often", ("reshard_after_forward=often", "true, false or an int")),
    (f"{FLAGS}.fsdp2_backward_prefetch_depth", -1, ("fsdp2_backward_prefetch_depth=-1", "0")),
    (f"{FLAGS}.pp_schedule", "zbv", ("pp_schedule=zbv", "'gpipe'")),
    (f"{FLAGS}.pp_microbatches", 0, ("pp_microbatches=0", "None")),
    (f"{FLAGS}.pp_stages_per_rank", 2, ("pp_stages_per_rank=2", "interleaved_1f1b")),
    (f"{FLAGS}.pp_layers_per_stage", "even", ("pp_layers_per_stage=even", "a list")),
    (f"{FLAGS}.backend", "cpu:gloo,cpu:gloo", ("backend='cpu:gloo,cpu:gloo'", "once")),
    (f"{FLAGS}.backend", "cuda:gloo", ("backend='cuda:gloo'", "cpu", "leave")),
    (f"{FLAGS}.bind_device_id", True, ("bind_device_id=True", "leave bind_device_id out")),
    (f"{FLAGS}.context_parallel_inputs", ["ids"], ("context_parallel_inputs=['ids']", "a mapping")),
    (f"{FLAGS}.use_hf_tp_plan", True, ("use_hf_tp_plan", 'tp_plan="hf"')),
    (f"{FLAGS}.float8", {"recipy": "rowwise"}, ("recipy", "'recipe'?")),
    (f"{FLAGS}.float8", {"skip": "lm_head"}, ("skip=lm_head", "a list")),
    (f"{FLAGS}.enable_compile", "inductor", ("enable_compile=inductor", "true or false")),
    (f"{MODEL}.config", ["llama"], ("config=['llama']", "a mapping or text")),
    (f"{MODEL}.lora", True, ("lora=True", "a mapping or text")),
    (f"{MODEL}.lora", {"rank": 4}, ("'rank'", "lora_alpha")),
    (f"{MODEL}.lora", {"r": "four"}, ("r='four'", "a whole number")),
    (f"{MODEL}.lora", "./nothing", ("nothing", "adapter_config.json")),
    (f"{MODEL}.lora", {"bias": "some"}, ("lora.bias='some'",)),
    (f"{MODEL}.router_aux_loss_coef", -0.1, ("router_aux_loss_coef=-0.1", "0 or more")),
    (f"{MODEL}.attn_implementation", "flash_attention_2", ("FlashAttention2", "installed")),
    (f"{MODEL}.optimizer", "AdamW2", ("optimizer=AdamW2", "class path")),
    (f"{MODEL}.optimizer", optimizer(ADAMW, learning_rate=1e-3), ("learning_rate", "'lr'?")),
    (f"{MODEL}.optimizer", optimizer("torch.optm.AdamW"), ("optm", "'torch.optim'?")),
    (f"{MODEL}.optimizer", optimizer("torch.nn.ReLU"), ("torch.nn.ReLU", "Optimizer")),
    (f"{MODEL}.optimizer", optimizer("torch.optim.Muon", lr=0.01), ("Muon only supports 2D", "norm.weight", "AdamW")),
    (f"{MODEL}.lr_scheduler", "WarmupStableDecay", ("=WarmupStableDecay", "lightning_fsdp2.schedulers.WarmupCosine")),
    (f"{MODEL}.lr_scheduler", "WarmupCosin", ("lr_scheduler=WarmupCosin", "'WarmupCosine'?")),
    (f"{MODEL}.lr_scheduler", "cosine", ("lr_scheduler=cosine", "class path")),
    (f"{MODEL}.lr_scheduler", optimizer("torch.optim.lr_scheduler.StepLR"), ("lr_scheduler", "step_size")),
    (
        f"{MODEL}.lr_scheduler",
        optimizer(f"{OURS}.schedulers.WarmupCosine", warmup_steps=1, min_ratio=3.0),
        ("min_ratio=3.0", "from 0 to 1"),
    ),
    (f"{DATA}.path", [], ("path=[]", "give exactly one")),
    (f"{DATA}.path", 3, ("path=3", "text")),
    (f"{DATA}.path", "*.text", ("path='*.text'", "spelling")),
    (f"{DATA}.path", "https://example.com/text.txt", ("path='https://example.com/text.txt'", "neither")),
    (f"{DATA}.sequence_length", HUGE, ("sequence_length=1000", "2147483647")),
    (f"{DATA}.batch_size", HUGE, ("batch_size=1000", "2147483647")),
    (f"{DATA}.batch_size", 100_000, ("batch_size=100000", "lower batch_size")),
    (f"{DATA}.batch_size", 2.5, ("batch_size=2.5", "an int")),
    (f"{DATA}.num_workers", 100_000, ("num_workers=100000", "at most")),
    (f"{DATA}.subset", "en", ("subset='en'", "leave it out")),
    (f"{DATA}.validation_path", "nothing.txt", ("validation_path='nothing.txt'", "spelling")),
    (f"{DATA}.validation_split", "valid", ("validation_split='valid'", "validation_path")),
    (f"{DATA}.pad_to_multiple_of", 0, ("pad_to_multiple_of=0", "leave it out")),
    (f"{DATA}.max_documents", 0, ("max_documents=0", "leave it out")),
    (f"{DATA}.tokenizer", "text.txt", ("tokenizer='text.txt'", "directory")),
    (f"{DATA}.cache_dir", "/proc/cache", ("cache_dir='/proc/cache'",)),
    (f"{DATA}.suffixes", "txt", ("suffixes=txt", "a list")),
    ("data.sequence_length", 16, ("data=", "init_args")),
    ("data", {"class_path": f"{OURS}.CausalLM"}, ("CausalLM", "LightningDataModule")),
    ("model", {"class_path": f"{OURS}.CausalLN"}, ("CausalLN", "CausalLM'?")),
    ("model", {"class_pth": f"{OURS}.CausalLM"}, ("class_pth", "'class_path: ")),
    ("model", {"class_path": f"{CALLBACKS}.ModelCheckpoint"}, ("ModelCheckpoint", "LightningModule")),
]
"""Values in the config of a run that is otherwise right."""

ARCHITECTURES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"hidden_act": "relu9"}, ("hidden_act='relu9'", "'relu'?")),
    ({"hidden_size": "32k"}, ("hidden_size", "32k", "int")),
    ({"hidden_size": HUGE}, ("hidden_size=1000", "2147483647")),
    ({"hidden_size": -32}, ("hidden_size=-32", "at least 1")),
    ({"num_hidden_layers": 10**12}, ("num_hidden_layers=1000", "10000")),
    ({"num_attention_heads": 5, "num_key_value_heads": 5}, ("hidden size (32)", "heads (5)")),
    ({"vocab_size": 10**12}, ("vocab_size=1000", "2147483647")),
    ({"attention_dropout": 2.0}, ("attention_dropout=2.0", "from 0 to 1")),
    ({"rope_parameters": {"rope_type": "ropey", "rope_theta": 1e4}}, ("rope_type='ropey'",)),
    ({"model_type": 7}, ("model_type=7", "'llama'")),
    ({"model_type": ["llama"]}, ("model_type=['llama']", "'llama'")),
    ({"model_type": "LlamaForCausalLM"}, ("LlamaForCausalLM", "spelling")),
    ({"model_type": "lama"}, ("model_type='lama'", "'llama'?")),
]
"""Fields of the model's config."""

LAYOUTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"tp_size": 4}, ("tp_size=4", "num_key_value_heads=2", "use 1 or 2")),
    ({"pp_size": 4}, ("pp_size=4", "3 layers", "at most 3")),
    ({"pp_size": 2, "config": {"pp_layers_per_stage": [1, 1]}}, ("pp_layers_per_stage=[1, 1]", "None")),
    ({"pp_size": 2, "tp_size": 4}, ("pp_size=2", "tp_size=4", "start 8")),
    ({"ep_size": 2}, ("ep_size=2", "ep_size=1")),
    ({"cp_size": 4, "config": {"context_parallel_method": "ulysses"}}, ("ulysses", "allgather")),
    ({"config": {"reshard_after_forward": 3}}, ("reshard_after_forward=3", "use 2")),
    ({"dp_size": 2}, ("dp_size=2", '"auto"')),
    ({"dp_replicate_size": 3}, ("dp_replicate_size=3", "use one of [1, 2, 4]")),
    ({"tp_size": 2, "config": {"tp_plan": "os.path"}}, ("tp_plan='os.path'", "function")),
]
"""Arguments of the strategy, described for four ranks."""

YAML: list[tuple[str, str, tuple[str, ...]]] = [
    ("  devices: 1", "  devices:1", ("line 4", "not YAML")),
    ("  devices: 1", "   devices: 1", ("line 3", "indentation")),
    ("path: text.txt", "path: 'text.txt", ("not YAML", "quotes")),
    ("path: text.txt", "path: [text.txt", ("not YAML", "']'")),
    ("path: text.txt", "path: “text.txt”", ("path='“text.txt”'", "did you mean 'text.txt'?")),
    ("path: text.txt", "path: $DATA/text.txt", ("path='$DATA/text.txt'", "spelling")),
    ("path: text.txt", "path: *missing", ("line 31", "alias 'missing'")),
    ("max_steps: 2", "max_steps: 2:", ("line 5", "not YAML")),
    ("max_steps: 2", "max_steps: !env STEPS", ("line 5", "'!env'")),
    ("max_steps: 2", "max_steps: yes", ("max_steps=True", "an int")),
    ("trainer:\n", "max_steps: 2\ntrainer:\n", ("max_steps", "'trainer.max_steps'?")),
    ("trainer:\n", "---\na: 1\n---\ntrainer:\n", ("line 3", "document")),
    ("trainer:\n", "trainer: \x00\n", ("run.yaml", "#x0000")),
]
"""What is changed in the file."""

FILES: list[tuple[str, str | bytes, tuple[str, ...]]] = [
    ("t.jsonl", "", ("t.jsonl", "empty")),
    ("t.jsonl", '{"text": 3}\n' * 40, ("text_column='text'", "strings")),
    ("t.jsonl", '{"content": "a"}\n' * 40, ("text_column='text'", "['content']")),
    ("t.json", "{", ("t.json", "repair")),
    ("t.parquet", "", ("t.parquet", "empty")),
    ("t.gz", b"\x1f\x8b\x08\x00abcdefg", ("t.gz", "repair")),
    ("t.txt", "caf\u00e9 ".encode("latin-1") * 100, ("t.txt", "UTF-8")),
]
"""Files to train on."""

VARIABLES: list[tuple[dict[str, str], tuple[str, ...]]] = [
    ({"WORLD_SIZE": "two"}, ("WORLD_SIZE='two'", "unset")),
    ({"RANK": "-1"}, ("RANK='-1'", "unset")),
    ({"SLURM_NTASKS": "x"}, ("SLURM_NTASKS='x'", "unset")),
    ({"MASTER_PORT": "99999"}, ("MASTER_PORT='99999'", "65535")),
    ({"PL_GLOBAL_SEED": "lucky"}, ("PL_GLOBAL_SEED='lucky'", "unset")),
]


def leave_in_folder(name: str, files: dict[str, bytes]) -> Callable[[Path], None]:
    """Write a folder of files into that of the run."""

    def prepare(folder: Path) -> None:
        (folder / name).mkdir()
        for file_name, content in files.items():
            (folder / name / file_name).write_bytes(content)

    return prepare


def list_pretrained() -> list[Case]:
    """Folders and names that are no pretrained model, and what is no data."""
    config = json.dumps(SMALL).encode()
    options = {f"{MODEL}.pretrained": "./m", CONFIG: None}
    damaged = {"config.json": config, "model.safetensors": b"x" * 100}
    broken = {"config.json": b"{", "model.safetensors": b"x"}
    answer = {"messages": [QUESTION, {"role": "assistant", "content": "x"}]}
    data = {"path": "c.jsonl", "sequence_length": 64, "batch_size": 2}
    return [
        Case(("pretrained=''", "leave it out"), {**options, f"{MODEL}.pretrained": ""}),
        Case(("pretrained=None", "config"), {CONFIG: None}),
        Case(("pretrained='m'", "save_pretrained"), options, prepare=leave_in_folder("m", {})),
        Case(("./m", "JSON"), options, prepare=leave_in_folder("m", broken)),
        Case(("m/model.safetensors", "copy"), options, prepare=leave_in_folder("m", damaged)),
        Case(("m", "incomplete"), args=("--ckpt_path=m",), prepare=leave_in_folder("m", {"config.json": config})),
        Case(
            ("f.ckpt", "state_dict"), args=("--ckpt_path=f.ckpt",), prepare=lambda f: torch.save({"a": 1}, f / "f.ckpt")
        ),
        Case(("num_workers=4", "0 or 1"), {f"{DATA}.streaming": True, f"{DATA}.num_workers": 4}),
        Case(("cp_size=2", "17", "16 or 20"), {f"{STRATEGY}.cp_size": 2, f"{DATA}.sequence_length": 17}, command=PLAN),
        Case(
            ("chat_template", "tokenizer"),
            {"data": optimizer(f"{OURS}.ChatDataModule", **data)},
            prepare=file("c.jsonl", f"{json.dumps(answer)}\n" * 40),
        ),
        chat(("line 1", "'role'", "write"), {"messages": [{"content": "hello"}]}),
        chat(("line 1", "'messages'", "list"), {"messages": "hello"}),
        Case(("run.yaml", "trainer:"), prepare=file("run.yaml", "hello\n")),
        Case(("run.yaml", "UTF-8"), prepare=file("run.yaml", "data: {path: caf\u00e9}\n".encode("latin-1"))),
        Case(("run.yaml", "trainer:"), prepare=file("run.yaml", "import torch\nprint('hello')\n")),
        Case(("sequence_length=16", "validation"), {f"{DATA}.validation_fraction": 0.0001}, prepare=text("a b " * 200)),
    ]


CASES = [
    *(Case(says, command=command) for command, says in COMMANDS),
    *(Case(says, command=command, prepare=TrainFirst(change)) for command, change, says in CHECKPOINTS),
    *(Case(says, {option: value}) for option, value, says in OPTIONS),
    *(Case(says, {CONFIG: {**SMALL, **fields}}) for fields, says in ARCHITECTURES),
    *(Case(says, {STRATEGY: arguments}, command=DESCRIBE) for arguments, says in LAYOUTS),
    *(Case(says, prepare=change_config(old, new)) for old, new, says in YAML),
    *(Case(says, {f"{DATA}.path": name}, prepare=file(name, content)) for name, content, says in FILES),
    *(Case(says, env=variables) for variables, says in VARIABLES),
    *list_pretrained(),
]


def name(case: Case) -> str:
    """Return a name for the test: what is typed, or what is in the config."""
    mistake = case.command or case.options or case.env or case.args
    words = " ".join(mistake) if isinstance(mistake, tuple) else str(mistake)
    return f"{CASES.index(case)} {words[:60]}"


@pytest.mark.guarantees("one-line-errors", "one-line")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if number % 32 or case.begins_with_checkpoint else ())
        for number, case in enumerate(CASES)
    ],
    ids=name,
)
@pytest.mark.usefixtures("_parsed")
def test_a_mistake_is_said(case: Case, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if case.begins_with_checkpoint:
        request.getfixturevalue("_trained")
    check_run(case, tmp_path)
