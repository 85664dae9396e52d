"""Grouped experts against one product per expert; adjacent weights are not copied."""

from __future__ import annotations

import pytest
import torch

from vime.backends.megatron_utils.experts import GroupedLinear, stacked

EXPERTS, OUT, IN = 4, 16, 8


def make(adjacent: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if adjacent:
        buffer = torch.randn(EXPERTS * 160, generator=generator)
        return [buffer[e * 160 : e * 160 + OUT * IN].view(OUT, IN) for e in range(EXPERTS)]
    return [torch.randn(OUT, IN, generator=generator) for _ in range(EXPERTS)]


@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [0, 0, 10, 0]])
def test_forward_and_gradients(adjacent: bool, counts: list[int]) -> None:
    weights = [weight.requires_grad_() for weight in map(torch.Tensor.detach, make(adjacent))]
    others = [weight.detach().clone().requires_grad_() for weight in weights]
    x = torch.randn(sum(counts), IN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = x.detach().clone().requires_grad_()
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    one = GroupedLinear.apply(x, ends, *weights)
    other = torch.cat([part @ w.t() for part, w in zip(y.split(counts), others, strict=True)])
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    upstream = torch.randn_like(other)
    one.backward(upstream)
    other.backward(upstream)
    torch.testing.assert_close(x.grad, y.grad, atol=1e-5, rtol=1e-5)
    for weight, same in zip(weights, others, strict=True):
        torch.testing.assert_close(weight.grad, same.grad, atol=1e-5, rtol=1e-5)


def test_stacked_copies_only_where_it_must() -> None:
    weights = make(adjacent=True)
    view = stacked(weights)
    assert view.data_ptr() == weights[0].data_ptr()
    torch.testing.assert_close(view, torch.stack(weights), atol=0, rtol=0)
    for others in (weights[::-1], [weights[0], weights[2], weights[3]], make(adjacent=False)):
        torch.testing.assert_close(stacked(others), torch.stack(others), atol=0, rtol=0)
        assert stacked(others).data_ptr() != weights[0].data_ptr()
