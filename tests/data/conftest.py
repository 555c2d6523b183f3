import datasets
import pytest


@pytest.fixture(autouse=True)
def _no_progress_bars():
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))
