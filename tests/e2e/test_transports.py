"""The same run by other ways for the weights, and with an engine that shares nothing with the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import SMALL, Finished, complete, make_inputs

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Finished]:
    folder = tmp_path_factory.mktemp("planned")
    inputs = make_inputs(folder)
    return inputs, complete({**SMALL, **inputs}, folder / "run")


# Another engine changes which engine answers what, and with it the order of sums in a batch: nothing else.
WAYS: dict[str, dict[str, Any]] = {
    "disk": {"update-weight-transport": "disk"},
    "distributed, to a colocated engine and to one beside it": {
        "update-weight-transport": "distributed",
        "rollout-num-gpus": 2,
        "check-weight-update": "full",
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_the_run_is_the_same(way: str, planned: tuple[dict[str, str], Finished], tmp_path: Path) -> None:
    inputs, expected = planned
    run = complete({**SMALL, **inputs, **WAYS[way]}, tmp_path / "run")
    assert len(run.rows) == len(expected.rows) == 3
    for row, wanted in zip(run.rows, expected.rows, strict=True):
        for name in ("train/loss", "train/grad_norm", "rollout/reward_mean"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), (name, row["step"])
        assert row["train/logprob_abs_diff"] <= 1e-5, row
    weights = tmp_path / "run" / "weights"
    assert not weights.exists() or not list(weights.iterdir())
