"""Which answers each data parallel rank learns from, in which forward pass.

Every rank works out the plan of all ranks from the lengths alone, so nothing is communicated and all agree.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Plan = list[list[list[int]]]  # [data parallel rank][micro-batch] -> answers; an empty micro-batch is all padding


def plan(
    lengths: Sequence[int],
    dp_size: int,
    *,
    max_tokens: int | None = None,
    micro_batch_size: int = 1,
    balance: bool = False,
    multiple: int = 1,
) -> Plan:
    """Distribute answers (numbered by their place in ``lengths``) over ranks and micro-batches.

    Every rank gets the same number of micro-batches: expert parallel ranks exchange tokens within each of them.

    Args:
        lengths: tokens of each answer, as they count against ``max_tokens``.
        dp_size: data parallel ranks.
        max_tokens: fill micro-batches up to this many tokens (--use-dynamic-batch-size); a longer answer has one for
            itself. None: ``micro_batch_size`` answers each.
        balance: give ranks equal numbers of tokens (--balance-data); otherwise rank r has answers r, r + dp_size, ...
        multiple: of micro-batches per rank (interleaved pipelines need a multiple of the number of stages).
    """
    everything = range(len(lengths))
    if balance:
        shares = balanced_partition(lengths, dp_size)
    else:
        shares = [list(everything[rank::dp_size]) for rank in range(dp_size)]
    if max_tokens is None:
        ranks = [_in_order(share, micro_batch_size) for share in shares]
    else:
        ranks = [_first_fit_decreasing(share, lengths, max_tokens) for share in shares]
    count = max(1, *(len(batches) for batches in ranks))
    count = -(-count // multiple) * multiple
    for batches in ranks:
        _split_until(batches, lengths, count)
    return ranks


def balanced_partition(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of ``weights`` in ``parts`` lists with sums as equal as the largest differencing method makes them.

    Karmarkar & Karp 1982: keep partial partitions, always join the two with the largest spread, the heaviest part of
    one with the lightest of the other. Deterministic; each part is in ascending order.
    """
    if parts == 1:
        return [list(range(len(weights)))]
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, weight in enumerate(weights):
        start: list[tuple[int, list[int]]] = [(weight, [index])] + [(0, []) for _ in range(parts - 1)]
        heapq.heappush(heap, (-weight, index, start))
    if not heap:
        return [[] for _ in range(parts)]
    while len(heap) > 1:
        _, order, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        # Descending against ascending sums.
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], order, joined))
    return [sorted(part) for _, part in heap[0][2]]


def _in_order(share: list[int], size: int) -> list[list[int]]:
    return [share[start : start + size] for start in range(0, len(share), size)]


def _first_fit_decreasing(share: list[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Johnson 1973: at most 11/9 of the fewest bins, plus one."""
    bins: list[tuple[int, list[int]]] = []
    for answer in sorted(share, key=lambda answer: (-lengths[answer], answer)):
        for place, (used, batch) in enumerate(bins):
            if used + lengths[answer] <= max_tokens:
                batch.append(answer)
                bins[place] = (used + lengths[answer], batch)
                break
        else:
            bins.append((lengths[answer], [answer]))
    return [sorted(batch) for _, batch in bins]


def _split_until(batches: list[list[int]], lengths: Sequence[int], count: int) -> None:
    """Bring the number of micro-batches to ``count``: halve the fullest one that can be, else add empty ones."""
    while len(batches) < count:
        divisible = [place for place, batch in enumerate(batches) if len(batch) > 1]
        if not divisible:
            batches.append([])
            continue
        place = max(divisible, key=lambda place: (sum(lengths[a] for a in batches[place]), -place))
        batch = batches[place]
        halves = balanced_partition([lengths[a] for a in batch], 2)
        batches[place] = [batch[i] for i in halves[0]]
        batches.append([batch[i] for i in halves[1]])
