"""What a rollout must be like to be learned from."""

from __future__ import annotations

import math

from vime.errors import DataError
from vime.types import TrainBatch


def check_batch(batch: TrainBatch) -> None:
    """Raises DataError naming the first answer that cannot be learned from."""
    answers = len(batch.tokens)
    if not answers:
        raise DataError("a rollout without answers has nothing to learn from")
    lists = {
        "response_lengths": batch.response_lengths,
        "loss_masks": batch.loss_masks,
        "rewards": batch.rewards,
        "group_ids": batch.group_ids,
    }
    if batch.rollout_log_probs is not None:
        lists["rollout_log_probs"] = batch.rollout_log_probs
    for name, values in lists.items():
        if len(values) != answers:
            raise DataError(f"{answers} answers, but {len(values)} {name}")
    for index, reward in enumerate(batch.rewards):
        if not math.isfinite(reward):
            raise DataError(f"answer {index} has reward {reward}; a reward must be a finite number")
    for index, (tokens, response) in enumerate(zip(batch.tokens, batch.response_lengths, strict=True)):
        if not 0 <= response < len(tokens):
            raise DataError(
                f"answer {index} has {len(tokens)} tokens, {response} of them response; at least one prompt token is "
                "needed to predict the first"
            )
        if len(batch.loss_masks[index]) != response:
            raise DataError(f"answer {index}: {response} response tokens, {len(batch.loss_masks[index])} in its mask")
        if batch.rollout_log_probs is not None and len(batch.rollout_log_probs[index]) != response:
            count = len(batch.rollout_log_probs[index])
            raise DataError(f"answer {index}: {response} response tokens, {count} log-probs from the engine")
