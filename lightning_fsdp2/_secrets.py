"""Search for secrets in names, texts and command lines that will be shown."""

import re
from collections.abc import Sequence

HIDDEN = "hidden"
"""Text that is shown instead of a secret."""

_SECRET_WORDS = r"token|secret|password|passwd|pass|pwd|passphrase|credential|auth|authorization|cookie|apikey|dsn|sas"

_SECRET_NAME = re.compile(rf"(^|[_-])({_SECRET_WORDS}|key)s?$|(token|secret|password|passwd|apikey)s?$", re.IGNORECASE)
"""Names of options that hold secrets, such as ``api_key``, ``hf-token`` and ``db_pass``, with words split by ``_``."""

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
"""Where a word begins in a name such as ``secretKey``."""

# a password may have any character but a space or a quote, and ends at the last `@`
_SECRET_IN_URL = re.compile(
    r"""(?<=://)[^\s"'?#]*@|(?<=\?)[^\s"']*(?:sig|key|token|credential|secret|passw|pwd|auth)[^\s"']*""", re.IGNORECASE
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
    return _SECRET_NAME.search(_HUMP.sub("_", name)) is not None
