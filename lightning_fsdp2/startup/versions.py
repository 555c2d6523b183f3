"""The newest version of transformers that the package was checked with, and a warning for later ones."""

import logging
from importlib.metadata import PackageNotFoundError, version

from packaging.version import InvalidVersion, Version

logger = logging.getLogger(__name__)

CHECKED = (5, 24)
"""Newest minor version of transformers with which `make test` and `make parity` have passed."""


def warn_of_newer_transformers() -> None:
    """Log one warning if the installed transformers is newer than :data:`CHECKED`; transformers is not imported.

    pip keeps to the upper end in pyproject.toml, but an environment may have been changed later.
    """
    try:
        installed = version("transformers")
        is_newer = Version(installed).release[:2] > CHECKED
    except (PackageNotFoundError, InvalidVersion):
        return
    if is_newer:
        logger.warning(
            "transformers %s is newer than %d.%d, the newest version that lightning_fsdp2 was checked with. Parts that"
            " depend on its internals, such as caches and masks, may be wrong; install 'transformers<%d.%d'.",
            installed,
            *CHECKED,
            CHECKED[0],
            CHECKED[1] + 1,
        )
