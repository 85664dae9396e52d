"""The plan of micro-batches: everything is in it once, budgets hold, ranks agree on the number."""

from __future__ import annotations

import itertools
import random

import pytest

from vime.backends.megatron_utils.microbatch import balanced_partition, plan


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("max_tokens", [None, 60, 1000])
@pytest.mark.parametrize(("dp_size", "multiple"), [(1, 1), (3, 1), (4, 2)])
def test_every_answer_once_within_the_budget_and_as_many_rows_on_every_rank(
    balance: bool, max_tokens: int | None, dp_size: int, multiple: int
) -> None:
    generator = random.Random(dp_size)
    for count in (1, 2, 7, 40):
        lengths = [generator.choice([5, 17, 30, 59, 100]) for _ in range(count)]
        ranks = plan(lengths, dp_size, max_tokens=max_tokens, micro_batch_size=3, balance=balance, multiple=multiple)
        assert ranks == plan(
            lengths, dp_size, max_tokens=max_tokens, micro_batch_size=3, balance=balance, multiple=multiple
        )
        assert sorted(itertools.chain(*itertools.chain(*ranks))) == list(range(count))
        rows = {len(batches) for batches in ranks}
        assert len(rows) == 1
        assert rows.pop() % multiple == 0
        for batch in itertools.chain(*ranks):
            if max_tokens is None:
                assert len(batch) <= 3
            elif len(batch) > 1:  # a longer answer has a row for itself
                assert sum(lengths[answer] for answer in batch) <= max_tokens


def test_unbalanced_ranks_take_turns_and_rows_keep_the_order() -> None:
    assert plan([9] * 5, 2, micro_batch_size=2) == [[[0, 2], [4]], [[1], [3]]]


def test_first_fit_decreasing_fills_rows() -> None:
    rows = plan([50, 10, 40, 30, 20, 50], 1, max_tokens=100)[0]
    assert len(rows) == 2
    assert sorted(sum([50, 10, 40, 30, 20, 50][answer] for answer in row) for row in rows) == [100, 100]


def test_balanced_partition_is_near_the_best() -> None:
    weights = [8, 7, 6, 5, 4]  # the example of the paper: two parts of 15 exist, differencing finds 16 and 14
    assert sorted(sum(weights[i] for i in part) for part in balanced_partition(weights, 2)) == [14, 16]
    generator = random.Random(0)
    weights = [generator.randint(100, 8000) for _ in range(256)]
    sums = [sum(weights[i] for i in part) for part in balanced_partition(weights, 8)]
    assert max(sums) - min(sums) < 0.01 * sum(weights) / 8
    assert balanced_partition([], 3) == [[], [], []]
