"""A rollout in numbers, and as the trainer takes it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from vime.errors import VimeError
from vime.types import Sample, Status, TrainBatch


def reward_of(sample: Sample) -> float:
    if sample.reward is None:
        raise VimeError(f"answer {sample.index} has no reward")
    return sample.reward


def metrics(samples: Sequence[Sample], prefix: str = "rollout") -> dict[str, float]:
    """``<prefix>/{reward_mean,reward_std,response_length_mean,truncated_fraction,zero_std_groups_fraction,log_prob_mean}``.

    The standard deviation is over all answers (population); a group has zero std if its rewards are all equal;
    log_prob_mean is over all learned response tokens, the engine's, in nats.
    """
    rewards = [reward_of(sample) for sample in samples]
    groups: dict[int, set[float]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        groups.setdefault(sample.group_index, set()).add(reward)
    learned = [
        log_prob
        for sample in samples
        for log_prob, mask in zip(sample.log_probs, sample.loss_mask, strict=True)
        if mask
    ]
    return {
        f"{prefix}/reward_mean": statistics.fmean(rewards),
        f"{prefix}/reward_std": statistics.pstdev(rewards),
        f"{prefix}/response_length_mean": statistics.fmean(len(sample.response_tokens) for sample in samples),
        f"{prefix}/truncated_fraction": statistics.fmean(sample.status is Status.TRUNCATED for sample in samples),
        f"{prefix}/zero_std_groups_fraction": statistics.fmean(len(values) == 1 for values in groups.values()),
        f"{prefix}/log_prob_mean": math.fsum(learned) / max(1, len(learned)),
    }


def to_train_batch(samples: Sequence[Sample]) -> TrainBatch:
    """The same answers in the same order, as plain lists.

    Raises:
        VimeError: an answer that is not whole or has no reward.
    """
    for sample in samples:
        if sample.status is Status.ABORTED:
            raise VimeError(f"answer {sample.index} is only a part; it cannot be learned from")
    return TrainBatch(
        tokens=[sample.prompt_tokens + sample.response_tokens for sample in samples],
        response_lengths=[len(sample.response_tokens) for sample in samples],
        loss_masks=[sample.loss_mask for sample in samples],
        rewards=[reward_of(sample) for sample in samples],
        group_ids=[sample.group_index for sample in samples],
        rollout_log_probs=[sample.log_probs for sample in samples],
    )
