"""Hugging Face weights into the parameters of any layout and out again; that the model computes the same as
transformers is tested with the trainer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed import run_ranks
from tests.tiny import make_checkpoint
from tests.unit.backends.megatron_utils.trainer_helpers import processes
from tests.unit.models import megatron_by_hand as by_hand
from vime.backends.megatron_utils import hf_export
from vime.backends.megatron_utils.hf_weights import export_hf_weights, load_hf_weights, weight_files
from vime.errors import DataError
from vime.models.layout import ParallelLayout, parameter_shapes, pieces
from vime.models.spec import ModelSpec, spec_from_hf

Params = dict[tuple[int, str], torch.Tensor]


def empty_params(spec: ModelSpec, layout: ParallelLayout, rank: int, dtype: torch.dtype = torch.float32) -> Params:
    shapes = parameter_shapes(spec, layout, rank)
    return {key: torch.full(shape, float("nan"), dtype=dtype) for key, shape in shapes.items()}


def read(folder: str | Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(path)
    return found


def in_shards(source: str | Path, target: Path, count: int) -> Path:
    """The same checkpoint in ``count`` files with an index."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = read(source)
    names = sorted(tensors)
    where = {}
    for shard in range(count):
        name = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
        save_file({key: tensors[key] for key in names[shard::count]}, target / name)
        where |= dict.fromkeys(names[shard::count], name)
    (target / hf_export.INDEX).write_text(json.dumps({"weight_map": where}))
    return target


LAYOUTS = {
    "qwen3": ParallelLayout(8, tp=2, pp=2, vpp=2, cp=2, etp=2, vocab_divisible_by=8),
    "qwen2": ParallelLayout(4, tp=2, pp=2, etp=2),
    "llama": ParallelLayout(2, pp=2),
    "qwen3_moe": ParallelLayout(8, tp=2, pp=2, ep=2, etp=2),
}


@pytest.mark.parametrize("family", LAYOUTS)
def test_loads_what_megatron_would_hold(tmp_path: Path, family: str) -> None:
    """Every rank of a layout, one after the other, against tensors put together by hand; padding is zero."""
    more: dict[str, Any] = {"num_hidden_layers": 4}
    if family == "qwen3_moe":
        more["mlp_only_layers"] = [1]
    path = make_checkpoint(tmp_path / "hf", family, tied=family in ("qwen3", "llama"), vocab_size=505, **more)
    spec, layout = spec_from_hf(path), LAYOUTS[family]
    assert layout.validate(spec) == []
    hf = {name: tensor.numpy() for name, tensor in read(path).items()}
    shards = in_shards(path, tmp_path / "shards", 3)
    for rank in range(layout.world_size):
        expected = by_hand.parameters(spec, layout, layout.coordinates(rank), hf)
        for source in (path, shards):
            params = empty_params(spec, layout, rank)
            load_hf_weights(source, params, pieces(spec, layout, rank))
            assert params.keys() == expected.keys()
            for key, value in expected.items():
                assert np.array_equal(params[key].numpy(), np.where(value == by_hand.PAD, 0, value)), (rank, key)


def test_casts_to_the_parameters_dtype(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, dtype="bfloat16")
    spec, layout = spec_from_hf(path), ParallelLayout(1)
    params = empty_params(spec, layout, 0)
    load_hf_weights(path, params, pieces(spec, layout, 0))
    stored = read(path)["model.norm.weight"]
    assert stored.dtype is torch.bfloat16
    assert torch.equal(params[0, "decoder.final_layernorm.weight"], stored.float())


def edited(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = read(path)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")


def test_checkpoints_that_do_not_fit_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    good = make_checkpoint(tmp_path / "good")
    spec, layout = spec_from_hf(good), ParallelLayout(1)
    held = pieces(spec, layout, 0)
    up = "model.layers.1.mlp.up_proj.weight"

    def copy(name: str) -> Path:
        return Path(shutil.copytree(good, tmp_path / name))

    missing, larger, damaged, pickled, index = (copy(n) for n in ("missing", "larger", "damaged", "pickled", "index"))
    edited(missing, up, None)
    edited(larger, up, torch.zeros(130, 64))  # every slice that is read lies inside
    (damaged / "model.safetensors").write_bytes(b"\x08" + b"\0" * 20)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    (index / hf_export.INDEX).write_text(json.dumps({"weight_map": {up: "model-00001-of-00002.safetensors"}}))
    cases: list[tuple[Path, str]] = [
        (missing, f"missing has no tensor {up}"),
        (larger, rf"{up} in .*larger.* has shape \(130, 64\), but the model needs \(128, 64\)"),
        (damaged, r"cannot read .*damaged/model\.safetensors"),
        (pickled, r"pickled has no safetensors weights \(it has pytorch_model\.bin"),
        (index, r"names files that are not there: model-00001-of-00002\.safetensors"),
    ]
    params = empty_params(spec, layout, 0)
    for path, message in cases:
        with pytest.raises(DataError, match=message):
            load_hf_weights(path, params, held)
    assert all(bool(value.isnan().all()) for value in params.values())


def test_parameters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "hf")
    spec, layout = spec_from_hf(path), ParallelLayout(1)
    held = pieces(spec, layout, 0)
    params = empty_params(spec, layout, 0)
    extra = params | {(0, "decoder.extra.weight"): torch.zeros(3)}
    with pytest.raises(DataError, match=r"fills 0 elements of .*decoder\.extra\.weight \(chunk 0\), which has 3"):
        load_hf_weights(path, extra, held)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    with pytest.raises(DataError, match=f"no parameter {name}"):
        load_hf_weights(path, {key: value for key, value in params.items() if key[1] != name}, held)
    with pytest.raises(DataError, match=rf"{name} .* which has 8256 \(shape \(64, 129\)\)"):
        load_hf_weights(path, params | {(0, name): torch.zeros(64, 129)}, held)


def export(
    rank: int, source: str, target: str, layout: ParallelLayout, dtype: torch.dtype | None, shard: int
) -> list[str]:
    spec = spec_from_hf(source)
    params = empty_params(spec, layout, rank)
    load_hf_weights(source, params, pieces(spec, layout, rank))
    options: dict[str, Any] = {"source_hf_dir": source, "dtype": dtype, "max_shard_bytes": shard}
    export_hf_weights(target, params, spec, layout, rank, **options)
    export_hf_weights(target, params, spec, layout, rank, **options)  # replaces itself
    messages = []
    for wrong in (source, Path(source).parent / "mine", Path(source).parent / "file" / "below"):
        with pytest.raises(DataError) as caught:
            export_hf_weights(wrong, params, spec, layout, rank, source_hf_dir=source)
        messages.append(str(caught.value))
    hf_export._write = lambda tensors, path: f"no space for {path.name}" if rank == layout.world_size - 1 else None
    with pytest.raises(DataError) as caught:
        export_hf_weights(target, params, spec, layout, rank, **options)
    return [*messages, str(caught.value)]


@pytest.mark.parametrize(
    ("family", "tied", "layout", "dtype", "shard"),
    [
        ("qwen3_moe", False, ParallelLayout(4, tp=2, pp=2, vpp=2, etp=2), None, 60_000),
        ("qwen3", True, ParallelLayout(4, tp=2, pp=2, etp=2, vocab_divisible_by=8), torch.bfloat16, 1 << 30),
        ("qwen2", False, ParallelLayout(1), None, 1 << 30),
    ],
)
def test_export_is_what_was_loaded(
    tmp_path: Path, family: str, tied: bool, layout: ParallelLayout, dtype: torch.dtype | None, shard: int
) -> None:
    """Bit for bit, whole on disk, readable by transformers, and a failure on one rank is everybody's error."""
    source = make_checkpoint(tmp_path / "hf", family, tied=tied, vocab_size=505, num_hidden_layers=4)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    (tmp_path / "file").write_text("")
    target = tmp_path / "out" / "step_3"
    answers = run_ranks(layout.world_size, export, source, str(target), layout, dtype, shard, context=processes())
    before, after = read(source), read(target)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value.to(dtype or value.dtype)), name
    sizes = [path.stat().st_size for path in target.glob("*.safetensors")]
    if shard < 1 << 30:
        assert len(sizes) > layout.world_size
        assert set(json.loads((target / hf_export.INDEX).read_text())["weight_map"]) == set(before)
        assert set(weight_files(target)) == set(before)
    assert not list(target.parent.glob("*.old"))
    config = json.loads((target / "config.json").read_text())
    assert config["dtype"] == str(dtype or torch.float32).removeprefix("torch.")
    assert {path.name for path in Path(source).iterdir() if path.suffix in (".json", ".jinja")} <= {
        path.name for path in target.iterdir()
    }
    for messages in answers:
        patterns = (
            "started from; it is not overwritten",
            "has no config.json",
            "cannot write to",
            "no space for model",
        )
        assert len(messages) == len(patterns)
        for message, pattern in zip(messages, patterns, strict=True):
            assert pattern in message
    assert {tuple(messages) for messages in answers} == {tuple(answers[0])}  # the same on every rank

    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(source, dtype=dtype or torch.float32).float()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, ours(tokens).logits)


def test_shards_have_one_writer_each_and_the_work_is_spread() -> None:
    spec = ModelSpec(
        "qwen3", 8, 64, 256, 8, 4, 16, 1000, False, True, False, 1e-6, 1e4, 64, "float32"
    )  # fmt: skip
    layout = ParallelLayout(8, tp=2, pp=2)
    shards = hf_export.plan_shards(spec, layout, 4, 100_000)
    names = [name for shard in shards for name in shard.tensors]
    assert len(names) == len(set(names))
    written = {rank: sum(shard.bytes for shard in shards if shard.writer == rank) for rank in range(8)}
    assert max(written.values()) < 2 * min(written.values())
    for shard in shards:
        assert shard.bytes <= 100_000 or len(shard.tensors) == 1
        covered = dict.fromkeys(shard.tensors, 0)
        for held in shard.sources.values():
            for piece in held:
                covered[piece.tensor] += piece.numel
        assert sum(covered.values()) * 4 == shard.bytes
