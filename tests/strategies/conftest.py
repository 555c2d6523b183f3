"""A test with the argument ``kind`` holds under every strategy."""

import pytest
from helpers.strategies import STRATEGIES, Kind


@pytest.fixture(params=STRATEGIES)
def kind(request: pytest.FixtureRequest) -> Kind:
    return STRATEGIES[request.param]
