"""Engines of other sizes than the matrix has: one over all ranks, and one for each rank. Minutes, and gigabytes."""

from __future__ import annotations

import pytest

from tests.e2e.layouts import judge
from tests.e2e.layouts.fleet import Fleet
from tests.e2e.layouts.matrix import WIDE, Case
from tests.e2e.layouts.test_sync import run
from vime.models.layout import ParallelLayout
from vime.types import Slot

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EIGHT_RANKS = {
    "TP4 CP2 EP8": ParallelLayout(8, tp=4, cp=2, ep=8, etp=1),
    "DP8": ParallelLayout(8),
    "TP8 ETP8": ParallelLayout(8, tp=8, etp=8, vocab_divisible_by=128),
    "PP2 VPP2 TP2 DP2 EP4": ParallelLayout(8, tp=2, pp=2, vpp=2, ep=4, etp=1),
}
FOUR_RANKS = {
    "DP4": ParallelLayout(4),
    "TP2 PP2": ParallelLayout(4, tp=2, pp=2, etp=2),
    "EP4": ParallelLayout(4, ep=4),
}


def test_one_engine_of_eight_workers(fleet: Fleet) -> None:
    """Every worker has a trainer rank on its own device, with a handle of its own."""
    fleet.ready(WIDE, {3: (8, "a")})
    for layout in EIGHT_RANKS.values():
        case = Case(WIDE, layout, False, ("TP8",), bucketed=True)
        sets = {"TP8": [fleet.address(3, Slot(0, 8))]}
        judge.judge(fleet, case, "TP8", sets["TP8"], run(fleet, case, sets))


def test_one_engine_for_each_of_four_ranks(fleet: Fleet) -> None:
    """Four leaders at once."""
    fleet.ready("MoE", {index: (1, "ab"[index % 2]) for index in range(4)})
    for layout in FOUR_RANKS.values():
        case = Case("MoE", layout, True, ("four TP1",), bucketed=True)
        sets = {"four TP1": [fleet.address(index, Slot(index, index + 1)) for index in range(4)]}
        judge.judge(fleet, case, "four TP1", sets["four TP1"], run(fleet, case, sets))
