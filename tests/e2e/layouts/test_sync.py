"""Any trainer topology to any engine topology, bit for bit: real Megatron ranks, real vLLM engines.

What an engine holds after an update is compared with what vLLM's own loading of the same checkpoint had left in such an
engine when it started. The cases that every run has cover each pair of choices (model, engines, ranks, sizes of every
kind of parallelism, padding, optimizer, path); `make test-all` runs all of them and writes benchmarks/sync_layouts.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.layouts import judge
from tests.e2e.layouts.fleet import Fleet
from tests.e2e.layouts.matrix import ENGINES, MODELS, Case, all_cases, covering, model_spec
from tests.e2e.layouts.ranks import sync
from tests.e2e.layouts.table import Results
from vime.models.layout import ParallelLayout
from vime.types import EngineAddress, Slot

pytestmark = pytest.mark.timeout(600)  # the first case of a model waits for its engines

ALL = all_cases()
CHOSEN = covering(ALL)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[Results]:
    """Made a table when the whole matrix has run."""
    assert request.config.cache is not None
    found = Results(request.config.cache.mkdir("sync_layouts") / "rows.jsonl")
    yield found
    if found.started.keys() >= set(ALL):
        found.write()


def run(
    fleet: Fleet, case: Case, sets: dict[str, list[EngineAddress]], export: Path | None = None, spoil: str | None = None
) -> judge.Reports:
    checkpoints = fleet.checkpoints(case.model)
    target = str(export) if export is not None else None
    return fleet.pool.run(case.layout.world_size, sync, case.options, checkpoints, sets, case.bucketed, target, spoil)


def check(fleet: Fleet, case: Case, folder: Path) -> dict[str, dict[str, Any]]:
    """Run a case; returns figures per engine set."""
    fleet.ready(case.model)
    sets = fleet.sets(case.engines, case.layout)
    reports = run(fleet, case, sets, export=folder / "export")
    for name, addresses in sets.items():
        judge.judge(fleet, case, name, addresses, reports)
    same_weights(folder / "export", fleet.checkpoints(case.model)["a"])
    return {name: reports[0][name][1]["stats"] for name in sets}


def same_weights(exported: Path, checkpoint: str) -> None:
    """What was exported from the trainer, bit for bit what the engines' weights were compared with."""
    found: dict[str, Any] = {}
    for path in exported.glob("*.safetensors"):
        found |= load_file(path)
    expected = load_file(Path(checkpoint) / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].numpy().tobytes() == tensor.numpy().tobytes(), name


def params() -> list[Any]:
    """Model by model, so that every engine is started once."""
    cases = [pytest.param(case, id=f"pairs-{case.id}") for case in CHOSEN]
    cases += [pytest.param(case, id=f"all-{case.id}", marks=pytest.mark.slow) for case in ALL]
    models = list(MODELS)
    return sorted(cases, key=lambda param: models.index(param.values[0].model))


@pytest.mark.parametrize("case", params())
def test_engines_hold_what_vllm_itself_would_have_loaded(
    fleet: Fleet, results: Results, tmp_path: Path, case: Case
) -> None:
    if case.engines == ENGINES:
        results.start(case)
    figures = check(fleet, case, tmp_path)
    if case.engines == ENGINES:
        results.add(case, figures)


def test_one_flipped_bit_is_seen(fleet: Fleet) -> None:
    """The judgement can fail: a bit of one parameter of one rank, in a layout where no replica has it right."""
    case = Case("MoE", ParallelLayout(4, tp=2, pp=2, etp=2), False, ("TP1",))
    fleet.ready(case.model)
    sets = fleet.sets(case.engines, case.layout)
    reports = run(fleet, case, sets, spoil="decoder.layers.1.self_attention.linear_proj.weight")
    with pytest.raises(AssertionError, match=r"'a' \(planned\).*not as vLLM itself has loaded it") as caught:
        judge.judge(fleet, case, "TP1", sets["TP1"], reports)
    (address,) = sets["TP1"]
    wrong = judge.differing(reports[0]["TP1"][1]["digests"][address.index], fleet.loaded(address.index, "a"))
    assert wrong == [["model.layers.1.self_attn.o_proj (packed)"]], caught.value


def test_one_slot_of_all_ranks_has_one_leader_and_a_handle_of_each(fleet: Fleet) -> None:
    """TP4 CP2 EP8: of the eight ranks of the slot two are "TP rank 0", and no TP group has all eight GPUs."""
    layout = ParallelLayout(8, tp=4, cp=2, ep=8, etp=1)
    case = Case("MoE", layout, False, ("TP2",), bucketed=True)
    fleet.ready(case.model)
    (address,) = fleet.sets(case.engines, layout)["TP2"]
    sets = {"TP2": [EngineAddress(address.index, address.url, address.world_size, Slot(0, 8))]}
    judge.judge(fleet, case, "TP2", sets["TP2"], run(fleet, case, sets))


def test_chosen_cases_have_every_pair_that_all_have() -> None:
    def pairs(cases: list[Case]) -> set[Any]:
        return {
            pair
            for case in cases
            for engine in case.engines
            for pair in itertools.combinations(case.choices(engine), 2)
        }

    assert pairs(CHOSEN) >= pairs(ALL)
    assert len(CHOSEN) < len(ALL) / 5
    assert covering(ALL) == CHOSEN


def test_the_matrix_has_every_size_and_only_what_is_accepted() -> None:
    for model in MODELS:
        mine = [case.layout for case in ALL if case.model == model]
        assert len(set(mine)) == len(mine)
        assert not any(layout.validate(model_spec(model)) for layout in mine)
        for key in ("tp", "pp", "cp", "dp", *(("ep", "etp", "edp") if model == "MoE" else ())):
            assert {getattr(layout, key) for layout in mine} >= {1, 2, 4, 8}, key
    assert any(
        case.model == "MoE" and vars(case.layout).items() >= {"tp": 4, "cp": 2, "ep": 8, "etp": 1}.items()
        for case in ALL
    )
