"""Reports of errors on the command line: one line for an error that the user can fix, a traceback for a bug."""

import os
import re

from lightning_fsdp2._refusals import USER_ERRORS, is_refusal

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
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0) == 0


def has_refusal(error: BaseException) -> bool:
    """Return whether ``error``, or an original error that jsonargparse wrapped in it, is one that the user can fix.

    jsonargparse turns any error in an ``__init__`` into a ValueError. A plain ValueError also counts as an error that
    the user can fix, since a user's own class may raise one.
    """
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    return isinstance(causes[-1], USER_ERRORS) or any(map(is_refusal, causes))


def summarize(message: str) -> str:
    """Shorten an error message of jsonargparse to the innermost option and the problem with it.

    jsonargparse tries every member of a union type and indents the error of each member. So the most indented lines are
    about the member that the given value came closest to.
    """
    if "Does not validate against" not in message:
        return " ".join(message.split())
    keys: dict[int, str] = {}
    reasons: list[str] = []
    deepest, option, value = -1, "", ""
    for line in message.splitlines():
        text = line.lstrip(" ").removeprefix("- ")
        depth = len(line) - len(text)
        if key := re.fullmatch(r'Parser key "(.+)":', text):
            keys = {outer: name for outer, name in keys.items() if outer < depth} | {depth: key[1]}
        elif text.startswith("Given value: "):
            value = value or text.removeprefix("Given value: ")
        elif not text.startswith(_HEADINGS) and depth >= deepest:
            if depth > deepest:
                option = ".".join(name for outer, name in keys.items() if outer < depth)
                deepest, reasons, value = depth, [], ""
            reasons.append(text)
    reasons = [reason for reason in reasons if reason != "Expected a <class 'NoneType'>"]
    if paths := [reason.removeprefix(_NO_PATH) for reason in reasons if reason.startswith(_NO_PATH)]:
        reasons = [f"{path!r} is not a class path" for path in paths]
    # if a value has the right type but the wrong content, it does not help to list the other expected types
    reasons = [reason for reason in reasons if not reason.startswith("Expected ")] or reasons
    summary = ", or: ".join(dict.fromkeys(reasons))
    if all(reason.startswith("Expected ") for reason in reasons) and "Got value: " not in summary:
        summary += f". Got value: {value}"
    summary = _CALLABLE.sub("", summary)
    return f"{option}: {summary}" if option else summary
