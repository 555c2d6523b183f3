"""Suggestions for misspelt names, and for the names that other software gives to the same options."""

import dataclasses
import functools
import inspect
import os
import typing
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T", bound=type)

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Name of each dtype in torch, by its short name in other software."""

_ELSEWHERE = {
    # Lightning's ModelParallelStrategy and FSDPStrategy
    "data_parallel_size": "dp_size",
    "tensor_parallel_size": "tp_size",
    "cpu_offload": "offload_policy",
    "mixed_precision": "mp_policy",
    "activation_checkpointing_policy": "activation_checkpointing",
    "process_group_backend": "backend",
    "state_dict_type": "format",
    "save_distributed_checkpoint": "format",
    # accelerate's ParallelismConfig and FullyShardedDataParallelPlugin
    "dp_shard_size": "dp_size",
    "mixed_precision_policy": "mp_policy",
    "fsdp_reshard_after_forward": "reshard_after_forward",
    "fsdp_offload_params": "offload_policy",
    "fsdp_activation_checkpointing": "activation_checkpointing",
    "fsdp_state_dict_type": "format",
    # Hugging Face's Trainer
    "gradient_checkpointing": "activation_checkpointing",
    "torch_compile": "enable_compile",
    # torchtitan's job config
    "data_parallel_shard_degree": "dp_size",
    "data_parallel_replicate_degree": "dp_replicate_size",
    "tensor_parallel_degree": "tp_size",
    "context_parallel_degree": "cp_size",
    "expert_parallel_degree": "ep_size",
    "pipeline_parallel_degree": "pp_size",
    "pipeline_parallel_schedule": "pp_schedule",
    "pipeline_parallel_layers_per_stage": "pp_layers_per_stage",
    # Megatron, NeMo and NeMo Automodel
    "tensor_model_parallel_size": "tp_size",
    "pipeline_model_parallel_size": "pp_size",
    "context_parallel_size": "cp_size",
    "expert_parallel_size": "ep_size",
    "expert_model_parallel_size": "ep_size",
    "pipeline_parallel_size": "pp_size",
    "custom_tp_plan": "tp_plan",
    **{kind: f"{kind}_size" for kind in ("dp", "tp", "cp", "ep", "pp")},
    "fp8": "float8",
    # arguments of the optimizer and of the scheduler, which are options of their own here
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "warmup_steps": "lr_scheduler.warmup_steps",
    # a guess at an argument of Lightning's ModelCheckpoint
    "every_n_steps": "every_n_train_steps",
}
"""Names of options in other software, each with the name of the option that does the same here."""

_NOT_NEEDED = "leave it out, because the layers to shard are found"
_OF_STRATEGY = "it is an option of the strategies that shard, such as FSDP2Strategy"
_REMARKS = {
    "weights": "there are no weights per path: to use a path twice as often, give it twice in `path`",
    # FSDP of torch, Lightning and accelerate
    "auto_wrap_policy": _NOT_NEEDED,
    "fsdp_auto_wrap_policy": _NOT_NEEDED,
    "transformer_layer_cls_to_wrap": _NOT_NEEDED,
    "fsdp_transformer_layer_cls_to_wrap": _NOT_NEEDED,
    "sharding_strategy": (
        "FSDP2Strategy has config.reshard_after_forward=false for SHARD_GRAD_OP, and dp_replicate_size for HYBRID_SHARD"
    ),
    "find_unused_parameters": "it is an option of DDPConfig only",
    # arguments of a strategy that are given to its config
    **dict.fromkeys(("dp_size", "dp_replicate_size", "tp_size", "cp_size", "ep_size", "pp_size"), _OF_STRATEGY),
}
"""Names of options that no single option replaces, each with what to do instead."""


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def find_nearest(word: str, words: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the one of ``words`` that ``word`` was probably meant to be, or None.

    Args:
        word: Unknown word. If it has dots, only its last part is compared, with the words that begin like it.
        words: Known words. Of the words with dots, the part after the last dot is compared too.
        cutoff: Least similarity, from 0 to 1; see :func:`difflib.get_close_matches`.
    """
    section, _, name = word.rpartition(".")
    prefix = f"{section}." if section else ""
    known = {other.removeprefix(prefix): other for other in words if other.startswith(prefix)}
    ends = {other.rpartition(".")[2]: known[other] for other in reversed(known)} | known
    here = _ELSEWHERE.get(name, "")
    if here.partition(".")[0] in ends:
        return ends.get(here, prefix + here)
    if (end := here.rpartition(".")[2]) in ends:  # the word is an argument of the component itself
        return ends[end]
    nearest = get_close_matches(name, ends, n=1, cutoff=cutoff)
    return ends[nearest[0]] if nearest else None


def suggest(word: str, words: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ``; did you mean 'NAME'?`` with the nearest of ``words``, or an empty string; see :func:`find_nearest`.

    If ``word`` is known from elsewhere and none of ``words`` ends with it, the text says what to do instead.
    """
    words = list(words)
    if remark := get_remark(word, words):
        return f"; {remark}"
    nearest = find_nearest(word, words, cutoff=cutoff)
    return f"; did you mean {nearest!r}?" if nearest is not None else ""


def suggest_path(path: Path) -> str:
    """Return ``; did you mean 'PATH'?`` with what is called nearly like ``path`` in its folder, or an empty string."""
    if not path.parent.is_dir() or not os.access(path.parent, os.R_OK):
        return ""
    names = {other.name for other in path.parent.iterdir() if not other.name.startswith(".")}
    names.discard(path.name)  # a link whose target is gone
    nearest = get_close_matches(path.name, names, n=1)
    return f"; did you mean {str(path.with_name(nearest[0]))!r}?" if nearest else ""


def get_remark(word: str, words: Iterable[str]) -> str | None:
    """Return what to do instead of giving an option that is known from elsewhere and is not among ``words``."""
    name = word.rpartition(".")[2]
    return None if name in {other.rpartition(".")[2] for other in words} else _REMARKS.get(name)


def list_options(component: Any) -> dict[str, str]:
    """Return a dict from each option of a class to the text to suggest for it.

    The options are the arguments of the class and, after these, the fields of its configs, such as
    ``{"sequence_parallel": "config.sequence_parallel"}``.
    """
    options: dict[str, str] = {}
    for base in inspect.getmro(component):
        if "__init__" not in base.__dict__:
            continue
        parameters = inspect.signature(base.__dict__["__init__"]).parameters
        options |= {name: name for name, each in parameters.items() if name != "self" and each.kind not in _VARIABLE}
        if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            break  # this class passes no options of the user on to its base classes
    for name, hint in typing.get_type_hints(component.__init__).items():
        for kind in filter(dataclasses.is_dataclass, (hint, *typing.get_args(hint))):
            options = {field.name: f"{name}.{field.name}" for field in dataclasses.fields(kind)} | options
    return options


def with_suggestions(component: T) -> T:
    """Make a class suggest a name when it is given an unknown keyword argument. This is a decorator."""
    decorated: Any = component
    init = decorated.__init__
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def check_and_init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() - known.keys():
            hint = suggest(name, list_options(component).values()) or f"; it has {', '.join(list(known)[1:])}."
            raise TypeError(f"{component.__name__} has no option {name!r}{hint}")
        init(self, *args, **kwargs)

    decorated.__init__ = check_and_init
    return component
