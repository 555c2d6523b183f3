import pytest


@pytest.fixture(autouse=True)
def _offline_and_quiet(monkeypatch):
    import datasets

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets.disable_progress_bars()


@pytest.fixture
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))
