"""Short names on the command line and in YAML, and suggestions for misspelt words."""

import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import packages_distributions
from typing import Any

import yaml
from jsonargparse import get_loader

from lightning_fsdp2._suggestions import find_nearest, get_remark, list_options
from lightning_fsdp2.cli.messages import list_subclasses
from lightning_fsdp2.cli.unique_keys import RepeatedKeyError
from lightning_fsdp2.startup.registry import STRATEGIES

_FLAG = "--trainer.strategy"
_MODEL_DIRECTORY = re.compile(r"(?:^unrecognized arguments: |Path is not a file: ')([^-\s'][^\s']*)")
_MOST_OPTIONS = 20
"""Number of options up to which all are listed if none is similar to the given one."""

_HYPHENATED = re.compile(r"--[a-z]+(-[a-z]+)+(=|$)")


def expand_arguments(args: Sequence[str]) -> list[str]:
    """Expand short names of strategies in command line arguments.

    In ``--trainer.strategy NAME``, a short name becomes a class path with options. If NAME is a class path, the flag
    becomes ``--trainer.strategy.class_path``, because Lightning would treat a class path without options as a short
    name (https://github.com/Lightning-AI/pytorch-lightning/issues/19682). Options of commands may be written with
    hyphens, such as ``--world-size``. ``--help=all`` becomes jsonargparse's ``--help``.
    """
    expanded: list[str] = []
    for argument in args:
        if _HYPHENATED.match(argument):
            flag, equals, value = argument.partition("=")
            argument = f"--{flag[2:].replace('-', '_')}{equals}{value}"
        if expanded[-1:] == [_FLAG]:
            argument = f"{expanded.pop()}={argument}"
        argument = "--help" if argument == "--help=all" else argument
        flag, _, name = argument.partition("=")
        if flag == _FLAG and _is_class_path(name):
            flag = f"{_FLAG}.class_path"
            argument = f"{flag}={name}"
        if flag not in (_FLAG, f"{_FLAG}.class_path") or name not in STRATEGIES:
            expanded.append(argument)
            continue
        strategy = STRATEGIES[name]
        options = _flatten(strategy.get("init_args", {}), _FLAG)
        expanded.append(f"{_FLAG}.class_path={strategy['class_path']}")
        expanded += [f"{option}={str(value).lower()}" for option, value in options]
    return expanded


def expand_yaml(content: str, commands: Iterable[str]) -> str:
    """Expand short names of strategies in YAML: in a plain config, or in a config with a section for each command.

    Raises:
        ValueError: When ``content`` is not YAML, or has a key twice; the message names the line. Or when it is the
            config of a Hugging Face model.
    """
    try:
        config = get_loader("yaml")(content)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}" if error.problem_mark else "somewhere"
        if isinstance(error, RepeatedKeyError):
            raise ValueError(str(error)) from error
        raise ValueError(
            f"{line}: this is not YAML ({error.problem}); check the indentation and the quotes."
        ) from error
    except yaml.YAMLError as error:  # a character that YAML does not allow, such as a zero byte
        raise ValueError(f"this is not YAML ({' '.join(str(error).split())}); save it as plain text.") from error
    if config is None:
        return content
    if not isinstance(config, dict):
        raise ValueError(
            f"{str(config)[:50]!r} is not a mapping of options; begin with a section, such as `trainer:`, and indent"
            " its options."
        )
    if "model_type" in config:
        raise ValueError("this describes a model, not a run: give its directory with --model.pretrained DIRECTORY.")
    sections = (config, *(config.get(command) for command in commands))
    trainers = [section["trainer"] for section in sections if isinstance(section, dict) and "trainer" in section]
    is_changed = False
    for trainer in trainers:
        if isinstance(trainer, dict) and (strategy := _expand_strategy(trainer.get("strategy"))):
            trainer["strategy"], is_changed = strategy, True
    return yaml.safe_dump(config, sort_keys=False) if is_changed else content


def get_hint(message: str, options: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` for the unknown word in a parser's error, or "" if no known word is similar.

    Args:
        message: Whole message of the parser.
        options: Names of the options that the command has.
    """
    if re.match(r"(Parser key \")?trainer\.precision.*(fp8|float8)", message, re.DOTALL | re.IGNORECASE):
        return "; for float8, use precision='bf16-mixed' and set trainer.strategy.config.float8=true"
    if re.search(r'Parser key "mp_policy":\s', message) and "is not accepted" not in message:
        return "; to choose only the precision of the whole run, use trainer.precision, such as bf16-mixed"
    if found := re.search(r'Parser key "float8":.*\bval(?:ue: |=)\'?(rowwise\w*|tensorwise)\b', message, re.DOTALL):
        return f"; to choose a recipe, write {{recipe: {found[1]}}}"
    if re.search(r"Option 'init_?arg[^.s']*\.", message):
        return "; did you mean 'init_args'?"
    if (found := re.match(r"unrecognized arguments: ([^-\s]\S*)", message)) and _is_config(found[1]):
        return f"; did you mean --config {found[1]}?"
    if (found := _MODEL_DIRECTORY.search(message)) and os.path.isfile(os.path.join(found[1], "config.json")):
        return f"; to name a model, use --model CausalLM --model.pretrained {found[1]}"
    try:
        word, candidates = _find_unknown(message, options)
    except (ImportError, AttributeError, NameError, TypeError, ValueError):
        return ""  # the class cannot be inspected, so there is no hint
    if remark := get_remark(word, candidates.values()):
        return f"; {remark}"
    nearest = find_nearest(word, candidates, cutoff=0.65)
    if nearest is not None:
        return f"; did you mean {candidates.get(nearest, nearest)!r}?"
    own = [name for name, option in candidates.items() if name == option]
    return f"; it has {', '.join(own)}" if "is not accepted" in message and 0 < len(own) <= _MOST_OPTIONS else ""


def _is_class_path(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name) is not None


def _is_config(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) or os.path.isfile(word)


def _expand_strategy(strategy: Any) -> dict[str, Any] | None:
    if _is_class_path(strategy):
        return {"class_path": strategy}
    name = strategy.get("class_path") if isinstance(strategy, dict) else strategy
    if not isinstance(name, str) or name not in STRATEGIES:
        return None
    own = strategy if isinstance(strategy, dict) else {}
    return dict(_merge(STRATEGIES[name], {key: value for key, value in own.items() if key != "class_path"}))


def _merge(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**defaults, **own}
    for key in defaults.keys() & own.keys():
        if isinstance(defaults[key], Mapping) and isinstance(own[key], Mapping):
            merged[key] = _merge(defaults[key], own[key])
    return merged


def _flatten(options: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}", value


def _find_unknown(message: str, options: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Return the unknown word in ``message``, and a dict of known words that the user may have meant.

    The value for each known word is the text to suggest, which may be a longer form of the word.
    """
    if found := re.search(r"class_path '([\w.]+)':\s+Option '(\w+)", message):
        return found[2], _get_options(found[1])
    if found := re.search(r"Option '(\w+)' is not accepted\. Got value: Namespace\(class_path='([\w.]+)'", message):
        return found[1], _get_options(found[2])
    if found := re.search(r"typing\.Literal\[([^]]*)\]\.?\s[^[]*?(?:Got|Given) value: '?(\w+)", message):
        return found[2], {name: name for name in re.findall(r"\w+", found[1])}
    if found := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        names = [name for name in dir(importlib.import_module(found[1])) if not name.startswith("_")]
        return found[2], {name: f"{found[1]}.{name}" for name in names}
    if found := re.search(r"No module named '([\w.]+)'", message):
        return found[1], {name: name for name in _get_modules(found[1])}
    if found := re.search(r"(?:no strategy|dot import path string:) '?(\w+)", message):
        from lightning.pytorch.strategies import StrategyRegistry  # imported here, because it imports torch

        own = {name: name for name in STRATEGIES} | {name: f"lightning_fsdp2.{name}" for name in _get_classes()}
        if find_nearest(found[1], own, cutoff=0.65) is not None:  # although one of Lightning may be nearer
            return found[1], own
        others = {*StrategyRegistry.available_strategies(), *list_subclasses(message)}
        return found[1], {name: name for name in others}
    if found := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
        return found[1], {name: name for name in re.findall(r"\w+", found[2])}
    if found := re.search(r"(?:unrecognized arguments: --|does not accept option ')([\w.]+)", message):
        sections = {name.partition(".")[0] for name in options}
        section, dot, _ = found[1].partition(".")
        known = {name: name for name in (sections if dot and section not in sections else options)}
        return (found[1] if section in sections or not dot else section), known | {name: name for name in sections}
    return "", {}


def _get_options(class_path: str) -> dict[str, str]:
    module, _, name = class_path.rpartition(".")
    return {**list_options(getattr(importlib.import_module(module), name)), "class_path": "class_path: MODULE.CLASS"}


def _get_classes() -> list[str]:
    import lightning_fsdp2

    return [name for name in lightning_fsdp2.__all__ if isinstance(getattr(lightning_fsdp2, name), type)]


def _get_modules(name: str) -> list[str]:
    """Return the names of all modules in the parent package of ``name``, a module that was not found.

    Without a parent, these are all packages but those of the standard library, which have no models.
    """
    parent = name.rpartition(".")[0]
    if not parent:
        packages = {*packages_distributions(), *(loaded.partition(".")[0] for loaded in sys.modules)}
        return [*(packages - sys.stdlib_module_names)]
    try:
        path = importlib.import_module(parent).__path__
    except (ImportError, AttributeError):
        return []
    return [f"{parent}.{module.name}" for module in pkgutil.iter_modules(path)]
