"""One pool of trainer ranks and one fleet of engines for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.layouts.fleet import Fleet
from tests.e2e.layouts.pool import RankPool


@pytest.fixture(scope="package")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    pool = RankPool(8)
    fleet = Fleet(tmp_path_factory.mktemp("layouts"), pool)
    yield fleet
    fleet.close()
    pool.close()
