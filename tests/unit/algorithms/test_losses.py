"""KL estimators, policy losses and importance weights against closed forms, float64 loops and autograd."""

from __future__ import annotations

import math
import random

import pytest
import torch

from vime.algorithms import clipped_surrogate, kl_estimate, policy_loss, sequence_log_ratio
from vime.algorithms import truncated_importance_weights as tis
from vime.config.algorithm import AlgorithmOptions

KL_KINDS = AlgorithmOptions.__dataclass_fields__["kl_loss_type"].metadata["choices"]


def distributions():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1)


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl"])
def test_expectation_is_the_exact_divergence(kind):
    """Summed over the whole vocabulary with the policy's own probabilities, the unbiased estimators give KL exactly."""
    policy, reference = distributions()
    exact = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=policy), torch.distributions.Categorical(logits=reference)
    )
    torch.testing.assert_close((policy.exp() * kl_estimate(kind, policy, reference)).sum(), exact)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_values(kind):
    d = [-1.5, -0.1, 0.0, 0.3, 2.0]
    formula = {"k1": lambda x: x, "k2": lambda x: x * x / 2}.get(kind, lambda x: math.exp(-x) - 1 + x)
    reference = torch.full((5,), -2.0, dtype=torch.float64)
    got = kl_estimate(kind, reference + torch.tensor(d, dtype=torch.float64), reference)
    torch.testing.assert_close(got, torch.tensor([formula(x) for x in d], dtype=torch.float64))


@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_gradient(kind):
    d = torch.tensor([-1.5, -0.1, 0.3, 2.0], dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: kl_estimate(kind, x, torch.zeros_like(x)), (d,))


def test_k3_keeps_small_differences_that_cancel_in_float32():
    d = torch.tensor([1e-3], dtype=torch.float32)
    torch.testing.assert_close(kl_estimate("k3", d, torch.zeros(1)), torch.tensor([5e-7]), rtol=1e-3, atol=0)


def test_low_var_kl_is_bounded_with_a_finite_gradient():
    log_probs = torch.tensor([-200.0, -12.0, 0.0], requires_grad=True)
    kl = kl_estimate("low_var_kl", log_probs, torch.zeros(3))
    assert kl.tolist() == [10.0, 10.0, 0.0]
    kl.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()


def test_half_precision_is_raised_before_subtracting():
    log_probs = torch.tensor([-1.0], dtype=torch.bfloat16)
    assert kl_estimate("k1", log_probs, torch.tensor([-1.001])).item() == pytest.approx(0.001, rel=1e-3)


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"'k4': choose k1"):
        kl_estimate("k4", torch.zeros(1), torch.zeros(1))


def loop_loss(log_ratio, advantage, low, high, c):
    ratio = math.exp(log_ratio)
    bounded = min(max(ratio, 1 - low), 1 + high)
    loss = max(-ratio * advantage, -bounded * advantage)
    return min(loss, -c * advantage) if c is not None and advantage < 0 else loss


@pytest.mark.parametrize(("low", "high", "c"), [(0.2, None, None), (0.2, 0.28, None), (0.1, 0.3, 3.0)])
def test_policy_loss_is_the_loop_and_its_gradient_stops_where_clipped(low, high, c):
    rng = random.Random(0)
    deltas = [rng.uniform(-1.6, 1.6) for _ in range(200)]
    signs = [rng.choice([-1.5, -0.2, 0.0, 0.7]) for _ in deltas]
    old = torch.tensor([-3 * rng.random() for _ in deltas], dtype=torch.float64)
    log_probs = (old + torch.tensor(deltas, dtype=torch.float64)).requires_grad_()
    loss, clipped = policy_loss(log_probs, old, torch.tensor(signs), low, high, c)
    bound = low if high is None else high
    expected = [loop_loss(d, a, low, bound, c) for d, a in zip(deltas, torch.tensor(signs).tolist(), strict=True)]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    for d, a, g, stopped in zip(deltas, torch.tensor(signs).tolist(), gradient.tolist(), clipped.tolist(), strict=True):
        ratio = math.exp(d)
        outside = (a > 0 and ratio > 1 + bound) or (a < 0 and ratio < 1 - low) or (a < 0 and c and ratio > c)
        assert stopped == bool(outside)
        assert g == pytest.approx(0.0 if outside else -ratio * a, rel=1e-9, abs=1e-12)
    assert clipped.any()
    assert not clipped.all()


def test_first_step_is_the_plain_policy_gradient():
    log_probs = torch.tensor([-0.5, -2.0], requires_grad=True)
    advantages = torch.tensor([0.3, -0.8])
    loss, clipped = policy_loss(log_probs, log_probs.detach().clone(), advantages, 0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    assert torch.equal(loss, -advantages)
    assert torch.equal(gradient, -advantages)
    assert not clipped.any()


def test_an_enormous_ratio_stays_finite():
    log_probs = torch.tensor([0.0, 0.0, 0.0], requires_grad=True)
    loss, _ = policy_loss(log_probs, torch.full((3,), -500.0), torch.tensor([1.0, 0.0, -1.0]), 0.2)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()


def test_dual_clip_bound_must_exceed_one():
    with pytest.raises(ValueError, match="above 1"):
        clipped_surrogate(torch.zeros(1), torch.ones(1), 0.2, 0.2, 1.0)


def test_sequence_ratio_is_the_geometric_mean_over_learned_tokens():
    lengths, rng = [3, 1, 4], random.Random(1)
    deltas = [rng.gauss(0, 0.2) for _ in range(8)]
    mask = [1, 0, 1, 1, 1, 1, 1, 0]
    old = torch.tensor([-rng.random() for _ in deltas], dtype=torch.float64)
    log_probs = (old + torch.tensor(deltas, dtype=torch.float64)).requires_grad_()
    got = sequence_log_ratio(log_probs, old, torch.tensor(mask), lengths)
    start, expected, weights = 0, [], []
    for n in lengths:
        part = range(start, start + n)
        count = sum(mask[t] for t in part)
        expected += [sum(deltas[t] * mask[t] for t in part) / count] * n
        weights += [mask[t] * n / count for t in part]
        start += n
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(got.sum(), log_probs)
    torch.testing.assert_close(gradient, torch.tensor(weights, dtype=torch.float64))


def test_sequence_ratio_of_a_split_answer_needs_the_other_ranks_sums():
    log_probs, old = torch.tensor([0.1, 0.2, 0.3, 0.6]), torch.zeros(4)
    mask = torch.tensor([1, 1, 0, 1])
    whole = sequence_log_ratio(log_probs, old, mask, [4])
    halves = []
    for mine, other in ((slice(0, 2), slice(2, 4)), (slice(2, 4), slice(0, 2))):
        rest = torch.stack([(log_probs[other] * mask[other]).sum(), mask[other].sum().float()])[:, None]
        halves.append(sequence_log_ratio(log_probs[mine], old[mine], mask[mine], [2], lambda x, rest=rest: x + rest))
    torch.testing.assert_close(torch.cat(halves), whole)
    empty = sequence_log_ratio(log_probs[:2], old[:2], mask[:2], [0, 2, 0])  # answers that live on other ranks
    assert empty.shape == (2,)
    assert empty.isfinite().all()


def test_importance_weights_are_clamped_constants():
    old = torch.tensor([math.log(0.9), math.log(0.5), math.log(0.01), -1.0], requires_grad=True)
    rollout = torch.tensor([math.log(0.3), math.log(0.4), math.log(0.1), -1.0])
    weights, truncated = tis(old, rollout, clip=2.0, clip_low=0.2)
    torch.testing.assert_close(weights, torch.tensor([2.0, 1.25, 0.2, 1.0]))
    assert truncated.tolist() == [True, False, True, False]
    assert not weights.requires_grad
