"""A rollout in numbers."""

from __future__ import annotations

import dataclasses
import statistics

import pytest

from vime.errors import VimeError
from vime.rollout.batch import metrics, to_train_batch
from vime.types import Sample, Status


def samples() -> list[Sample]:
    made = []
    for index, (reward, length, status) in enumerate(
        [(1.0, 2, Status.COMPLETED), (0.0, 3, Status.TRUNCATED), (1.0, 4, Status.COMPLETED), (1.0, 1, Status.COMPLETED)]
    ):
        made.append(
            Sample(
                index,
                index // 2,
                "p",
                [7, 8],
                response_tokens=list(range(length)),
                log_probs=[-0.5 * (index + 1)] * length,
                loss_mask=[1] * (length - 1) + [index % 2],
                status=status,
                reward=reward,
            )
        )
    return made


def test_metrics():
    assert metrics(samples()) == {
        "rollout/reward_mean": 0.75,
        "rollout/reward_std": statistics.pstdev([1, 0, 1, 1]),
        "rollout/response_length_mean": 2.5,
        "rollout/truncated_fraction": 0.25,
        "rollout/zero_std_groups_fraction": 0.5,
        "rollout/log_prob_mean": pytest.approx((-0.5 * 1 - 1.0 * 3 - 1.5 * 3 - 2.0 * 1) / 8),
    }


def test_train_batch():
    batch = to_train_batch(samples())
    assert batch.tokens == [[7, 8, 0, 1], [7, 8, 0, 1, 2], [7, 8, 0, 1, 2, 3], [7, 8, 0]]
    assert batch.response_lengths == [2, 3, 4, 1]
    assert batch.loss_masks == [[1, 0], [1, 1, 1], [1, 1, 1, 0], [1]]
    assert (batch.rewards, batch.group_ids) == ([1, 0, 1, 1], [0, 0, 1, 1])
    assert batch.rollout_log_probs == [[-0.5] * 2, [-1.0] * 3, [-1.5] * 4, [-2.0]]


@pytest.mark.parametrize(
    ("change", "message"), [({"status": Status.ABORTED}, "a part"), ({"reward": None}, "no reward")]
)
def test_what_is_not_whole_is_refused(change, message):
    broken = samples()
    broken[2] = dataclasses.replace(broken[2], **change)
    with pytest.raises(VimeError, match=f"answer 2 .*{message}"):
        to_train_batch(broken)
