"""The checkpoint with which some mistakes begin."""

import pytest
from helpers.mistakes import train_checkpoint


@pytest.fixture(scope="session")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> None:
    train_checkpoint(tmp_path_factory.mktemp("trained"))
