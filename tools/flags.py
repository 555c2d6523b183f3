"""Write docs/flags.md, which shows what each flag of FSDP2 does, from the table that the tests verify.

Usage: python tools/flags.py
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from helpers.flags import FLAGS
from helpers.pipeline_flags import PIPELINE_FLAGS
from helpers.reach import ROOT

PAGE = ROOT / "docs" / "flags.md"

HEADER = """# What the flags of FSDP2 do

Every row was measured. If nothing else is said, the figures are those of one training step of a Llama of three layers
on two CPU ranks (2 sequences of 12 tokens each). `tests/test_flags.py` asserts all of them except those of asynchronous
tensor parallelism, which are in `tests/parallel/tensor/test_fusion.py`. `python tools/flags.py` writes this page from
the same data.
"""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    PAGE.write_text(make_page())
    print(f"wrote {PAGE.relative_to(ROOT)}")


def make_page() -> str:
    """Return the page, in Markdown."""
    lines = [HEADER]
    for flag in (*FLAGS, *PIPELINE_FLAGS):
        names = list(dict.fromkeys(name for setting in flag.settings for name in setting.figures))
        lines += [
            f"## {flag.name}",
            "",
            flag.effect,
            "",
            f"| value | {' | '.join(names)} |",
            "|---" * (1 + len(names)) + "|",
        ]
        for setting in flag.settings:
            figures = [str(setting.figures.get(name, "")) for name in names]
            lines.append(f"| {setting.value} | {' | '.join(figures)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
