from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vime.backends.megatron_utils.attention import PackedAttention, _same_lengths
from vime.backends.megatron_utils.packing import Segment


def attention() -> PackedAttention:
    config: Any = SimpleNamespace(attention_dropout=0.0, context_parallel_size=1, attention_backend="auto")
    return PackedAttention(config, 1, None, "self", softmax_scale=0.2)


def document_by_document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment: Segment) -> torch.Tensor:
    outputs = []
    parts = zip(q.split(segment.q_lengths), k.split(segment.k_lengths), v.split(segment.k_lengths), strict=True)
    for query, key, value in parts:
        query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
        past = key.shape[2] - query.shape[2]
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(past)
        how: dict[str, Any] = {"attn_mask": mask} if past else {"is_causal": True}
        output = F.scaled_dot_product_attention(query, key, value, scale=0.2, enable_gqa=True, **how)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("inference_first", [False, True])
@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"),
    [
        ([5, 3, 5, 1, 3, 5], None),  # equal lengths far from each other
        ([7], None),
        ([2, 3, 4], None),  # none equal
        ([2, 3, 2, 3], [4, 3, 4, 6]),  # equal queries, other keys: a context parallel rank's second chunk
        ([3, 0, 3], [3, 0, 3]),
    ],
)
def test_documents_of_one_length_together_are_the_same_bits(
    q_lengths: list[int], k_lengths: list[int] | None, inference_first: bool
) -> None:
    k_lengths = k_lengths or q_lengths
    empty = torch.empty(0)
    segment = Segment(None, None, empty, empty, q_lengths, k_lengths)
    torch.manual_seed(0)
    q = torch.randn(sum(q_lengths), 4, 32, requires_grad=True)
    k, v = (torch.randn(sum(k_lengths), 2, 32, requires_grad=True) for _ in range(2))
    module = attention()
    _same_lengths.cache_clear()
    if inference_first:  # what log-probs leave behind must not stand in the way of a backward pass
        with torch.inference_mode():
            module._attend(q, k, v, segment)
    got, want = module._attend(q, k, v, segment), document_by_document(q, k, v, segment)
    assert torch.equal(got, want)
    weight = torch.randn_like(want)
    for mine, theirs in zip(
        torch.autograd.grad((got * weight).sum(), (q, k, v)),
        torch.autograd.grad((want * weight).sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.equal(mine, theirs)
