"""What is killed in the middle of a step: the run ends with one error that names it, or goes on; nothing is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, Finished, Traces, complete, make_inputs, running

pytestmark = pytest.mark.timeout(600)  # whole runs, two of them where a fixture makes the first

OPTIONS = {**SMALL, "num-rollout": 4}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Finished]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    inputs = make_inputs(folder)
    return inputs, complete({**OPTIONS, **inputs}, folder / "run")


def test_driver_is_killed_and_the_run_continued(uninterrupted: tuple[dict[str, str], Finished], tmp_path: Path) -> None:
    inputs, whole = uninterrupted
    checkpoints = tmp_path / "checkpoints"
    options = {**OPTIONS, **inputs, "save": checkpoints, "load": checkpoints, "save-interval": 2}
    with running(options, tmp_path / "run") as run:
        run.until((checkpoints / "iter_0000002").exists, "the first checkpoint")
        traces = Traces(run)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        traces.expect_gone()
    continued = complete(options, tmp_path / "run")
    assert continued.results() == whole.results()  # bit for bit


def test_trainer_rank_is_killed(uninterrupted: tuple[dict[str, str], Finished], tmp_path: Path) -> None:
    inputs, _ = uninterrupted
    options = {**OPTIONS, **inputs, "num-rollout": 1000, "actor-num-gpus-per-node": 2, "rollout-num-gpus": 1}
    with running(options, tmp_path / "run") as run:
        run.until_step(1)
        traces = Traces(run)
        victim = run.children("ray::TrainerRank")[0]
        os.kill(victim.pid, signal.SIGKILL)
        done = run.finish(seconds=60)
        traces.expect_gone(10)
    assert done.code == 1
    errors = [line for line in done.output.splitlines() if line.startswith("vime: ")]
    assert len(errors) == 1, done.output
    assert f"(pid {victim.pid}) has died during:" in errors[0]
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("victim", "signum"),
    [
        ("vllm_utils.launcher", signal.SIGKILL),
        ("vllm_utils.launcher", signal.SIGTERM),  # it closes its port, and lives on for a while
        ("ray::EngineHost", signal.SIGKILL),
    ],
)
def test_engine_is_killed_and_replaced(
    victim: str, signum: signal.Signals, uninterrupted: tuple[dict[str, str], Finished], tmp_path: Path
) -> None:
    inputs, whole = uninterrupted
    with running({**OPTIONS, **inputs}, tmp_path / "run") as run:
        run.until_step(0)
        os.kill(run.children(victim)[0].pid, signum)
        done = run.finish()
    assert done.code == 0, done.output
    assert "engine 0 died" in done.output
    assert done.results() == whole.results()  # the same answers from the new engine, so the same run


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_stop_everything(
    signum: signal.Signals, code: int, uninterrupted: tuple[dict[str, str], Finished], tmp_path: Path
) -> None:
    inputs, _ = uninterrupted
    with running({**OPTIONS, **inputs, "num-rollout": 1000}, tmp_path / "run") as run:
        run.until_step(0)
        traces = Traces(run)
        run.process.send_signal(signum)
        done = run.finish(seconds=60)
        traces.expect_gone(10)
    assert done.code == code
    assert "Traceback" not in done.output
