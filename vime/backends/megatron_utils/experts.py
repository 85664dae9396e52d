"""Experts as one grouped matrix product per projection, with SequentialMLP's parameters (--moe-grouped-gemm).

Megatron's GroupedMLP needs the grouped_gemm package and TEGroupedMLP needs TransformerEngine; torch has the product.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor


class GroupedExperts(SequentialMLP):
    """SequentialMLP (its names, its checkpoint layout) whose forward does all local experts at once."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        x = permuted_local_hidden_states
        if x.shape[0] == 0 or self.num_local_experts == 1:
            return super().forward(x, tokens_per_expert, permuted_probs)
        ends = torch.as_tensor(tokens_per_expert).to(x.device).cumsum(0).to(torch.int32)
        experts = cast(list[MLP], list(self.local_experts))
        hidden = GroupedLinear.apply(x, ends, *(_weight(expert.linear_fc1) for expert in experts))
        gate, up = hidden.chunk(2, -1)
        hidden = (F.silu(gate) * up * permuted_probs.unsqueeze(-1)).to(x.dtype)
        return GroupedLinear.apply(hidden, ends, *(_weight(expert.linear_fc2) for expert in experts)), None


def _weight(linear: Any) -> Tensor:
    return linear.weight


class GroupedLinear(torch.autograd.Function):
    """y_t = x_t W_e^T for the tokens t of expert e; tokens are sorted by expert.

    apply(x [tokens, in], ends int32 [experts], *weights, each [out, in]) -> [tokens, out]. ``ends[e]`` is where expert
    e's tokens end. Experts that lie at equal distances in one buffer, as they do in DDP's, are not copied.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        return F.grouped_mm(x, stacked(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = F.grouped_mm(grad, stacked(weights), offs=ends)
        grad_weights = F.grouped_mm(grad.t(), x, offs=ends)
        return grad_x, None, *grad_weights.unbind(0)


def stacked(weights: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    """[experts, out, in]: a view if the weights lie at equal ascending distances in one buffer, else a copy."""
    first = weights[0]
    if len(weights) > 1 and first.is_contiguous():
        step = weights[1].storage_offset() - first.storage_offset()
        storage = first.untyped_storage().data_ptr()
        if step >= first.numel() and all(
            w.untyped_storage().data_ptr() == storage
            and w.storage_offset() == first.storage_offset() + i * step
            and w.is_contiguous()
            for i, w in enumerate(weights)
        ):
            return first.detach().as_strided((len(weights), *first.shape), (step, *first.stride()))
    return torch.stack([w.detach() for w in weights])
