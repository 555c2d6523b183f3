"""Reports of errors on the command line: one line for an error that the user can fix, a traceback for a bug."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jsonargparse import Namespace

from lightning_fsdp2.cli.expected import describe_type_error, is_about_type

_HEADINGS = (
    "Does not validate against",
    "Errors:",
    "Problem with given class_path",
    "Given value type: ",
    "Subclass types expect one of:",
    "a class path (str)",
    "a dict with",
)
_NESTED = re.compile(r"NestedArg\(key='(.*?)', val=(.*)\)")
# words that jsonargparse adds to errors about a class that is instantiated after parsing, such as an optimizer
_CALLABLE = re.compile(
    r"Type typing\.Callable\[.*\] expects a function or a callable class: |\. Got value: Namespace\(.*\)"
)


def wants_traceback() -> bool:
    """Return whether jsonargparse's own environment variable asks for tracebacks."""
    return os.environ.get("JSONARGPARSE_DEBUG", "").lower() == "true"


def is_first_of_node() -> bool:
    """Return whether this process is the one that reports errors for its node.

    Launchers number the processes of a node from 0. Without a launcher, there is only one process.
    """
    launched = {"WORLD_SIZE", "SLURM_LOCALID"} & os.environ.keys()  # else LOCAL_RANK is left from something else
    rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    return not launched or rank == "0" or not rank.isdecimal()


def summarize(message: str) -> str:
    """Shorten an error message of jsonargparse to the innermost option and the problem with it.

    jsonargparse tries every member of a union type and indents the error of each member. So the most indented lines are
    about the member that the given value came closest to.
    """
    if "Does not validate against" not in message:
        option, colon, reason = re.sub(r'^Parser key "([^"]+)":', r"\1:", " ".join(message.split())).partition(": ")
        return describe_type_error(option, "", [reason]) if is_about_type(reason) else f"{option}{colon}{reason}"
    keys: dict[int, str] = {}
    reasons: list[str] = []
    types: dict[int, str] = {}
    deepest, option, value = -1, "", ""
    for line in message.splitlines():
        text = line.lstrip(" ").removeprefix("- ")
        depth = len(line) - len(text)
        if key := re.search(r'Parser key "([^"]+)":$', text):
            keys = {outer: name for outer, name in keys.items() if outer < depth} | {depth: key[1]}
        elif text.startswith("Given value: "):
            value = value or text.removeprefix("Given value: ")
        elif text.startswith("Subtypes: "):
            types[depth] = text
        elif text and not text.startswith(_HEADINGS) and depth >= deepest:
            if depth > deepest:
                option = ".".join(name for outer, name in keys.items() if outer < depth)
                deepest, reasons, value = depth, [], ""
            reasons.append(text)
    # if a value has the right type but the wrong content, it does not help to list the other expected types
    others = [reason for reason in reasons if not is_about_type(reason)]
    if not others:
        given = _NESTED.fullmatch(value)
        return describe_type_error(option, given[2] if given else value, reasons, types.get(deepest - 4, ""))
    summary = _CALLABLE.sub("", ", or: ".join(dict.fromkeys(others)))
    return f"{option}: {summary}" if option else summary


def name_options(message: str, config: Namespace) -> str:
    """Return the options that a library's message is about, each with its value, to append to the message.

    These are the options whose value the message quotes, and the options of the Trainer that it names, since it rarely
    says both.
    """
    found = []
    for option, value in _walk(config):
        name = option.rpartition(".")[2]
        is_quoted = isinstance(value, str) and len(value) > 2 and _has_word(message, value)
        is_named = option.startswith("trainer.") and value is not None and f"`{name}`" in message
        if is_quoted or is_named:
            found.append(f"{option}={value!r}")
    return f" (the config has {', '.join(found)})" if found else ""


def _walk(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each option in a config. The levels of ``init_args`` are left out."""
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _walk(part, name if key == "init_args" else f"{name}.{key}".lstrip("."))
    elif isinstance(value, list) and any(isinstance(part, Mapping | Namespace) for part in value):
        for part in value:
            yield from _walk(part, name)
    else:
        yield name, value


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w-]|\.\w)", text) is not None
