"""Who dies in the middle of a weight update of a whole run: it ends with one error that names him, or goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.runs import SMALL, Finished, Running, Traces, make_inputs, running
from tests.e2e.stopping import servers

pytestmark = pytest.mark.timeout(600)  # whole runs

# Engines that share nothing do not sleep, so the update is the first thing that is asked of them after their answers.
OPTIONS: dict[str, Any] = {
    **SMALL,
    "colocate": None,
    "custom-rm-path": "tests.e2e.stopping.reward",
    "num-rollout": 2,
    "rollout-num-gpus": 1,
}


@contextmanager
def in_the_middle(tmp_path: Path, **options: Any) -> Iterator[Running]:
    """A run whose trainer waits for its engine in the update after the first rollout."""
    with running({**OPTIONS, **make_inputs(tmp_path), **options}, tmp_path / "run") as run:

        def is_waiting() -> bool:
            stopped = [server for server in servers(run.children()) if server.status() == psutil.STATUS_STOPPED]
            ports = {c.laddr.port for server in stopped for c in server.net_connections("tcp") if c.status == "LISTEN"}
            asked = [
                c.raddr.port
                for rank in run.children("ray::TrainerRank")
                for c in rank.net_connections("tcp")
                if c.raddr
            ]
            return bool(ports.intersection(asked))

        run.until(is_waiting, "the update of a stopped engine")
        yield run


def error_of(done: Finished) -> str:
    assert done.code == 1, done.output
    errors = [line for line in done.output.splitlines() if line.startswith("vime: ")]
    assert len(errors) == 1, done.output
    assert "Traceback" not in done.output
    return errors[0]


def test_the_driver_dies(tmp_path: Path) -> None:
    with in_the_middle(tmp_path) as run:
        traces = Traces(run)
        stopped = servers(run.children())
        run.process.kill()
        run.process.wait()
        for server in stopped:
            server.resume()
        traces.expect_gone()


def test_the_engines_server_dies_and_is_replaced(tmp_path: Path) -> None:
    with in_the_middle(tmp_path) as run:
        (server,) = servers(run.children())
        server.kill()
        done = run.finish()
    assert done.code == 0, done.output
    assert "engine 0 died" in done.output
    assert [row["step"] for row in done.rows] == [0, 1]


@pytest.mark.slow
def test_a_trainer_rank_dies(tmp_path: Path) -> None:
    with in_the_middle(tmp_path) as run:
        traces = Traces(run)
        (rank,) = run.children("ray::TrainerRank")
        rank.kill()
        done = run.finish(seconds=60)
        traces.expect_gone(10)
    assert f"(pid {rank.pid}) has died during: updating the engines' weights" in error_of(done)


@pytest.mark.slow
def test_the_engine_stays_as_it_is(tmp_path: Path) -> None:
    with in_the_middle(tmp_path, **{"weight-update-timeout": 20}) as run:
        traces = Traces(run)
        done = run.finish(seconds=150)
        traces.expect_gone(10)
    assert "weight update failed in phase 'pause' at engine 0 (http://" in error_of(done)
    assert "no answer within" in done.output
