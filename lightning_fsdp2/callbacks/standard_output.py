"""Standard output that a run does without, once nobody reads it, its disk is full, or it is closed."""

import io
import logging
import os
import sys
from contextlib import suppress
from typing import Any

logger = logging.getLogger(__name__)

_DESCRIPTOR = 1
"""File descriptor of a process's standard output."""


class StandardOutput:
    """File for rich's console. It writes to standard output, and to nowhere after an error.

    A character that the encoding of standard output lacks becomes a question mark. rich itself would raise an error,
    and would end the process when the reader of a pipe is gone.
    """

    def __init__(self) -> None:
        self._is_lost = False

    @property
    def encoding(self) -> str:
        """The encoding of standard output."""
        return getattr(_get_stream(), "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Return whether standard output is a terminal."""
        with suppress(OSError, ValueError, AttributeError):
            return bool(_get_stream().isatty())
        return False

    def write(self, text: str) -> int:
        """Write ``text`` and return its length."""
        self._do("write", text)
        return len(text)

    def flush(self) -> None:
        """Flush what has been written."""
        self._do("flush")

    def _do(self, action: str, *arguments: str) -> None:
        if self._is_lost:
            return
        function = getattr(_get_stream(), action)
        try:
            try:
                function(*arguments)
            except UnicodeEncodeError:  # one character that the encoding lacks is no reason to lose the others
                function(*(text.encode(self.encoding, "replace").decode(self.encoding) for text in arguments))
        except (OSError, ValueError) as error:  # a closed file raises a ValueError
            self._is_lost = True
            _give_up(error)


def _give_up(error: BaseException) -> None:
    """Warn that standard output cannot be written to, and send what is written there to nowhere.

    Otherwise, Python would try again to write when the process ends, and would end with an error. If ``sys.stdout``
    stands for another file, as in ``contextlib.redirect_stdout``, that file is left to its owner.
    """
    logger.warning("Nothing can be written to standard output (%s). The run goes on without it.", error)
    with suppress(OSError, ValueError, AttributeError):
        if _get_stream().fileno() == _DESCRIPTOR:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, _DESCRIPTOR)
            os.close(nowhere)


def _get_stream() -> Any:
    # while rich draws a progress bar in a terminal, it replaces `sys.stdout`, and keeps the original file here
    stream = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    return io.StringIO() if stream is None else stream  # a process without a terminal may have none
