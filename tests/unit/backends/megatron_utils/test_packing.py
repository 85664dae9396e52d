"""Packed rows: which tokens predict which, and that context parallel ranks together hold the same row."""

from __future__ import annotations

import itertools

import pytest
import torch

from vime.backends.megatron_utils.packing import MicroBatch, Rotary, pack, padded_length, rotate, row_length

TOKENS = [[11, 12, 13, 14, 15], [21, 22, 23], [31, 32, 33, 34, 35, 36, 37]]
RESPONSES = [2, 1, 6]
OFFSETS = [0, 2, 3]


def make(answers: list[int], cp: int = 1, rank: int = 0, multiple: int = 1) -> MicroBatch:
    length = row_length([len(TOKENS[a]) for a in answers], cp, multiple)
    return pack(answers, TOKENS, RESPONSES, OFFSETS, length=length, cp=cp, cp_rank=rank, device=torch.device("cpu"))


def test_a_row() -> None:
    batch = make([2, 0], multiple=8)
    assert batch.tokens.tolist() == [[31, 32, 33, 34, 35, 36, 37, 11, 12, 13, 14, 15, 0, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert batch.labels.tolist() == [32, 33, 34, 35, 36, 37, 14, 15]
    assert batch.where.tolist() == [0, 1, 2, 3, 4, 5, 9, 10]
    assert batch.slots.tolist() == [3, 4, 5, 6, 7, 8, 0, 1]
    assert batch.lengths == [6, 2]
    assert batch.packing.cu_seqlens_q.tolist() == [0, 7, 12, 16]  # padding is a document of its own


def test_an_empty_row_is_padding() -> None:
    batch = make([], multiple=4)
    assert (batch.tokens.shape[1], batch.num_tokens) == (4, 0)
    assert batch.slots.numel() == 0
    assert batch.lengths == []


@pytest.mark.parametrize("cp", [2, 3])
@pytest.mark.parametrize("multiple", [1, 2])
def test_context_parallel_ranks_hold_the_row_between_them(cp: int, multiple: int) -> None:
    whole = make([0, 1, 2])
    found = {}
    for rank in range(cp):
        part = make([0, 1, 2], cp, rank, multiple)
        assert part.tokens.shape[1] % (2 * multiple) == 0
        for where, label, slot in zip(part.where, part.labels, part.slots, strict=True):
            assert slot.item() not in found
            found[slot.item()] = (part.tokens[0, where].item(), part.positions[0, where].item(), label.item())
        assert sum(part.lengths) == len(part.slots)
    expected = {
        slot.item(): (whole.tokens[0, where].item(), whole.positions[0, where].item(), label.item())
        for where, label, slot in zip(whole.where, whole.labels, whole.slots, strict=True)
    }
    assert found == expected


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_segments_pair_each_query_with_all_keys_up_to_it(cp: int) -> None:
    """Attention over segments, with token identities for keys: query (document, position) sees positions 0..itself."""
    parts = [make([0, 1, 2], cp, rank) for rank in range(cp)]
    documents = [padded_length(len(TOKENS[a]), cp) for a in range(3)]
    bounds = [0, *itertools.accumulate(documents)]

    def identities(part: MicroBatch) -> list[tuple[int, int]]:
        """(document, position) of each local token; documents follow one another, each split over the ranks."""
        marks, start = [], 0
        for document, n in enumerate(documents):
            for offset in range(n // cp):
                marks.append((document, int(part.positions[0, start + offset])))
            start += n // cp
        return marks

    gathered = list(itertools.chain(*(identities(part) for part in parts)))
    for part in parts:
        local, outputs = identities(part), []
        for segment in part.packing.segments:
            queries = local if segment.q_index is None else [local[i] for i in segment.q_index]
            keys = gathered if segment.kv_index is None else [gathered[i] for i in segment.kv_index]
            outputs += queries[: sum(segment.q_lengths)]
            q_end, k_end = 0, 0
            for document, (q, k) in enumerate(zip(segment.q_lengths, segment.k_lengths, strict=True)):
                if document < len(documents):
                    for index in range(q):
                        seen = keys[k_end : k_end + k - q + index + 1]
                        mark = queries[q_end + index]
                        assert seen == [(mark[0], position) for position in range(mark[1] + 1)]
                q_end, k_end = q_end + q, k_end + k
        order = range(len(outputs)) if part.packing.restore is None else part.packing.restore.tolist()
        assert [outputs[i] for i in order][: len(local)] == local
    assert bounds[-1] <= len(gathered)


def test_rotation_keeps_lengths_and_turns_by_position() -> None:
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    batch = pack([0], [[3, 4, 5, 6, 7]], [2], [0], length=5, cp=1, cp_rank=0, device=torch.device("cpu"))
    Rotary(8, 10.0**4, torch.device("cpu")).fill(batch, torch.float32)
    assert batch.packing.cos is not None
    assert batch.packing.sin is not None
    turned = rotate(x, batch.packing.cos, batch.packing.sin)
    angles = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    pairs, expected = torch.complex(x[..., :4], x[..., 4:]), torch.polar(torch.ones(5, 1, 4), angles[:, None])
    product = pairs * expected
    torch.testing.assert_close(turned, torch.cat([product.real, product.imag], -1))
