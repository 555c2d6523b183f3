"""Check for repeated keys in YAML. PyYAML would silently keep only the last value of such a key."""

from collections.abc import Callable, Iterator
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader


class RepeatedKeyError(yaml.constructor.ConstructorError):
    """Error for a key that occurs twice in a mapping, with the line of the second occurrence."""

    def __str__(self) -> str:
        return f"line {self.problem_mark.line + 1}: {self.problem}."


def refuse_repeated_keys() -> None:
    """Make jsonargparse refuse repeated keys in all YAML that it reads, including files that other files refer to.

    Further calls have no effect.
    """
    if not isinstance(load := get_loader("yaml"), _Loader):
        set_loader("yaml", _Loader(load), exceptions=(yaml.YAMLError,))


class _Loader:
    def __init__(self, load: Callable[[str], Any]) -> None:
        self.load = load

    def __call__(self, stream: str) -> Any:
        check_keys(stream)
        return self.load(stream)


def check_keys(content: str) -> None:
    """Raise an error if a mapping in the YAML text ``content`` has a key twice.

    Anchors may be used any number of times, and keys merged by ``<<`` may be overridden.

    Raises:
        RepeatedKeyError: When a key is repeated. The error names the lines of the first and the second occurrence.
        yaml.YAMLError: When ``content`` is not YAML.
    """
    for node in _walk(yaml.compose(content, Loader=yaml.SafeLoader), set()):
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            name = (key.tag, key.value)
            if name in lines:
                problem = f"the key {key.value!r} is given twice, first in line {lines[name]}; leave one of them out"
                raise RepeatedKeyError(problem=problem, problem_mark=key.start_mark)
            lines[name] = key.start_mark.line + 1


def _walk(node: yaml.Node | None, seen: set[int]) -> Iterator[yaml.MappingNode]:
    if node is None or id(node) in seen:  # an anchor may contain itself
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        yield node
        for pair in node.value:
            for part in pair:
                yield from _walk(part, seen)
    elif isinstance(node, yaml.SequenceNode):
        for part in node.value:
            yield from _walk(part, seen)
