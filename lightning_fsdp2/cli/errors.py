"""Reports of errors on the command line: one line for an error that the user can fix, a traceback for a bug."""

import os
import re
import sys
from typing import NoReturn

_HEADINGS = (
    "Does not validate against",
    "Subtypes: ",
    "Errors:",
    "Problem with given class_path",
    "Given value type: ",
    "Not a valid subclass of",
    "Subclass types expect one of:",
    "a class path (str)",
    "a dict with",
)
_NO_PATH = "Expected a dot import path string: "
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


def exit_with_error(message: str) -> NoReturn:
    """Write one line about a mistake, and end the process with code 2.

    All ranks have the same error, so one rank per node writes it.
    """
    if is_first_of_node():
        sys.stderr.write(f"error: {message}\n")
    sys.exit(2)


def summarize(message: str) -> str:
    """Shorten an error message of jsonargparse to the innermost option and the problem with it.

    jsonargparse tries every member of a union type and indents the error of each member. So the most indented lines are
    about the member that the given value came closest to.
    """
    if "Does not validate against" not in message:
        return re.sub(r'^Parser key "([^"]+)":', r"\1:", " ".join(message.split()))
    keys: dict[int, str] = {}
    reasons: list[str] = []
    deepest, option, value = -1, "", ""
    for line in message.splitlines():
        text = line.lstrip(" ").removeprefix("- ")
        depth = len(line) - len(text)
        if key := re.search(r'Parser key "([^"]+)":$', text):
            keys = {outer: name for outer, name in keys.items() if outer < depth} | {depth: key[1]}
        elif text.startswith("Given value: "):
            value = value or text.removeprefix("Given value: ")
        elif not text.startswith(_HEADINGS) and depth >= deepest:
            if depth > deepest:
                option = ".".join(name for outer, name in keys.items() if outer < depth)
                deepest, reasons, value = depth, [], ""
            reasons.append(text)
    reasons = [reason for reason in reasons if reason != "Expected a <class 'NoneType'>"]
    numbers = {"Expected a <class 'float'>", "Expected a <class 'int'>"}
    if paths := [reason.removeprefix(_NO_PATH) for reason in reasons if reason.startswith(_NO_PATH)]:
        kind = "number" if numbers.intersection(reasons) else "class path"
        reasons = [f"{path!r} is not a {kind}" for path in paths]
    # if a value has the right type but the wrong content, it does not help to list the other expected types
    reasons = [reason for reason in reasons if not reason.startswith("Expected ")] or reasons
    summary = ", or: ".join(dict.fromkeys(reasons))
    if all(reason.startswith("Expected ") for reason in reasons) and "Got value: " not in summary:
        summary += f". Got value: {value}"
    summary = _CALLABLE.sub("", summary)
    return f"{option}: {summary}" if option else summary
