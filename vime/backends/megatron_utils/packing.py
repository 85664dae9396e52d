"""Answers packed one after the other into one sequence ("thd"), cut over context parallel ranks.

A micro-batch is one row of documents. Context parallelism cuts each document into 2 * cp chunks and gives rank r the
chunks r and 2 * cp - 1 - r ("zigzag"), which balances causal attention, so documents are padded to a multiple of
2 * cp; a last document of padding brings the row to the length that sequence parallelism needs. Labels and response
positions are worked out before the cut, so no rank needs its neighbour's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class Segment:
    """Causal attention of some of the rank's queries to a prefix of each document.

    Document d has ``q_lengths[d]`` queries, the last of the ``k_lengths[d]`` positions that they may look at.
    """

    q_index: Tensor | None  # rows of the local queries; None: all of them, in order
    kv_index: Tensor | None  # rows of the keys gathered from all context parallel ranks; None: all, in order
    cu_q: Tensor  # int32 [documents + 1], cumulative q_lengths
    cu_k: Tensor
    q_lengths: list[int]
    k_lengths: list[int]


@dataclass
class Packing(PackedSeqParams):
    """What attention needs to know about a packed row; travels to it as Megatron's ``packed_seq_params``."""

    segments: list[Segment] = field(default_factory=list)
    restore: Tensor | None = None  # rows of the segments' concatenated outputs -> local order; None: as they are
    cos: Tensor | None = None  # [local tokens, 1, head size], of the rotary embedding
    sin: Tensor | None = None  # as cos, negative in its first half


@dataclass
class MicroBatch:
    """One rank's part of a packed row.

    ``where`` lists the local positions whose next token is a response token, and ``slots`` the place of that response
    token in the rollout's flat vector of response tokens (all answers, one after the other). ``lengths`` counts them
    per answer of the micro-batch.
    """

    tokens: Tensor  # int64 [1, local tokens]
    positions: Tensor  # int64 [1, local tokens], within the document
    padding: Tensor  # bool [1, local tokens]
    packing: Packing
    where: Tensor  # int64 [n]
    labels: Tensor  # int64 [n]
    slots: Tensor  # int64 [n]
    lengths: list[int]
    num_tokens: int  # local ones that are not padding


def padded_length(length: int, cp: int) -> int:
    """Tokens that a document takes in a row over all context parallel ranks."""
    multiple = 2 * cp if cp > 1 else 1
    return -(-length // multiple) * multiple


def row_length(lengths: Sequence[int], cp: int, multiple: int) -> int:
    """Length of the row that documents of these lengths make, over all context parallel ranks.

    Each rank's share is a multiple of ``multiple`` (the tensor parallel size, for sequence parallelism)."""
    unit = multiple * (2 * cp if cp > 1 else 1)
    return max(1, -(-sum(padded_length(n, cp) for n in lengths) // unit)) * unit


def pack(
    answers: Sequence[int],
    tokens: Sequence[Sequence[int]],
    response_lengths: Sequence[int],
    offsets: Sequence[int],
    *,
    length: int,
    cp: int,
    cp_rank: int,
    device: torch.device,
) -> MicroBatch:
    """Pack ``answers`` (indices into the other sequences) into a row of ``length`` tokens and take this rank's part.

    Args:
        answers: which answers; may be empty (a row of padding, where ranks need equal numbers of rows).
        tokens: per answer of the rollout, prompt then response.
        response_lengths: per answer of the rollout; smaller than its number of tokens.
        offsets: per answer, where its response tokens begin in the rollout's flat vector.
        length: from :func:`row_length`.
    """
    row, padding, positions, where, slots, labels, counts = [], [], [], [], [], [], []
    documents: list[int] = []
    start = 0
    for answer in answers:
        ids, response = tokens[answer], response_lengths[answer]
        padded = padded_length(len(ids), cp)
        row += [*ids, *([0] * (padded - len(ids)))]
        padding += [*([False] * len(ids)), *([True] * (padded - len(ids)))]
        first = start + len(ids) - response - 1  # the position that predicts the first response token
        where += range(first, first + response)
        labels += ids[len(ids) - response :]
        slots += range(offsets[answer], offsets[answer] + response)
        counts.append(response)
        documents.append(padded)
        start += padded
    if start < length:
        documents.append(length - start)
        row += [0] * (length - start)
        padding += [True] * (length - start)
    for n in documents:
        positions.append(torch.arange(n))
    local = _local_rows(documents, cp, cp_rank)
    row_t, position_t = torch.tensor(row, dtype=torch.int64), torch.cat(positions)
    padding_t = torch.tensor(padding)
    where_t = torch.tensor(where, dtype=torch.int64)
    slot_t, label_t = torch.tensor(slots, dtype=torch.int64), torch.tensor(labels, dtype=torch.int64)
    if cp > 1:
        row_t, position_t, padding_t = row_t[local], position_t[local], padding_t[local]
        place = torch.full((length,), -1)
        place[local] = torch.arange(len(local))
        here = place[where_t]
        kept = here >= 0
        counts = [int(part.sum()) for part in kept.split(counts)]
        where_t, slot_t, label_t = here[kept], slot_t[kept], label_t[kept]
    return MicroBatch(
        tokens=row_t[None].to(device),
        positions=position_t[None].to(device),
        padding=padding_t[None].to(device),
        packing=_packing(documents, cp, cp_rank, device),
        where=where_t.to(device),
        labels=label_t.to(device),
        slots=slot_t.to(device),
        lengths=counts,
        num_tokens=int((~padding_t).sum()),
    )


def _local_rows(documents: Sequence[int], cp: int, rank: int) -> Tensor:
    """Rows of the packed row that context parallel rank ``rank`` holds, in its order: per document its two chunks."""
    if cp == 1:
        return torch.arange(sum(documents))
    parts, start = [], 0
    for n in documents:
        chunk = n // (2 * cp)
        for index in (rank, 2 * cp - 1 - rank):
            parts.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
        start += n
    return torch.cat(parts)


def _cumulative(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def _packing(documents: list[int], cp: int, rank: int, device: torch.device) -> Packing:
    cu = _cumulative(documents, device)
    longest = max(documents)
    packing = Packing(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest)  # pyright: ignore[reportCallIssue]
    if cp == 1:
        packing.segments = [Segment(None, None, cu, cu, documents, documents)]
        return packing
    # Where each position of the whole row lies after the ranks' parts are gathered one after the other.
    gathered = torch.empty(sum(documents), dtype=torch.int64)
    gathered[torch.cat([_local_rows(documents, cp, r) for r in range(cp)])] = torch.arange(sum(documents))
    chunks = [n // (2 * cp) for n in documents]
    outputs = []
    for half, index in enumerate((rank, 2 * cp - 1 - rank)):
        queries, keys, local, start = [], [], 0, 0
        for n, chunk in zip(documents, chunks, strict=True):
            queries.append(torch.arange(local + half * chunk, local + (half + 1) * chunk))
            keys.append(gathered[start : start + (index + 1) * chunk])
            local, start = local + 2 * chunk, start + n
        k_lengths = [(index + 1) * chunk for chunk in chunks]
        outputs.append(torch.cat(queries))
        packing.segments.append(
            Segment(
                outputs[-1].to(device),
                torch.cat(keys).to(device),
                _cumulative(chunks, device),
                _cumulative(k_lengths, device),
                chunks,
                k_lengths,
            )
        )
    packing.restore = torch.cat(outputs).argsort().to(device)
    return packing


class Rotary:
    """Cosines and sines of the rotary embedding (Su et al. 2021, eq. 34) for packed rows, as transformers has them.

    Megatron's own packed path cuts the row into documents in every layer, with a device synchronisation each; here
    they are looked up once per micro-batch and applied by the core attention.
    """

    def __init__(self, head_size: int, base: float, device: torch.device) -> None:
        exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
        self.inverse_frequencies = (1.0 / (base**exponents)).to(device)

    def fill(self, batch: MicroBatch, dtype: torch.dtype) -> None:
        """Set ``batch.packing.cos`` and ``.sin``, [local tokens, 1, head size], rounded from fp32 to ``dtype``."""
        angles = batch.positions[0].float()[:, None] * self.inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        batch.packing.cos = torch.cat([cos, cos], -1)[:, None].to(dtype)
        batch.packing.sin = torch.cat([-sin, sin], -1)[:, None].to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to ``x`` [tokens, heads, head size]; pairs are (i, i + head size / 2), as in Llama.

    The first half of ``sin`` has the sign of the pair's second member: that takes four kernels, one fewer, for the same
    bits. They run twice per layer, and small models wait for their launches.
    """
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
