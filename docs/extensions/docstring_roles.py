"""An extension of griffe: what docstrings write in reStructuredText, in Markdown.

``:class:`~package.Name``` becomes a link where the API pages have the name, and plain code elsewhere; an indented block
behind ``::`` is Python.
"""

import re
from textwrap import dedent, indent
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|attr|mod|data):`(?P<short>~)?(?P<target>[\w.]+)`")
_BLOCK = re.compile(r"^(?P<margin> *)(?P<lead>.*\S)::\n\n(?P<code>(?:(?P=margin) +\S.*\n?|\n)+)", re.MULTILINE)


class DocstringRoles(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = _BLOCK.sub(_to_fence, _ROLE.sub(_to_link, obj.docstring.value))


def _to_link(match: re.Match[str]) -> str:
    text = match["target"].rpartition(".")[2] if match["short"] else match["target"]
    return f'<autoref identifier="{match["target"]}" optional><code>{text}</code></autoref>'


def _to_fence(match: re.Match[str]) -> str:
    code = f"```python\n{dedent(match['code']).strip()}\n```\n"
    lead = f"{match['margin']}{match['lead']}:".replace("Example:", "For example:")
    return f"{lead}\n\n{indent(code, match['margin'])}\n"
