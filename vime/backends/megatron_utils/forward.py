"""Runs micro-batches through Megatron's schedules: for log-probs only, or forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vime.backends.megatron_utils import cpu_compat

cpu_compat.install()

from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import (  # noqa: E402
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig  # noqa: E402

from vime.backends.megatron_utils.log_probs import Vocabulary, log_probs_and_entropy  # noqa: E402
from vime.backends.megatron_utils.microbatch import plan  # noqa: E402
from vime.backends.megatron_utils.model_provider import DecoderModel, needs_rows_of_one_length  # noqa: E402
from vime.backends.megatron_utils.packing import MicroBatch, Rotary, pack, padded_length, row_length  # noqa: E402
from vime.backends.megatron_utils.parallel import Groups  # noqa: E402
from vime.config import Config  # noqa: E402
from vime.models.layout import ParallelLayout  # noqa: E402
from vime.models.spec import ModelSpec  # noqa: E402
from vime.types import TrainBatch  # noqa: E402

LossOfTokens = Callable[[MicroBatch, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


class Forward:
    """The passes of one rank over its model chunks (DDP-wrapped, in order)."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        layout: ParallelLayout,
        groups: Groups,
        megatron: TransformerConfig,
        ddp_chunks: Sequence[Any],
        device: torch.device,
    ) -> None:
        self._config, self._layout, self._groups, self._megatron = config, layout, groups, megatron
        self._chunks, self._device = list(ddp_chunks), device
        self._one_length = needs_rows_of_one_length(config, spec, layout)
        self._balances = spec.num_experts is not None and config.model.moe_aux_loss_coeff > 0
        self._rotary = Rotary(spec.kv_channels, spec.rotary_base, device)
        padded = spec.padded_vocab_size(layout.tp, layout.vocab_divisible_by)
        self._vocabulary = Vocabulary.of_rank(spec.vocab_size, padded, groups.tp)
        # At temperature 0 an engine takes the likeliest token and reports log-probs of the unscaled distribution.
        self._temperature = config.rollout.rollout_temperature or 1.0

    # ------------------------------------------------------------------ planning

    def micro_batches(
        self, batch: TrainBatch, answers: Sequence[int], offsets: Sequence[int], learning: bool = True
    ) -> Rows:
        """This rank's micro-batches for ``answers`` (indices into ``batch``), from a plan that all ranks share."""
        train, cp = self._config.train, self._layout.cp
        lengths = [padded_length(len(batch.tokens[answer]), cp) for answer in answers]
        budget = train.max_tokens_per_gpu
        if not learning and train.log_probs_max_tokens_per_gpu is not None:
            budget = train.log_probs_max_tokens_per_gpu
        places = plan(
            lengths,
            self._groups.dp_size,
            max_tokens=budget * cp if train.use_dynamic_batch_size and budget is not None else None,
            micro_batch_size=train.micro_batch_size,
            balance=train.balance_data,
            multiple=self._layout.pp if self._layout.vpp > 1 else 1,
        )
        unit = self._layout.tp if self._megatron.sequence_parallel else 1
        longest = [[row_length([lengths[i] for i in row], cp, unit) for row in rank] for rank in places]
        if self._one_length:
            most = max(max(rank) for rank in longest)
            longest = [[most] * len(rank) for rank in longest]
        total = sum(len(batch.tokens[answer]) for answer in answers)
        mine = self._groups.dp_rank
        rows = [[answers[i] for i in row] for row in places[mine]]
        return Rows(batch, rows, longest[mine], total, offsets)

    def _pack(self, rows: Rows, index: int) -> MicroBatch:
        micro = pack(
            rows.answers[index],
            rows.batch.tokens,
            rows.batch.response_lengths,
            rows.offsets,
            length=rows.lengths[index],
            cp=self._layout.cp,
            cp_rank=self._groups.cp_rank,
            device=self._device,
        )
        self._rotary.fill(micro, self._megatron.params_dtype)
        return micro

    def _batches(self, rows: Rows) -> Iterator[MicroBatch]:
        for index in range(len(rows.answers)):
            yield self._pack(rows, index)

    # ------------------------------------------------------------------ passes

    def log_probs(self, rows: Rows, into: Tensor) -> None:
        """Write the log-probs of this rank's response tokens into their slots of ``into``, fp32 [response tokens].

        Dropout is off. Only the last pipeline stage writes.
        """

        def keep(micro: MicroBatch, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            into[micro.slots] = log_probs
            return log_probs.sum(), {}

        for chunk in self._chunks:
            chunk.eval()
        with torch.no_grad():
            self._run(rows, keep, forward_only=True)
        for chunk in self._chunks:
            chunk.train()

    def backward(self, rows: Rows, loss: LossOfTokens) -> dict[str, Tensor]:
        """Accumulate the gradients of the sum of ``loss`` over all micro-batches and ranks, reduced over ranks.

        Returns the sums over this rank's micro-batches of what ``loss`` returned beside the loss (last stage only).
        """
        # Megatron divides gradients by the number of tokens of the step: so MoE's auxiliary losses are averaged.
        scale = float(rows.total_tokens)

        def scaled(micro: MicroBatch, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            value, sums = loss(micro, log_probs, entropy)
            return value * scale, sums

        sums: dict[str, Tensor] = {}
        for part in self._run(rows, scaled, forward_only=False):
            for name, value in part.items():
                sums[name] = sums[name] + value.double() if name in sums else value.double()
        return sums

    def _run(self, rows: Rows, loss: LossOfTokens, forward_only: bool) -> list[dict[str, Tensor]]:
        def step(iterator: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            micro = next(iterator)
            padding = micro.padding if self._balances else None
            hidden = model(micro.tokens, micro.positions, None, packed_seq_params=micro.packing, padding_mask=padding)
            return hidden, lambda output: self._loss(model.module, micro, output, loss)

        if len(self._chunks) > 1:
            batches = list(self._batches(rows))
            iterators: Any = [iter(batches) for _ in self._chunks]
        else:
            iterators = self._batches(rows)
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators,
            model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
            num_microbatches=len(rows.answers),
            seq_length=rows.lengths[0],  # of every row, where rows have one length; else stages tell each other
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _loss(
        self, model: DecoderModel, micro: MicroBatch, hidden: Tensor, loss: LossOfTokens
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if self._megatron.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        chosen = hidden[:, 0].index_select(0, micro.where)
        log_probs, entropy = log_probs_and_entropy(
            chosen, model.output_weight(), micro.labels, self._vocabulary, self._temperature
        )
        value, sums = loss(micro, log_probs, entropy)
        num_tokens = torch.tensor(micro.num_tokens, dtype=torch.int, device=self._device)
        return value, num_tokens, sums


class Rows:
    """One rank's micro-batches of one optimizer step, not yet packed."""

    def __init__(
        self,
        batch: TrainBatch,
        answers: list[list[int]],
        lengths: list[int],
        total_tokens: int,
        offsets: Sequence[int],
    ) -> None:
        self.batch, self.answers, self.lengths, self.offsets = batch, answers, lengths, offsets
        self.total_tokens = total_tokens  # of all ranks' rows, without padding: what Megatron will divide by
