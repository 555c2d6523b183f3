"""Search for secrets in names, texts and command lines that will be shown."""

import re
from collections.abc import Sequence

HIDDEN = "hidden"
"""Text that is shown instead of a secret."""

_SECRET_WORDS = r"secrets?|passwords?|passwd|pass|pwd|passphrase|credentials?|auth|authorization|cookies?|dsn|sas"

_SECRET_KEYS = r"(api|access|account|auth|client|encryption|license|master|private|secret|service|signing|ssh|storage)"

_SECRET_NAME = re.compile(
    rf"(^|[_-])({_SECRET_WORDS}|token)$|(secret|password|passwd|token)$|(^|[_-]){_SECRET_KEYS}[_-]?keys?$",
    re.IGNORECASE,
)
"""Names of options that hold secrets, such as ``api_key``, ``hf-token`` and ``db_pass``, with words split by ``_``."""

_TOKEN_OF_TEXT = re.compile(
    r"(^|[_-])(bos|eos|pad|unk|mask|cls|sep|start|end|stop|special|prefix|middle|suffix|image|audio|video|vision|tool|"
    r"bo[ais]|eo[ais])_?token$",
    re.IGNORECASE,
)
"""Names of options that hold a tokenizer's token."""

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
"""Where a word begins in a name such as ``secretKey``."""

# A password may have any character but a space or a quote, and ends at the last `@`. Without one, what comes before the
# `@` is a user only up to the first `/`: a path may have an `@`, as those of the Hub have before a revision.
_SECRET_IN_URL = re.compile(
    r"""(?<=://)[^\s"'?#/:@]*:(?!\d+/)[^\s"'?#]*@|(?<=://)[^\s"'?#/@]*@|(?<=\?)[^\s"']*(?:sig|key|token|credential|secret|passw|pwd|auth)[^\s"']*""",
    re.IGNORECASE,
)


def hide_secrets(text: str) -> str:
    """Return ``text`` without the passwords and keys that URLs in it may contain."""
    return _SECRET_IN_URL.sub("", text)


def hide_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line without secrets, such as the value of ``--data.init_args.api_key``."""
    hidden, is_value = [], False
    for word in arguments:
        option, equals, _ = word.partition("=")
        names_secret = option.startswith("-") and is_secret(option.rpartition(".")[2].lstrip("-"))
        if is_value and not word.startswith("-"):
            hidden.append(HIDDEN)
        else:
            hidden.append(f"{option}={HIDDEN}" if names_secret and equals else hide_secrets(word))
        is_value = names_secret and not equals
    return hidden


def is_secret(name: str) -> bool:
    """Return whether an option called ``name`` probably contains a secret."""
    words = _HUMP.sub("_", name)
    return _SECRET_NAME.search(words) is not None and _TOKEN_OF_TEXT.search(words) is None
