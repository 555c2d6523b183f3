"""Messages of jsonargparse and other libraries in one line, with the options and the values that they are about."""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from jsonargparse import Namespace

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
_REASON = re.compile(r"Expected an? (.*?)(?:\. Got value: (.*?))?(?:\. Got value: Namespace\(.*\))?")
_NO_SUBCLASS = "Not a valid subclass of "
_NO_IMPORT = "dot import path string: "
_NAMES = {
    "bool": ["true", "false"],
    "float": ["a number"],
    "str": ["text"],
    "dict": ["a mapping"],
    "Iterable": ["a list"],
}
_MOST_CLASSES = 8
"""Number of subclasses up to which they are listed as examples."""
_MOST_LETTERS = 200
"""Length up to which a value is shown whole."""


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

    These are the options whose value the message contains, and the options of the Trainer that it names, since it
    rarely says both. A plain word, such as "full", must be in quotation marks, unless the message has the name
    of the option too, or the option is the Trainer's own: Lightning writes of a "gpu" without them.
    """
    found = []
    for option, value in _walk(config):
        name = option.rpartition(".")[2]
        plainly = option == f"trainer.{name}" or _has_word(message, re.escape(name))
        is_quoted = isinstance(value, str) and len(value) > 2 and _quotes(message, value, plainly=plainly)
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


def _quotes(text: str, value: str, *, plainly: bool) -> bool:
    """Return whether a text has a value as a word; in quotation marks, if it is a plain word and not ``plainly``."""
    if value == "auto":  # no choice of the user
        return False
    mark = "" if plainly or re.search("[^A-Za-z]|[a-z][A-Z]", value) else "['\"`]"
    return _has_word(text, f"{mark}{re.escape(value)}{mark}")


def _has_word(text: str, pattern: str) -> bool:
    return re.search(rf"(?<![\w.-]){pattern}(?![\w-]|\.\w)", text) is not None


def is_about_type(reason: str) -> bool:
    """Return whether a line of a jsonargparse error says that a value is not of some type."""
    return reason.startswith(_NO_SUBCLASS) or _REASON.fullmatch(reason) is not None


def describe_type_error(option: str, value: str, reasons: Sequence[str], types: str = "") -> str:
    """Return one line about a value of a wrong type, which says what the value must be.

    Args:
        option: Name of the option.
        value: The value, as jsonargparse writes it.
        reasons: Lines of the error: for each type that the option takes, why the value is not of this type.
        types: Line of the error that lists the types that the option takes, if there are several.
    """
    words: list[str] = []
    for reason in reasons:
        found = _REASON.fullmatch(reason)
        name = reason if found is None else found[1]
        value = (found and found[2]) or (name.removeprefix(_NO_IMPORT) if name.startswith(_NO_IMPORT) else value)
        words += _describe_type(name, types)
    words = list(dict.fromkeys(words)) or ["a class path"]
    if any("class path" in word for word in words):
        words = [word for word in words if word != "text"]  # a class path is text, too
    value = value if len(value) <= _MOST_LETTERS else f"{value[:_MOST_LETTERS]}..."
    return f"{option}={value} must be {', '.join(words[:-1])}{' or ' if words[1:] else ''}{words[-1]}"


def _describe_type(name: str, types: str) -> list[str]:
    """Return words for a type that an option takes, or several words for the values of this type."""
    found = re.fullmatch(r"<class '(?:.*\.)?(\w+)'>", name)
    kind = found[1] if found else name
    if kind == "NoneType" or name.startswith("path but"):  # a path of a YAML file is always possible
        return []
    if name.startswith("typing.Literal["):
        return [word.strip() for word in name.removeprefix("typing.Literal[").removesuffix("]").split(",")]
    if name.startswith((_NO_IMPORT, _NO_SUBCLASS)):
        return _describe_classes(types, is_mapping=name.startswith(_NO_SUBCLASS))
    return _NAMES.get(kind, [f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind.lower() if found else kind}"])


def _describe_classes(types: str, *, is_mapping: bool) -> list[str]:
    """Return words for an instance of one of the classes in ``types``, which YAML describes.

    Args:
        types: Line of a jsonargparse error with the types that an option takes.
        is_mapping: Whether the value is a mapping, whose keys are then wrong.
    """
    words: list[str] = []
    for kind in _find_classes(types):
        name = kind.__name__
        if is_dataclass(kind):
            words.append(f"a mapping of options of {name}: {', '.join(field.name for field in fields(kind))}")
        elif not is_mapping:
            subclasses = {each.__name__: each for each in _walk_subclasses(kind)}
            if len(subclasses) > _MOST_CLASSES:
                subclasses = {_get_path(each): each for each in subclasses.values() if _is_of_package(each)}
            such_as = f" (such as {', '.join(sorted(subclasses))})" if 0 < len(subclasses) <= _MOST_CLASSES else ""
            words.append(f"the class path of {'an' if name[0] in 'AEIOU' else 'a'} {name}{such_as}")
    if is_mapping and not words:
        return ["a mapping of class_path and init_args, with the options under init_args"]
    return words or ["a class path"]


def list_subclasses(message: str) -> set[str]:
    """Return the names of the known subclasses of all classes that a jsonargparse error lists as types."""
    return {each.__name__ for kind in _find_classes(message) for each in _walk_subclasses(kind)}


def _find_classes(text: str) -> list[type]:
    """Return the imported classes whose paths are in ``text``, without those of the standard library.

    The standard library's are no classes to choose from, but kinds of values, such as ``Iterable``.
    """
    results = re.sub(r"Callable\[\[.*?\], ", "", text)  # what a callable takes is not for a user to choose
    paths = [path.rpartition(".") for path in re.findall(r"\b[a-z]\w*(?:\.\w+)*\.[A-Z]\w*", results)]
    others = [path for path in paths if path[0].partition(".")[0] not in sys.stdlib_module_names]
    found = [getattr(sys.modules.get(module), name, None) for module, _, name in others]
    return [kind for kind in dict.fromkeys(found) if isinstance(kind, type)]


def _is_of_package(kind: type) -> bool:
    return kind.__module__.startswith("lightning_fsdp2.")


def _get_path(kind: type) -> str:
    """Return the shortest path by which a config can name a class."""
    package = kind.__module__.partition(".")[0]
    is_exported = getattr(sys.modules[package], kind.__name__, None) is kind
    return f"{package if is_exported else kind.__module__}.{kind.__name__}"


def _walk_subclasses(kind: type) -> Iterator[type]:
    """Yield the subclasses in Lightning, in torch and in this package that a config can name."""
    subclasses: list[type] = kind.__subclasses__()
    for subclass in subclasses:
        # Lightning's DummyLogger stands in for a logger where none may write, and its demos are for tests
        is_private = subclass.__name__.startswith(("_", "Dummy")) or inspect.isabstract(subclass)
        is_private = is_private or subclass.__module__.startswith("lightning.pytorch.demos")
        if not is_private and subclass.__module__.startswith(("lightning", "torch")):
            yield subclass
        yield from _walk_subclasses(subclass)
