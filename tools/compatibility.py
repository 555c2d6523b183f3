"""Try every option of Lightning's Trainer under every strategy, and write docs/compatibility.md if all is as it says.

Usage: python tests/compatibility.py [--output docs/compatibility.md]
"""

import argparse
import os
import platform
import sys
import tempfile
import warnings
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from helpers import callback_options, trainer_options  # noqa: F401 - they fill the table
from helpers.compatibility import OPTIONS, Option, describe_options, try_options
from helpers.ranks import RankError
from helpers.strategies import STRATEGIES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the document, as Markdown")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failures = [
        failure for row in OPTIONS for strategy in STRATEGIES if (failure := get_optional_failure(row, strategy))
    ]
    if failures:
        print(*failures, sep="\n")
    elif arguments.output:
        arguments.output.write_text(describe_options(get_versions()))
        print(f"wrote {arguments.output}")
    return int(bool(failures))


def get_optional_failure(row: Option, strategy: str) -> str | None:
    """Try one option by itself, so that the others are tried too."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            try_options(strategy, [row], Path(folder))
        except RankError as error:
            return f"{strategy}: {error}"
    print(f"{row.group}, {row.name}, {strategy}: {row.describe(strategy)}", flush=True)
    return None


def get_versions() -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "megatron-fsdp"))
    return (
        f"{datetime.now(timezone.utc):%Y-%m-%d}, Python {platform.python_version()}, {versions}. Written by"
        " tests/compatibility.py (`make compatibility`)."
    )


if __name__ == "__main__":
    sys.exit(main())
