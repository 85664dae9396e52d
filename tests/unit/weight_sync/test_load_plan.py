"""What the tracer records of loaders, one habit of theirs at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.weight_sync.toy import ToyModel, random_tensors
from vime.weight_sync.boxes import Region, box_shape
from vime.weight_sync.load_plan import LoadPlan, trace
from vime.weight_sync.shard_map import TensorInfo

Load = Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], Any]


def plan_of(params: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], load: Load) -> LoadPlan:
    infos = {name: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
    return trace(params, infos, lambda weights: load(params, dict(weights)))


def replay(plan: LoadPlan, params: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    for fill in plan.fills:
        params[fill.param].view(-1).as_strided(fill.shape, fill.strides, fill.offset).fill_(fill.value)
    for copy in plan.copies:
        part = tensors[copy.tensor][tuple(slice(*span) for span in copy.region.box)]
        to = params[copy.param].view(-1)
        to.as_strided(box_shape(copy.region.box), copy.region.strides, copy.region.offset).copy_(part)


def assert_same(load: Load, params: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> LoadPlan:
    """The plan, made on meta tensors, replayed, does what the loader does."""
    plan = plan_of({name: t.to("meta") for name, t in params.items()}, tensors, load)
    assert not plan.problems
    truth, ours = ({name: t.clone() for name, t in params.items()} for _ in range(2))
    load(truth, tensors)
    replay(plan, ours, tensors)
    for name in params:
        assert torch.equal(truth[name], ours[name]), name
    return plan


@pytest.mark.parametrize("size", [1, 2])
def test_the_toy_model_loads_by_plan_what_its_loader_loads(size: int) -> None:
    shapes = {
        "embed_tokens.weight": (50, 8),
        "layers.0.q_proj.weight": (16, 8),
        "layers.0.k_proj.weight": (8, 8),
        "layers.0.v_proj.weight": (8, 8),
        "layers.0.o_proj.weight": (8, 16),
        "layers.0.norm.weight": (8,),
        **{f"layers.0.experts.{e}.{p}.weight": (12, 8) for e in range(3) for p in ("gate_proj", "up_proj")},
        **{f"layers.0.experts.{e}.down_proj.weight": (8, 12) for e in range(3)},
    }
    tensors = random_tensors(shapes, 0)
    for rank in range(size):
        model = ToyModel(shapes, rank, size)
        params = {name: torch.zeros(t.shape) for name, t in model.load_format.items()}

        def load(into: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], model: ToyModel = model) -> None:
            for name, tensor in weights.items():
                model._write(into, name, tensor)

        plan = assert_same(load, params, tensors)
        assert plan.unused == []
        assert plan.unwritten == {}
        assert {copy.param for copy in plan.copies} == set(params)


def test_nothing_is_written_while_tracing() -> None:
    real = {"w": torch.ones(4, 4)}
    plan = plan_of(real, {"w": torch.zeros(4, 4)}, lambda p, t: p["w"].data.copy_(t["w"]))
    assert len(plan.copies) == 1
    assert bool((real["w"] == 1).all())


def test_views_conversions_and_moves_are_followed() -> None:
    def load(p: dict[str, torch.Tensor], t: dict[str, torch.Tensor]) -> None:
        p["transposed"].copy_(t["a"].t())
        p["stacked"][1].copy_(t["b"].view(2, 3, 4)[1].contiguous().to(t["b"].device))
        p["flat"].copy_(t["a"].clone().view(-1))

    params = {"transposed": torch.zeros(4, 6), "stacked": torch.zeros(2, 3, 4), "flat": torch.zeros(24)}
    plan = assert_same(load, params, {"a": torch.randn(6, 4), "b": torch.randn(6, 4)})
    assert plan.unwritten == {"stacked": 12}


@pytest.mark.parametrize("change", [lambda t: t.mul_(2), lambda t: torch.add(t, 1, out=t), lambda t: t[0].zero_()])
def test_a_checkpoint_tensor_that_the_loader_has_changed_is_computed(change: Callable[[torch.Tensor], Any]) -> None:
    def load(p: dict[str, torch.Tensor], t: dict[str, torch.Tensor]) -> None:
        p["before"].copy_(t["a"])
        change(t["a"])
        p["after"].copy_(t["a"])

    params = {"before": torch.zeros(4, 6), "after": torch.zeros(4, 6)}
    plan = plan_of(params, {"a": torch.randn(4, 6)}, load)
    assert plan.problems == {"after": "its values are computed, not copied"}


def test_conversion_to_the_parameters_dtype_is_left_to_the_copy() -> None:
    plan = plan_of(
        {"w": torch.zeros(4, dtype=torch.bfloat16)}, {"a": torch.randn(4)}, lambda p, t: p["w"].copy_(t["a"])
    )
    assert len(plan.copies) == 1
    assert plan.params["w"].dtype == torch.bfloat16


def test_what_is_overwritten_does_not_count() -> None:
    def load(p: dict[str, torch.Tensor], t: dict[str, torch.Tensor]) -> None:
        p["w"].zero_()
        p["w"].copy_(t["a"])
        p["w"].copy_(t["b"])
        p["padded"].fill_(7)
        p["padded"][:4].copy_(t["a"])

    params = {"w": torch.zeros(4), "padded": torch.zeros(6)}
    plan = assert_same(load, params, {"a": torch.randn(4), "b": torch.randn(4)})
    assert [(copy.tensor, copy.param) for copy in plan.copies] == [("b", "w"), ("a", "padded")]
    assert plan.unwritten == {}
    assert plan.unused == []


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_unused_tensors_and_unwritten_elements_are_named(device: str) -> None:
    params = {name: torch.zeros(size, device=device) for name, size in (("w", (2, 6)), ("never", (3,)), ("nil", (0,)))}
    params |= {"w by another name": params["w"], "rotary table": torch.zeros(3, device=device)}
    infos = {"a": TensorInfo((2, 3), "float32"), "extra": TensorInfo((1,), "float32")}
    plan = trace(params, infos, lambda weights: params["w"][:, 1:4].copy_(dict(weights)["a"]), {"rotary table"})
    assert plan.unused == ["extra"]
    assert plan.unwritten == {"w": 6, "never": 3}
    assert plan.written == ["w"]


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (lambda p, t: p["w"].copy_(t["a"] * 2), "computed"),
        (lambda p, t: p["w"].add_(1), "changed in place"),
        (lambda p, t: p["w"].copy_(t["row"]), "broadcast"),
        (lambda p, t: p["w"].view(torch.int32).copy_(t["a"]), "written as torch.int32"),
        (lambda p, t: (p["w"][:3].copy_(t["a"][:3]), p["w"][2:].copy_(t["a"][2:])), "covers an earlier one in part"),
        (lambda p, t: p["w"].copy_(t["a"].to(torch.float64)), "computed"),
        (lambda p, t: p["w"].copy_(t["row"].expand(4, 4)), "no box"),
    ],
)
def test_what_is_no_copy_is_a_problem_of_its_parameter(load: Load, words: str) -> None:
    tensors = {"a": torch.zeros(4, 4), "row": torch.zeros(4)}

    def both(p: dict[str, torch.Tensor], t: dict[str, torch.Tensor]) -> None:
        p["fine"].copy_(t["a"])
        load(p, t)

    plan = plan_of({"w": torch.zeros(4, 4), "fine": torch.zeros(4, 4)}, tensors, both)
    assert words in plan.problems["w"]
    assert set(plan.problems) == {"w"}
    assert {copy.param for copy in plan.copies} == {"fine"}


def test_a_loader_that_looks_at_values_cannot_be_planned_at_all() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        plan_of({"w": torch.zeros(4)}, {"a": torch.zeros(4)}, lambda p, t: p["w"].fill_(t["a"].sum().item()))


def test_a_parameter_inside_a_larger_storage_counts_from_its_own_first_element() -> None:
    flat = torch.zeros(100)
    plan = plan_of({"w": flat[40:48].view(2, 4)}, {"a": torch.zeros(4)}, lambda p, t: p["w"][1].copy_(t["a"]))
    assert plan.copies[0].region == Region(((0, 4),), 4, (1,))
