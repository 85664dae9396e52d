"""Every estimator against a plain float64 loop written from the paper's formula, not from the code."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch

from vime.algorithms import compute_advantages, whiten
from vime.config.algorithm import AlgorithmOptions


def batch(seed: int, groups: int = 5, size: int = 4):
    """A shuffled batch: the answers to one prompt are not neighbours."""
    rng = random.Random(seed)
    ids = [group for group in range(groups) for _ in range(size)]
    rng.shuffle(ids)
    rewards = [rng.choice([0.0, 0.25, 1.0, -1.0]) for _ in ids]
    lengths = [rng.randint(1, 9) for _ in ids]
    masks = [torch.tensor([1] + [int(rng.random() < 0.8) for _ in range(n - 1)]) for n in lengths]
    kl = [torch.tensor([rng.gauss(0, 0.3) for _ in range(n)]) for n in lengths]
    return ids, rewards, masks, kl


def totals_of(rewards, masks, kl, coef):
    return [
        r - coef * math.fsum(k * m for k, m in zip(ks.tolist(), ms.tolist(), strict=True))
        for r, ms, ks in zip(rewards, masks, kl, strict=True)
    ]


def assert_spread(advantages, values, masks):
    for advantage, value, mask in zip(advantages, values, masks, strict=True):
        assert advantage.dtype == torch.float32
        torch.testing.assert_close(advantage.double(), value * mask.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "gspo"])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("coef", [0.0, 0.3])
def test_grpo_is_the_z_score_within_the_group(estimator, normalise, coef):
    ids, rewards, masks, kl = batch(1)
    options = AlgorithmOptions(advantage_estimator=estimator, disable_grpo_std_normalization=not normalise)
    totals = totals_of(rewards, masks, kl, coef)
    expected = []
    for group, total in zip(ids, totals, strict=True):
        mine = [t for g, t in zip(ids, totals, strict=True) if g == group]
        value = total - statistics.fmean(mine)
        expected.append(value / (statistics.stdev(mine) + 1e-6) if normalise else value)
    assert_spread(compute_advantages(options, rewards, ids, masks, kl, coef), expected, masks)


@pytest.mark.parametrize("coef", [0.0, 0.3])
def test_rloo_leaves_the_answer_itself_out_of_its_baseline(coef):
    ids, rewards, masks, kl = batch(2)
    totals = totals_of(rewards, masks, kl, coef)
    expected = []
    for position, (group, total) in enumerate(zip(ids, totals, strict=True)):
        others = [t for p, (g, t) in enumerate(zip(ids, totals, strict=True)) if g == group and p != position]
        expected.append(total - sum(others) / len(others))
    options = AlgorithmOptions(advantage_estimator="rloo")
    assert_spread(compute_advantages(options, rewards, ids, masks, kl, coef), expected, masks)


@pytest.mark.parametrize("coef", [0.0, 0.3])
def test_reinforce_plus_plus_is_the_whitened_reward_to_go(coef):
    ids, rewards, masks, kl = batch(3)
    raw = [
        [
            reward - coef * sum(k * m for k, m in zip(ks.tolist()[t:], ms.tolist()[t:], strict=True))
            for t in range(len(ms))
        ]
        for reward, ms, ks in zip(rewards, masks, kl, strict=True)
    ]
    learned = [v for vs, ms in zip(raw, masks, strict=True) for v, m in zip(vs, ms.tolist(), strict=True) if m]
    mean, deviation = statistics.fmean(learned), math.sqrt(statistics.variance(learned) + 1e-8)
    options = AlgorithmOptions(advantage_estimator="reinforce_plus_plus")
    for advantage, values, mask in zip(
        compute_advantages(options, rewards, ids, masks, kl, coef), raw, masks, strict=True
    ):
        expected = torch.tensor([(v - mean) / deviation for v in values], dtype=torch.float64) * mask
        torch.testing.assert_close(advantage.double(), expected, rtol=1e-5, atol=1e-6)  # float32 before whitening


def test_order_of_answers_does_not_matter():
    ids, rewards, masks, _ = batch(4)
    order = list(range(len(ids)))
    random.Random(0).shuffle(order)
    for estimator in ("grpo", "rloo"):
        options = AlgorithmOptions(advantage_estimator=estimator)
        straight = compute_advantages(options, rewards, ids, masks)
        permuted = compute_advantages(
            options, [rewards[i] for i in order], [ids[i] for i in order], [masks[i] for i in order]
        )
        for position, source in enumerate(order):
            assert torch.equal(permuted[position], straight[source])


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7])
def test_equal_rewards_give_exactly_zero(reward):
    """In float32 the mean of three times 0.1 is off by 7e-9, which divided by 1e-6 is an advantage out of nothing."""
    masks = [torch.ones(2)] * 3
    for advantage in compute_advantages(AlgorithmOptions(), [reward] * 3, [0] * 3, masks):
        assert torch.equal(advantage, torch.zeros(2))


def test_normalize_advantages_whitens_over_learned_tokens():
    ids, rewards, masks, _ = batch(5)
    plain = compute_advantages(AlgorithmOptions(), rewards, ids, masks)
    white = compute_advantages(AlgorithmOptions(normalize_advantages=True), rewards, ids, masks)
    for got, expected in zip(white, whiten(plain, masks), strict=True):
        assert torch.equal(got, expected)
    learned = torch.cat([a[m.bool()] for a, m in zip(white, masks, strict=True)]).double()
    assert abs(learned.mean()) < 1e-6
    assert abs(learned.std() - 1) < 1e-5


def test_whiten_without_spread_is_finite():
    assert whiten([], []) == []
    assert torch.equal(whiten([torch.tensor([3.0])], [torch.tensor([1])])[0], torch.zeros(1))
    assert torch.equal(whiten([torch.tensor([3.0, 5.0])], [torch.tensor([0, 0])])[0], torch.zeros(2))
    assert torch.equal(whiten([torch.full((4,), 2.0)], [torch.ones(4)])[0], torch.zeros(4))


def test_what_cannot_be_computed_is_refused():
    masks = [torch.ones(2)] * 3
    with pytest.raises(ValueError, match=r"group 1 has only 1.*--n-samples-per-prompt must be at least 2"):
        compute_advantages(AlgorithmOptions(), [1.0, 0.0, 1.0], [0, 0, 1], masks)
    with pytest.raises(ValueError, match="rloo"):
        compute_advantages(AlgorithmOptions(advantage_estimator="rloo"), [1.0], [0], masks[:1])
    with pytest.raises(ValueError, match="must be equal"):
        compute_advantages(AlgorithmOptions(), [1.0, 0.0], [0, 0, 0], masks)
    with pytest.raises(ValueError, match=r"--kl-coef 0\.1 needs"):
        compute_advantages(AlgorithmOptions(kl_coef=0.1), [1.0, 0.0, 1.0], [0, 0, 0], masks)
