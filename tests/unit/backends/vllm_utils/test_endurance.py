"""Weight updates by the hundred leave both sides as they were: memory, descriptors, mapped arenas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engine import TinyEngine

MOST_GROWTH = 2 << 20  # bytes of one process from one half of the updates to the other


SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("transport", "syncs"),
    [
        ("planned", 100),
        pytest.param("planned", 1000, marks=SLOW),
        pytest.param("bucketed", 1000, marks=SLOW),
    ],
)
def test_memory_and_descriptors_stay_as_they_are(engine: TinyEngine, transport: str, syncs: int) -> None:
    from tests.unit.backends.vllm_utils.endurance import endure, halves, table
    from vime.types import EngineAddress

    address = EngineAddress(0, engine.url, 1, None)
    samples, _ = endure(address, engine.process.pids(), engine.checkpoint, syncs, transport)
    print(table(samples))
    assert len(samples) >= 2 + 3  # ranks; supervisor, server, worker
    for process, found in samples.items():
        for what in ("descriptors", "arenas"):
            first, second = halves(found, what, min)  # a look may meet a connection that is just being closed
            assert second <= first, f"{process}: {what}"
        for what in ("uss", "pss"):
            first, second = halves(found, what)
            assert second - first < MOST_GROWTH, f"{process}: {what}"
    assert engine.client.weight_version() == syncs
