"""Short names on the command line and in YAML, and suggestions for misspelt words."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import packages_distributions
from typing import Any

import yaml
from jsonargparse import get_loader
from lightning.pytorch.strategies import StrategyRegistry

from lightning_fsdp2.cli.unique_keys import RepeatedKeyError
from lightning_fsdp2.strategies.registry import STRATEGIES

_FLAG = "--trainer.strategy"
_HYPHENATED = re.compile(r"--[a-z]+(-[a-z]+)+(=|$)")


def expand_arguments(args: Sequence[str]) -> list[str]:
    """Expand short names of strategies in command line arguments.

    In ``--trainer.strategy NAME``, a short name becomes a class path with options. If NAME is a class path, the flag
    becomes ``--trainer.strategy.class_path``, because Lightning would treat a class path without options as a short
    name (https://github.com/Lightning-AI/pytorch-lightning/issues/19682). Options of commands may be written with
    hyphens, such as ``--world-size``.
    """
    expanded: list[str] = []
    for argument in args:
        if _HYPHENATED.match(argument):
            flag, equals, value = argument.partition("=")
            argument = f"--{flag[2:].replace('-', '_')}{equals}{value}"
        if expanded[-1:] == [_FLAG]:
            argument = f"{expanded.pop()}={argument}"
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
        ValueError: When ``content`` is not YAML, or has a key twice; the message names the line.
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
    if not isinstance(config, dict):
        return content
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
    try:
        word, candidates = _find_unknown(message, options)
    except (ImportError, AttributeError, NameError, TypeError, ValueError):
        return ""  # the class cannot be inspected, so there is no hint
    nearest = get_close_matches(word, candidates, n=1, cutoff=0.7)
    return f"; did you mean {candidates[nearest[0]]!r}?" if nearest else ""


def _is_class_path(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name) is not None


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
        names = [*STRATEGIES, *StrategyRegistry.available_strategies()]
        return found[1], {name: name for name in names} | {name: f"lightning_fsdp2.{name}" for name in _get_classes()}
    if found := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
        return found[1], {name: name for name in re.findall(r"\w+", found[2])}
    if found := re.search(r"(?:unrecognized arguments: --|does not accept option ')([\w.]+)", message):
        sections = {name.partition(".")[0] for name in options}
        section = found[1].partition(".")[0]
        return (
            (found[1], {name: name for name in options}) if section in sections else (section, {s: s for s in sections})
        )
    return "", {}


def _get_options(class_path: str) -> dict[str, str]:
    """Return a dict from each option of a class to the text to suggest for it.

    The options are the arguments of the class, and the fields of its configs.
    """
    module, _, name = class_path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    options: dict[str, str] = {}
    for base in inspect.getmro(found):
        if "__init__" not in base.__dict__:
            continue
        options |= {name: name for name in inspect.signature(base.__dict__["__init__"]).parameters if name != "self"}
    for name, hint in typing.get_type_hints(found.__init__).items():
        for kind in filter(dataclasses.is_dataclass, (hint, *typing.get_args(hint))):
            options = {field.name: f"{name}.{field.name}" for field in dataclasses.fields(kind)} | options
    return options


def _get_classes() -> list[str]:
    import lightning_fsdp2

    return [name for name in lightning_fsdp2.__all__ if isinstance(getattr(lightning_fsdp2, name), type)]


def _get_modules(name: str) -> list[str]:
    """Return the names of all modules in the parent package of ``name``, a module that was not found."""
    parent = name.rpartition(".")[0]
    if not parent:
        return [*packages_distributions(), *{loaded.partition(".")[0] for loaded in sys.modules}]
    try:
        path = importlib.import_module(parent).__path__
    except (ImportError, AttributeError):
        return []
    return [f"{parent}.{module.name}" for module in pkgutil.iter_modules(path)]
