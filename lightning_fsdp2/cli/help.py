"""Help of ``lightning-fsdp2`` and of its commands: the options used most, on a page each. This needs no torch.

``--help=all`` shows all options of a command that reads a config, with those of Lightning's Trainer.
"""

from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import get_args

from lightning_fsdp2.cli.commands import COMMANDS, READ_CONFIG, SUMMARIES, ExportDtype
from lightning_fsdp2.cli.completion import CLASSES, SHELLS
from lightning_fsdp2.startup.registry import STRATEGIES


def _describe(names: Iterable[str], *others: str) -> str:
    """Return the lines that follow the name of an option, with what it can be."""
    *words, last = *names, *others
    indent = " " * 20
    return fill(f"{', '.join(words)} or {last}.", width=78, initial_indent=indent, subsequent_indent=indent)


_CONFIG = """\
  -c, --config FILE
                    YAML file of the run. Of several files, later ones replace
                    options of earlier ones.
"""
_SEED = """\
  --seed_everything SEED
                    Seed of the random numbers. Default: 0.
"""
_PRINT = """\
  --print_config    Print the config of the run and exit.
"""
_STRATEGY = f"""
how the model is spread over the ranks:
  --trainer.strategy NAME
{_describe(STRATEGIES, "a strategy of Lightning", "a class path")}
  --trainer.strategy.dp_replicate_size N    replicas of the sharded model
  --trainer.strategy.tp_size N              ranks that share each layer
  --trainer.strategy.cp_size N              ranks that share each sequence
  --trainer.strategy.ep_size N              ranks that share the experts
  --trainer.strategy.pp_size N              ranks that share the list of layers
"""
_TRAINER = """
the Trainer:
  --trainer.accelerator NAME                cpu or gpu
  --trainer.devices N                       processes per node
  --trainer.num_nodes N                     nodes
  --trainer.precision NAME                  such as bf16-mixed or bf16-true
"""
_TRAINING = """\
  --trainer.max_steps N                     optimizer steps until the end
  --trainer.accumulate_grad_batches N       batches per optimizer step
  --trainer.gradient_clip_val NORM          largest norm of the gradients
"""
_MODEL_AND_DATA = f"""
model and data:
  --model CLASS
{_describe(CLASSES["--model"], "the path of a LightningModule")}
  --model.pretrained PATH                   directory or Hub name of weights
  --data CLASS
{_describe(CLASSES["--data"], "the path of a LightningDataModule")}
  --data.path PATH                          files to read
  --data.tokenizer PATH                     directory or Hub name of a tokenizer
  --data.sequence_length N                  tokens of a sequence
  --data.batch_size N                       sequences of a batch on a rank
"""
_MORE = """
more help:
  --help=all                                all options, with the Trainer's
  --trainer.strategy.help CLASS             those of FSDP2Strategy, for example
  --model.help CLASS                        those of CausalLM, for example
  --data.help CLASS                         those of ChatDataModule, for example
"""

_RESUME = """\
  --ckpt_path PATH  Checkpoint to continue from. "last" is the newest last.ckpt.
"""
_EVALUATED = """\
  --ckpt_path PATH  Checkpoint to use. "last" is the newest last.ckpt.
"""
_VERBOSE = """\
  --verbose {true,false}
                    Whether to print the results. Default: true.
"""
_DESCRIBE = """\
  --world_size N    Ranks, which need not exist. Default: trainer.devices x
                    trainer.num_nodes.
  --format {table,json}
                    Tables to read, or JSON with every parameter. Default:
                    table.
"""
_PLAN = """\
  --world_size N    Devices. Default: trainer.devices x trainer.num_nodes.
  --device NAME     a100, h100, h200, b200 or mi300x. Default: h100.
  --search FILE     Search for the layout with the shortest steps, and write it
                    to this YAML file.
  --search_seconds SECONDS
                    Time limit of the search. Default: 600.
  --cache_dir DIR   Where a search keeps its simulations for later searches;
                    null for nowhere.
  --suggest {true,false}
                    Whether to also plan changes that would help, if the run
                    does not fit in memory. Default: true.
  --ranks RANKS     A rank or a list of ranks to plan. Default: the first and
                    the last, and one between them in a pipeline.
  --json FILE       File for all numbers; - prints them instead of the tables.
  --plot FILE       File for a plot of memory and traffic, .png or .svg.
  --processes N     Plans that are computed at once. Default: one per CPU.
"""
_DEVICE = """
a device that differs from others of its kind:
  --memory GIB                              memory
  --memory_bandwidth GB/S                   memory bandwidth
  --network_bandwidth GB/S                  bandwidth to other nodes, one way
  --devices_per_node N                      devices that fast links connect
  --product_tflops N                        of matrix products in bfloat16
  --attention_tflops N                      of attention's forward in bfloat16
"""

_PLAN_EXAMPLES = """
examples:
  lightning-fsdp2 plan --config run.yaml --world_size 64 --search best.yaml
  lightning-fsdp2 plan --world_size 64 --trainer.strategy fsdp2 \\
      --trainer.precision bf16-mixed --model CausalLM --model.pretrained MODEL \\
      --data TextDataModule --data.sequence_length 8192 --data.batch_size 1
"""

_VERIFY_OPTION = """\
  --verify {true,false}
                    Whether to compare what is read with its checksums.
                    Default: true.
"""
_TRUST_OPTION = """\
  --trust_checkpoint {true,false}
                    Whether to load arbitrary objects, which can run code.
                    Default: false.
"""
_CONSOLIDATE = f"""\
usage: lightning-fsdp2 consolidate [--OPTION VALUE ...] PATH OUTPUT

{SUMMARIES["consolidate"]}

arguments:
  PATH              The checkpoint directory.
  OUTPUT            The file to write. An existing file is replaced once the new
                    file is complete.

options:
  --with_optimizers {{true,false}}
                    Whether to keep optimizer states. Default: true.
{_VERIFY_OPTION}{_TRUST_OPTION}"""
_VERIFY = f"""\
usage: lightning-fsdp2 verify [--trust_checkpoint {{true,false}}] PATH

{SUMMARIES["verify"]}

arguments:
  PATH              A directory or a single file.

options:
{_TRUST_OPTION}"""
_EXPORT = f"""\
usage: lightning-fsdp2 export [--OPTION VALUE ...] PATH OUTPUT

{SUMMARIES["export"]}

arguments:
  PATH              A checkpoint directory or a single file.
  OUTPUT            The directory to write.

options:
  --dtype {{{",".join(get_args(ExportDtype))}}}
                    Dtype of the weights. Default: that of the checkpoint.
  --merge {{true,false}}
                    Whether to merge a LoRA adapter into the weights of its base
                    model, and write a model without adapters. Default: false.
  --tokenizer PATH  Directory or Hub name of a tokenizer to save with the model.
                    Default: the tokenizer of the run.
  --max_shard_size SIZE
                    Largest size of a file, in bytes or as text. Default: 5GB.
  --overwrite {{true,false}}
                    Whether to replace a directory that is not empty, once the
                    new one is complete. Default: false.
  --model NAME      Path of the model in the LightningModule, if it holds
                    several.
  --pretrained DIR  Directory of the model that training began with. Needed only
                    if this directory has moved since, and the checkpoint does
                    not hold the frozen weights.
{_VERIFY_OPTION}{_TRUST_OPTION}"""

_TRAINED = _STRATEGY + _TRAINER + _TRAINING
_EVALUATION = _STRATEGY + _TRAINER + _MODEL_AND_DATA + _MORE
_OPTIONS = {
    "fit": _CONFIG + _RESUME + _SEED + _PRINT + _TRAINED + _MODEL_AND_DATA + _MORE,
    "validate": _CONFIG + _EVALUATED + _VERBOSE + _SEED + _PRINT + _EVALUATION,
    "test": _CONFIG + _EVALUATED + _VERBOSE + _SEED + _PRINT + _EVALUATION,
    "predict": _CONFIG + _EVALUATED + _SEED + _PRINT + _EVALUATION,
    "describe": _CONFIG + _DESCRIBE + _PRINT + _STRATEGY + _MODEL_AND_DATA + _MORE,
    "plan": _CONFIG + _PLAN + _PRINT + _DEVICE + _STRATEGY + _MORE + _PLAN_EXAMPLES,
    "quickstart": _RESUME + _PRINT + _TRAINED + _MORE,
}
USAGE = "lightning-fsdp2 COMMAND [--OPTION VALUE ...]"
USAGES = {command: f"lightning-fsdp2 {command} --config FILE [--OPTION VALUE ...]" for command in READ_CONFIG}
USAGES["quickstart"] = "lightning-fsdp2 quickstart [--OPTION VALUE ...]"
PAGES = {
    **{
        command: f"usage: {USAGES[command]}\n\n{SUMMARIES[command]}\n\noptions:\n{options}"
        for command, options in _OPTIONS.items()
    },
    "consolidate": _CONSOLIDATE,
    "verify": _VERIFY,
    "export": _EXPORT,
}
"""Help of each command."""

_COMMANDS = "".join(f"  {name:<16}{summary}\n" for name, summary in SUMMARIES.items())
FRONT_PAGE = f"""\
usage: {USAGE}

Train any LightningModule with sharded weights, configured in YAML, and manage
its checkpoints.

commands:
{_COMMANDS}
options:
  -h, --help        Show this page; COMMAND --help shows the help of a command.
  --version         Show the version.
  --print_completion {{{",".join(SHELLS)}}}
                    Print a script with which a shell completes commands and
                    options.

examples:
  lightning-fsdp2 quickstart
  lightning-fsdp2 fit --config run.yaml --trainer.max_steps 100

The documentation is in the folder docs/ of the repository. Its page
command_line.md is about this program.
"""


def find_page(arguments: Sequence[str]) -> str | None:
    """Return the page of help that the arguments ask for, or None if they ask for none, or for all options."""
    command, *others = arguments or ["--help"]
    flags = {"-h", "--help"}
    if command in flags:
        return FRONT_PAGE
    if command in COMMANDS:  # its page has all options
        flags.add("--help=all")
    return PAGES[command] if command in PAGES and flags.intersection(others) else None
