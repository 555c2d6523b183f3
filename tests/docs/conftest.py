"""The documentation as it is published."""

from pathlib import Path

import pytest
from helpers.documents import build_site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory.mktemp("site"), repository="")
