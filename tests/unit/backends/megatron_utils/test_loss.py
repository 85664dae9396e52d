"""Weights of tokens, and the policy loss against a loop in float64."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.backends.megatron_utils.trainer_helpers import make_config
from vime.backends.megatron_utils.loss import ResponseTokens, learning_loss, metric_names, token_weights

MASKS = [[1, 1, 0, 1], [1, 1], [0, 0, 0], [1] * 5]
LENGTHS = [len(mask) for mask in MASKS]


def test_weights_of_tokens() -> None:
    per_answer = token_weights(MASKS, per_token=False)
    assert per_answer == [[1 / 12, 1 / 12, 0, 1 / 12], [1 / 8, 1 / 8], [0, 0, 0], [1 / 20] * 5]
    assert token_weights(MASKS, per_token=True) == [[m / 10 for m in mask] for mask in MASKS]
    assert token_weights([[0, 0]], per_token=True) == [[0, 0]]


def data(seed: int) -> tuple[ResponseTokens, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(total, generator=generator)

    log_probs = -1 + noise(0.3)
    tokens = ResponseTokens(
        loss_mask=torch.tensor([float(m) for mask in MASKS for m in mask]),
        weights=torch.tensor([w for weights in token_weights(MASKS, False) for w in weights]),
        advantages=noise(1.0),
        old_log_probs=log_probs + noise(0.3),
        ref_log_probs=log_probs + noise(0.3),
        rollout_log_probs=log_probs + noise(0.3),
    )
    return tokens, log_probs, 2 + noise(0.1)


@pytest.mark.parametrize("estimator", ["grpo", "gspo"])
def test_policy_loss_is_the_weighted_sum_over_tokens(estimator: str) -> None:
    config = make_config(
        "-",
        1,
        {
            "algorithm.advantage_estimator": estimator,
            "algorithm.eps_clip_high": 0.28,
            "algorithm.use_kl_loss": True,
            "algorithm.kl_loss_coef": 0.3,
            "algorithm.kl_loss_type": "k2",
            "algorithm.entropy_coef": 0.01,
            "algorithm.use_tis": True,
            "algorithm.tis_clip": 1.1,
        },
    )
    tokens, log_probs, entropy = data(1)
    loss, sums = learning_loss(config, tokens, torch.arange(sum(LENGTHS)), LENGTHS, log_probs, entropy, None)

    fields = (
        tokens.weights,
        tokens.advantages,
        tokens.old_log_probs,
        tokens.ref_log_probs,
        tokens.rollout_log_probs,
        log_probs,
        entropy,
        tokens.loss_mask,
    )
    columns = [field.double().tolist() for field in fields if field is not None]
    rows = list(zip(*columns, strict=True))
    ratios, start = [], 0
    for length in LENGTHS:
        part = rows[start : start + length]
        count = max(1, sum(row[7] for row in part))
        mean = sum((row[5] - row[2]) * row[7] for row in part) / count
        ratios += [math.exp(mean if estimator == "gspo" else row[5] - row[2]) for row in part]
        start += length
    expected = clipped = 0.0
    for ratio, (weight, advantage, old, ref, rollout, new, h, _) in zip(ratios, rows, strict=True):
        plain, bounded = -ratio * advantage, -min(max(ratio, 0.8), 1.28) * advantage
        importance = min(math.exp(old - rollout), 1.1)
        expected += weight * (max(plain, bounded) * importance + 0.3 * (new - ref) ** 2 / 2 - 0.01 * h)
        clipped += weight * (bounded > plain)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert sums["clip_fraction"].item() == pytest.approx(clipped, abs=1e-6)
    assert sorted(sums) == sorted(metric_names(config, tokens))


def test_parts_add_up_whatever_the_cut() -> None:
    config = make_config("-", 1, {"algorithm.advantage_estimator": "gspo"})
    tokens, log_probs, entropy = data(2)
    whole, _ = learning_loss(config, tokens, torch.arange(sum(LENGTHS)), LENGTHS, log_probs, entropy, None)
    starts = [0, 4, 6, 9]
    parts = []
    for answers in ([3, 0], [2], [1], []):
        slots = [torch.arange(starts[a], starts[a] + LENGTHS[a]) for a in answers]
        chosen = torch.cat([*slots, torch.zeros(0, dtype=torch.int64)])
        lengths = [LENGTHS[a] for a in answers]
        parts.append(learning_loss(config, tokens, chosen, lengths, log_probs[chosen], entropy[chosen], None)[0])
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), abs=1e-6)


def test_without_old_log_probs_the_ratio_is_one_and_gradients_flow() -> None:
    config = make_config("-", 1, {})
    tokens, log_probs, entropy = data(3)
    tokens.old_log_probs = None
    log_probs.requires_grad_()
    loss, sums = learning_loss(config, tokens, torch.arange(sum(LENGTHS)), LENGTHS, log_probs, entropy, None)
    loss.backward()
    assert tokens.advantages is not None
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, -tokens.weights * tokens.advantages)
    assert sums["clip_fraction"] == 0
