"""Megatron's router with an auxiliary loss that means the same in every parallel layout (--moe-aux-loss-coeff)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class BalancedRouter(TopKRouter):
    """TopKRouter whose auxiliary loss is of whole rows, padding left out, and weighted by their tokens.

    For E experts, k of them per token and a row of T tokens, the loss is E * sum_e f_e P_e (Fedus et al. 2021, eq. 4),
    with f_e the part of the T * k choices that fell on expert e and P_e the mean of its probabilities. A step takes the
    mean over its rows, each weighted by T. Ranks of the tensor and context parallel groups hold parts of a row and
    their gradients are summed, so the parts add up to T times the row's loss, which Megatron later divides by the
    step's tokens.

    Megatron's own weights each part by the rank's tokens instead of the row's, so that the loss is divided by tensor
    parallel size x context parallel size; and it counts the padding that these layouts add.
    """

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``input`` [local tokens, 1, hidden]; ``padding_mask`` bool [tokens, 1], True for padding, or None."""
        if padding_mask is not None and len(padding_mask) != len(input):
            padding_mask = scatter_to_sequence_parallel_region(padding_mask)  # Megatron does it on the first stage only
        return super().forward(input, padding_mask)

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        return self._attach(probs, scores_for_aux_loss, routing_map, self.get_aux_loss_coeff("aux_loss"))

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """A row is one sequence here: `vime check` refuses rows that hold several."""
        return self._attach(probs, scores_for_aux_loss, routing_map, self.get_aux_loss_coeff("seq_aux_loss"))

    def _attach(self, probs: Tensor, scores: Tensor, routing_map: Tensor, coefficient: float) -> Tensor:
        if coefficient == 0:
            return probs
        chosen = routing_map.sum(0)
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(chosen, group=self.tp_cp_group)
        fractions = chosen / chosen.sum().clamp(min=1)  # a row of nothing but padding has no loss
        loss = coefficient * len(fractions) * torch.sum(fractions * scores.sum(0))
        return MoEAuxLossAutoScaler.apply(probs, loss)
