"""benchmarks/layout_table.py says what does not hold."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.layout_table import Table

REFUSED = "WeightSyncError: memory of expandable segments has no IPC handle"
DIED = "WeightSyncError: weight update failed in phase 'done' at trainer rank 1 (pid 7, dead): did not come"
WORKER = {"local": 0.0, "link": 1e9, "engines": 0.0, "copy": 2.7e-3, "predicted": 2.5e-3, "beside": 0.0}
IDLE = {"local": 1e9, "link": 0.0, "engines": 0.0, "copy": 0.5e-3, "predicted": 0.5e-3, "beside": 0.5e-3}


def row(**over: Any) -> dict[str, Any]:
    made = {"model": "0.6B", "trainer": "TP2", "engine": "one TP2", "view": "own GPU", "leaders": [1], "starts": True}
    made |= {"worker": WORKER, "workers": [WORKER, IDLE], "bytes": 2e9, "link": 1e9, "crossed": 1.017e9}
    return made | {"update": 0.06, "updates": [0.06, 0.07], "full": 0.08} | over


def kill(**over: Any) -> dict[str, Any]:
    made = {"model": "0.6B", "engine": "one TP2", "transport": "planned", "victim": "trainer rank 1", "seconds": 1.0}
    return made | {"said": [DIED, "killed"]} | over


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    made = Table(argparse.Namespace(rounds=3, device="cuda", out=tmp_path / "table.md"))
    made.rows = [row(), row(view="own GPU, expandable segments", error=REFUSED)]
    made.kills, made.finished = [kill()], True
    return made


def test_all_is_well(table: Table) -> None:
    assert table.broken() == []
    assert table.text().endswith("All limits hold.\n")


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"leaders": [2]}, "leaders [2]"),
        ({"starts": False}, "leaders [1]"),
        ({"error": "left other bytes"}, "left other bytes"),
        ({"workers": [WORKER, IDLE | {"copy": 0.7e-3}]}, "a copy takes too long"),
        ({"update": 0.084}, "the update takes too long"),
        ({"workers": [WORKER | {"copy": 2.9e-3}, IDLE]}, "the link is too slow"),
        ({"workers": [WORKER | {"copy": 3.2e-3}, WORKER]}, "the link is too slow"),
        ({"crossed": None}, "was not counted"),
        ({"crossed": 0.9e9}, "bytes crossed the link"),
        ({"crossed": 1.1e9}, "bytes crossed the link"),
        ({"link": 0.0, "workers": [IDLE], "worker": IDLE}, "bytes crossed the link"),
        ({"view": "expandable", "error": "CUDA out of memory"}, "not refused in words"),
    ],
)
def test_a_case_that_does_not_hold(table: Table, over: dict[str, Any], said: str) -> None:
    table.rows.append(row(**over))
    (problem,) = table.broken()
    assert said in problem
    assert "All limits hold" not in table.text()


@pytest.mark.parametrize(
    "over",
    [
        {"seconds": 61.0},
        {"said": ["no error", "killed"]},
        {"said": ["not killed, no update came", DIED, "killed"]},
        {"said": [DIED.replace("'done'", "'connect'"), "killed"]},
        {"said": [DIED.replace("rank 1", "rank 0"), "killed"]},
        {"victim": "worker", "said": [DIED, DIED]},
        {"said": [DIED, DIED.replace("7", "8")]},
    ],
)
def test_a_kill_that_does_not_end_as_it_must(table: Table, over: dict[str, Any]) -> None:
    table.kills.append(kill(**over))
    assert len(table.broken()) == 1


def test_every_worker_that_only_pulls_is_held_against_the_link(table: Table) -> None:
    """Also where another pulls at the same time, or copies much of its own; not if it does so itself."""
    at = {rate: WORKER | {"copy": 1e9 / rate} for rate in (349e9, 351e9)}
    too_slow = ["0.6B, TP2, one TP2, own GPU: the link is too slow"]
    both = at[349e9] | {"beside": 0.1e-3}
    for workers, said in (
        ([at[351e9], at[351e9]], []),
        ([at[351e9], at[349e9]], too_slow),
        ([both, at[349e9]], too_slow),
        ([both, at[351e9]], []),
    ):
        table.rows = [row(workers=workers)]
        assert table.broken() == said


def test_much_that_is_read_over_the_link_is_read_by_copy_engines(table: Table) -> None:
    much = WORKER | {"link": 3e9, "copy": 8e-3, "predicted": 7.5e-3, "engines": 1.3e9}
    table.rows = [row(workers=[much, IDLE])]
    assert table.broken() == []
    table.rows = [row(workers=[IDLE, much | {"engines": 1.1e9}])]
    assert table.broken() == ["0.6B, TP2, one TP2, own GPU: copy engines read too little"]


def test_a_program_that_has_not_ended(table: Table) -> None:
    table.finished = False
    assert table.broken() == ["the program has not ended"]
