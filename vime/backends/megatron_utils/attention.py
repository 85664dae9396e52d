"""Core attention for packed rows without TransformerEngine: rotary embedding, grouped queries, context parallelism.

On a GPU torch's variable-length FlashAttention, one call for all documents. On a CPU, which has no such kernel, one
fused SDPA call for all documents of the same length: bit for bit what one call per document gives, and with 256 short
ones eight times as fast. Context parallelism gathers keys and values (their gradients are reduce-scattered) and
attends with each of the rank's two zigzag chunks to the prefix of its document; see packing.Segment.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vime.backends.megatron_utils.packing import Packing, Segment, rotate

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.11: documents are attended to one by one on a GPU too
    varlen_attn = None

_VARLEN_OPTIONS: dict[str, Any] = {"window_size": (-1, 0)}  # causal, aligned to each document's last key
if varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters:
    _VARLEN_OPTIONS["enable_gqa"] = True  # from torch 2.12; the kernel of 2.11 takes grouped queries without being told


class PackedAttention(torch.nn.Module):
    """Takes queries [tokens, heads, size] and keys and values [tokens, groups, size] *before* the rotary embedding."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: object,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.unfused = "unfused" in str(config.attention_backend)
        self.layer_number = layer_number

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Packing | None = None,
        **_: object,
    ) -> Tensor:
        packing = packed_seq_params
        assert packing is not None, "vime's attention takes packed rows only"
        cos, sin = cast(Tensor, packing.cos), cast(Tensor, packing.sin)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if self.cp_group is None:
            return self._attend(query, key, value, packing.segments[0]).flatten(1)
        both = tensor_parallel.gather_from_sequence_parallel_region(torch.stack([key, value], 1), group=self.cp_group)
        outputs = []
        for segment in packing.segments:
            keys, values = both.index_select(0, cast(Tensor, segment.kv_index)).unbind(1)
            outputs.append(self._attend(query.index_select(0, cast(Tensor, segment.q_index)), keys, values, segment))
        return torch.cat(outputs).index_select(0, cast(Tensor, packing.restore)).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, segment: Segment) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if query.is_cuda and varlen_attn is not None and not dropout and not self.unfused:
            return cast(
                Tensor,
                varlen_attn(
                    query.contiguous(),
                    key.contiguous(),
                    value.contiguous(),
                    segment.cu_q,
                    segment.cu_k,
                    max(segment.q_lengths),
                    max(segment.k_lengths),
                    scale=self.scale,
                    **_VARLEN_OPTIONS,
                ),
            )
        batches, restore = _same_lengths(tuple(segment.q_lengths), tuple(segment.k_lengths), query.device)
        outputs = []
        for q_length, k_length, q_rows, k_rows in batches:
            q = query.index_select(0, q_rows).unflatten(0, (-1, q_length))
            k, v = (t.index_select(0, k_rows).unflatten(0, (-1, k_length)) for t in (key, value))
            if dropout:  # each tensor parallel rank holds other heads, so its mask comes from its own generator
                tracker: Any = tensor_parallel.get_cuda_rng_tracker()
                with tracker.fork():
                    outputs.append(self._documents(q, k, v, dropout))
            else:
                outputs.append(self._documents(q, k, v, 0.0))
        return torch.cat(outputs).index_select(0, restore)

    def _documents(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Documents of one length: [documents, tokens, heads, size] -> [documents * tokens, heads, size]."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        options: dict[str, Any] = {"dropout_p": dropout, "scale": self.scale, "enable_gqa": True}
        if q.shape[2] == k.shape[2]:
            options["is_causal"] = True
        else:
            first = k.shape[2] - q.shape[2]
            rows = torch.arange(first, k.shape[2], device=q.device)[:, None]
            options["attn_mask"] = rows >= torch.arange(k.shape[2], device=q.device)
        if self.unfused:
            with sdpa_kernel(SDPBackend.MATH):
                output = F.scaled_dot_product_attention(q, k, v, **options)
        else:
            output = F.scaled_dot_product_attention(q, k, v, **options)
        return output.transpose(1, 2).flatten(0, 1)


@lru_cache(maxsize=64)  # every layer asks for the same ones
def _same_lengths(
    q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], device: torch.device
) -> tuple[list[tuple[int, int, Tensor, Tensor]], Tensor]:
    """Documents of equal lengths put together.

    Returns:
        batches: query length, key length, rows of the queries and rows of the keys of all such documents.
        restore: rows of the concatenated batches -> the documents' own order.
    """
    members: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    q_start = k_start = 0
    for lengths in zip(q_lengths, k_lengths, strict=True):
        q_starts, k_starts = members.setdefault(lengths, ([], []))
        q_starts.append(q_start)
        k_starts.append(k_start)
        q_start, k_start = q_start + lengths[0], k_start + lengths[1]

    def rows(starts: list[int], length: int) -> Tensor:
        return (torch.tensor(starts)[:, None] + torch.arange(length)).flatten().to(device)

    with torch.inference_mode(False):  # kept, so they must not become tensors that backward refuses
        batches = [(q, k, rows(starts[0], q), rows(starts[1], k)) for (q, k), starts in members.items() if q]
        return batches, torch.argsort(torch.cat([q_rows for _, _, q_rows, _ in batches]))
