"""Log-probabilities and entropies of tokens over a vocabulary that is cut over the tensor parallel ranks.

The output layer is part of it: logits exist for one chunk of tokens at a time, in forward and again in backward, so
that neither logits nor their gradient are ever held for a whole micro-batch (8,192 tokens of Qwen3's vocabulary are
4.6 GiB in fp32, twice). The price is one more product with the output weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 1 << 29  # of fp32 logits


@dataclass(frozen=True)
class Vocabulary:
    """This rank's part: rows of the output weight are the tokens [start, start + size); later rows are padding."""

    start: int
    size: int
    group: dist.ProcessGroup | None  # tensor parallel ranks; None: this rank holds the whole vocabulary

    @staticmethod
    def of_rank(vocab_size: int, padded_size: int, group: dist.ProcessGroup) -> Vocabulary:
        rows = padded_size // group.size()
        start = group.rank() * rows
        return Vocabulary(start, min(max(vocab_size - start, 0), rows), group if group.size() > 1 else None)


def log_probs_and_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocabulary: Vocabulary, temperature: float
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden W^T / temperature)[labels] and the entropy of that distribution.

    Args:
        hidden: [n, hidden], the same on every tensor parallel rank; its gradient is this rank's part of the sum.
        weight: [rows, hidden], this rank's rows of the output weight.
        labels: int64 [n], global token ids.
        temperature: above 0; the engine reports log-probs of the distribution that it samples from.

    Returns:
        (log_probs, entropy), both fp32 [n], in nats; differentiable in ``hidden`` and ``weight``.
    """
    return LogProbs.apply(hidden, weight, labels, vocabulary, temperature)


class LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, vocabulary: Vocabulary, temperature: float
    ) -> tuple[Tensor, Tensor]:
        rows = weight[: vocabulary.size]
        outputs = hidden.new_empty((3, len(labels)), dtype=torch.float32)
        for part in _chunks(len(labels), weight.shape[0]):
            outputs[:, part] = _chunk_forward(hidden[part], rows, labels[part], vocabulary, temperature)
        log_probs, entropy, log_total = outputs.unbind(0)
        ctx.save_for_backward(hidden, weight, labels, log_total, entropy)
        ctx.vocabulary, ctx.temperature = vocabulary, temperature
        return log_probs.clone(), entropy.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_total, entropy = ctx.saved_tensors
        vocabulary: Vocabulary = ctx.vocabulary
        rows = weight[: vocabulary.size]
        grad_log_probs, grad_entropy = grads
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in _chunks(len(labels), weight.shape[0]):
            # d log p_y / d z_j = [j = y] - p_j and d H / d z_j = -p_j (log p_j + H), with z the scaled logits.
            log_p = _logits(hidden[part], rows, ctx.temperature).sub_(log_total[part, None])
            p = log_p.exp()
            grad = torch.zeros_like(p)
            if grad_log_probs is not None:
                scale = grad_log_probs[part, None]
                grad.sub_(p * scale)
                local, inside = _local_labels(labels[part], vocabulary)
                if vocabulary.size:
                    grad.scatter_add_(1, local[:, None], scale * inside[:, None])
            if grad_entropy is not None:
                grad.sub_(p.mul_(log_p.add_(entropy[part, None])).mul_(grad_entropy[part, None]))
            grad = (grad / ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ rows
            grad_weight[: vocabulary.size] += grad.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _chunks(n: int, columns: int) -> list[slice]:
    """The same on every tensor parallel rank: ``columns`` counts padding too, of which ranks hold unequal parts."""
    size = max(1, CHUNK_BYTES // (4 * columns))
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _logits(hidden: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """fp32, from a product in the weights' precision, then scaled: the order of operations of vLLM's sampler."""
    logits = (hidden @ rows.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _local_labels(labels: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    local = labels - vocabulary.start
    inside = (local >= 0) & (local < vocabulary.size)
    return torch.where(inside, local, 0), inside


def _chunk_forward(hidden: Tensor, rows: Tensor, labels: Tensor, vocabulary: Vocabulary, temperature: float) -> Tensor:
    """[3, n]: log-prob, entropy, log of the sum of exponentials."""
    logits = _logits(hidden, rows, temperature)
    # A rank may hold nothing but padding rows.
    largest = logits.max(-1).values if vocabulary.size else logits.new_full((len(labels),), -torch.inf)
    if vocabulary.group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=vocabulary.group)
    shifted = logits.sub_(largest[:, None])
    local, inside = _local_labels(labels, vocabulary)
    sums = shifted.new_zeros((3, len(labels)))
    if vocabulary.size:
        sums[0] = shifted.gather(1, local[:, None])[:, 0] * inside
    exponentials = shifted.exp()
    sums[1] = exponentials.sum(-1)
    sums[2] = exponentials.mul_(shifted).sum(-1)
    if vocabulary.group is not None:
        dist.all_reduce(sums, group=vocabulary.group)
    chosen, total, weighted = sums.unbind(0)
    log_total = total.log()
    return torch.stack([chosen - log_total, log_total - weighted / total, log_total + largest])
