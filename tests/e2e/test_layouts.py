"""Three steps of the whole system in several layouts: every one computes what a single rank computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import SMALL, Finished, complete, make_inputs
from tests.listening import outward_name

pytestmark = pytest.mark.timeout(600)  # whole runs, two of them where a fixture makes the first

# The engines' answers are the same (same seeds; fp32 log-probs differ by 1e-7), so the first step is too, up to the
# order in which fp32 sums are taken.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Finished]:
    folder = tmp_path_factory.mktemp("dense")
    inputs = make_inputs(folder)
    return inputs, complete({**SMALL, **inputs}, folder / "single")


def _same_first_step(run: Finished, single: Finished) -> None:
    assert len(run.rows) == len(single.rows) == 3
    for name in (
        "train/loss",
        "train/grad_norm",
        "train/entropy",
        "rollout/reward_mean",
        "rollout/response_length_mean",
    ):
        assert run.rows[0][name] == pytest.approx(single.rows[0][name], rel=TOLERANCE, abs=TOLERANCE), name
    for row in run.rows:
        assert row["train/logprob_abs_diff"] <= 1e-5, row
    assert run.rows[1]["train/grad_norm"] > 0


DENSE: dict[str, dict[str, Any]] = {
    "TP2, one TP2 engine": {"tensor-model-parallel-size": 2, "rollout-num-gpus-per-engine": 2},
    "DP2, two engines": {"use-distributed-optimizer": True, "balance-data": True},
    "PP2, one engine": {"pipeline-model-parallel-size": 2, "rollout-num-gpus": 1},
}


@pytest.mark.parametrize("layout", DENSE)
def test_two_ranks(layout: str, dense: tuple[dict[str, str], Finished], tmp_path: Path) -> None:
    inputs, single = dense
    options = {**SMALL, **inputs, "actor-num-gpus-per-node": 2, **DENSE[layout]}
    run = complete(options, tmp_path / "run", before=outward_name())
    _same_first_step(run, single)


def test_four_ranks_of_a_mixture_of_experts(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path, "qwen3_moe")
    single = complete({**SMALL, **inputs}, tmp_path / "single")
    layout = {"tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2, "sequence-parallel": True}
    sizes = {"actor-num-gpus-per-node": 4, "rollout-num-gpus": 1}
    run = complete({**SMALL, **inputs, **layout, **sizes}, tmp_path / "run")
    _same_first_step(run, single)
