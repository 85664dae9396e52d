"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engine import TinyEngine


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyEngine]:
    """One real vLLM engine for the whole session: tiny Qwen3, untied, fp32. Tests leave it awake and running.

    It ends with the session, and when pytest is killed (the launcher watches its parent).
    """
    from tests.engine import start_engine  # only the tests that want it pay for the imports

    running = start_engine(tmp_path_factory.mktemp("engine"))
    yield running
    running.client.close()
    running.process.terminate()
