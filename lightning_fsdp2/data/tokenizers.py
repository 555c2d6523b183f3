"""Loading of tokenizers, with errors that name the file at fault."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fsdp2._refusals import is_refusal
from lightning_fsdp2.compat.transformers import load_without_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
"""Files in JSON of which transformers builds a tokenizer. A tokenizer does not need all of them."""


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """Load a Hugging Face tokenizer from a directory or the Hub, without code that may be in the files.

    Raises:
        ValueError: When there is no tokenizer, or it cannot be read.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = load_without_code("AutoTokenizer", name)
    except Exception as error:  # the library that reads tokenizer.json raises no class of its own
        reason = str(error).partition("\n")[0]
        if is_refusal(error):  # for code that is in the files
            raise ValueError(f"tokenizer={name!r}: {reason}") from None
        if Path(name).is_dir():
            raise ValueError(f"tokenizer={name!r}: {_describe_directory(Path(name), reason)}") from error
        if not isinstance(error, OSError | ValueError):
            raise
        raise ValueError(
            f"tokenizer={name!r} is not a directory with a tokenizer, and cannot be loaded from the Hub: {reason} Check"
            " the name, the network and your login (`hf auth login`)."
        ) from error
    return tokenizer


def _describe_directory(folder: Path, reason: str) -> str:
    """Return which file of a directory is at fault, and what to do; failing that, the reason of transformers."""
    again = "copy or download the tokenizer again"
    for path in (path for name in _FILES if (path := folder / name).exists()):
        try:
            json.loads(path.read_text())
        except PermissionError as error:
            return f"{path.name} may not be read ({error.strerror}); let this user read it."
        except ValueError as error:
            return f"{path.name} is not JSON ({error}), so it is damaged or was copied only partly; {again}."
    if not (folder / "tokenizer.json").exists():
        return f"it has no tokenizer.json, and transformers cannot build the tokenizer without it ({reason}); {again}."
    return f"it cannot be loaded ({reason}); {again}."
