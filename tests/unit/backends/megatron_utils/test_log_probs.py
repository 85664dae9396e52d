"""Log-probs and entropies in chunks over a cut vocabulary, against log_softmax of the whole in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from vime.backends.megatron_utils import log_probs as module
from vime.backends.megatron_utils.log_probs import Vocabulary, log_probs_and_entropy

VOCAB, HIDDEN, TOKENS = 37, 16, 11


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    g1, g2 = torch.randn(2, TOKENS, generator=generator)
    return hidden, weight, labels, g1, g2


def expected(temperature: float) -> list[torch.Tensor]:
    hidden, weight, labels, g1, g2 = (t.double() if t.is_floating_point() else t for t in inputs())
    hidden.requires_grad_()
    weight.requires_grad_()
    log_p = (hidden @ weight.t() / temperature).log_softmax(-1)
    chosen, entropy = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (chosen * g1 + entropy * g2).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [t.detach().float() for t in (chosen, entropy, hidden.grad, weight.grad)]


def on_rank(rank: int, padded: int, temperature: float) -> list[Any]:
    module.CHUNK_BYTES = 4 * VOCAB * 3  # several chunks, the last one smaller
    hidden, weight, labels, g1, g2 = inputs()
    group = dist.group.WORLD if dist.is_initialized() else None
    size = 1 if group is None else dist.get_world_size()
    rows = padded // size
    full = torch.zeros(padded, HIDDEN)
    full[:VOCAB] = weight
    mine = full[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    hidden.requires_grad_()
    vocabulary = Vocabulary(0, VOCAB, None) if group is None else Vocabulary.of_rank(VOCAB, padded, group)
    chosen, entropy = log_probs_and_entropy(hidden, mine, labels, vocabulary, temperature)
    (chosen * g1 + entropy * g2).sum().backward()
    assert hidden.grad is not None
    assert mine.grad is not None
    return [t.detach().numpy() for t in (chosen, entropy, hidden.grad, mine.grad)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_one_rank(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", module.CHUNK_BYTES)
    chosen, entropy, grad_hidden, grad_weight = (torch.from_numpy(a) for a in on_rank(0, 40, temperature))
    theirs = expected(temperature)
    torch.testing.assert_close(chosen, theirs[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, theirs[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad_hidden, theirs[2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad_weight[:VOCAB], theirs[3], atol=1e-5, rtol=1e-5)
    assert not grad_weight[VOCAB:].any()


@pytest.mark.parametrize("padded", [38, 76])  # 76: the second rank holds nothing but padding
def test_two_ranks(padded: int) -> None:
    ranks = [[torch.from_numpy(a) for a in rank] for rank in run_ranks(2, on_rank, padded, 0.6)]
    theirs = expected(0.6)
    for rank in ranks:
        torch.testing.assert_close(rank[0], theirs[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(rank[1], theirs[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ranks[0][2] + ranks[1][2], theirs[2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([ranks[0][3], ranks[1][3]])[:VOCAB], theirs[3], atol=1e-5, rtol=1e-5)


def test_no_tokens() -> None:
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    weight = torch.ones(VOCAB, HIDDEN, requires_grad=True)
    chosen, entropy = log_probs_and_entropy(
        hidden, weight, torch.zeros(0, dtype=torch.int64), Vocabulary(0, VOCAB, None), 1.0
    )
    (chosen.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert not weight.grad.any()
