"""The SQLite engine against the model of a queue."""

from __future__ import annotations

import pytest

from tests.properties.engine_model import check_engine


@pytest.mark.timeout(600)  # thousands of commits, each flushed to the disk
def test_the_engine_agrees_with_the_model(request: pytest.FixtureRequest):
    check_engine("sqlite", request, examples=100)
