"""The problems of the example with real weights (its model is 93 MB to download: no test does)."""

from __future__ import annotations

import random

import pytest

from examples.smollm2 import prepare


def asked(row: dict) -> str:
    return row["prompt"][-1]["content"].removeprefix("What is ").removesuffix("?")


def test_labels_are_right_and_unseen_problems_stand_nowhere_else() -> None:
    train, unseen = prepare.split(prepare.problems(30), 128, random.Random(1))
    rows = [prepare.row(problem) for problem in train + unseen]
    assert len({asked(row) for row in rows}) == len(rows)
    for row in rows:
        assert row["label"] == str(eval(asked(row)))
        assert [message["role"] for message in row["prompt"]] == ["user", "assistant"] * len(prepare.SHOWN) + ["user"]
    solved = rows[0]["prompt"][1:-1:2]
    for message in solved:
        left, boxed = message["content"].split(" = ")
        assert boxed == f"\\boxed{{{eval(left)}}}"
    sides = [[set(asked(prepare.row(problem)).split()) for problem in part] for part in (train, unseen)]
    shown = [set(message["content"].split(" = ")[0].split()) for message in solved]
    sums = [[side for side in part if "+" in side] for part in (*sides, shown)]  # a set: b + a is a + b
    assert len(sides[1]) >= 128
    assert not [side for side in sums[0] if side in sums[1] or side in sums[2]]
    assert not [side for side in sums[1] if side in sums[2]]


def test_too_few_problems_are_refused() -> None:
    with pytest.raises(ValueError, match=r"too few to keep 128 unseen: raise --max or lower --unseen"):
        prepare.split(prepare.problems(5), 128, random.Random(1))
