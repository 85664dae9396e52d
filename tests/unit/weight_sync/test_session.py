"""A worker's session on a toy model: what it refuses, what it notices, and that it can always begin anew."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from tests.unit.weight_sync.toy import (
    LoadFormatTensors,
    PackedLayer,
    ToyModel,
    flip_bit,
    in_arena,
    loaded,
    random_tensors,
    whole_map,
)
from vime.errors import WeightSyncError
from vime.weight_sync import copy_cpu, receiver, remote
from vime.weight_sync.arena import ArenaError, Stamp, arena_of, create_arena, node_name, sealed
from vime.weight_sync.arrivals import checksums
from vime.weight_sync.session import InitInfo, Session, UpdateInfo

SHAPES: dict[str, tuple[int, ...]] = {
    "embed_tokens.weight": (50, 8),
    "layers.0.q_proj.weight": (16, 8),
    "layers.0.k_proj.weight": (8, 8),
    "layers.0.v_proj.weight": (8, 8),
    "layers.0.o_proj.weight": (8, 16),
    "layers.0.norm.weight": (8,),
    **{f"layers.0.experts.{e}.{p}.weight": (12, 8) for e in range(3) for p in ("gate_proj", "up_proj")},
    **{f"layers.0.experts.{e}.down_proj.weight": (8, 12) for e in range(3)},
}


class Trainer:
    """One trainer rank with whole tensors, and a worker connected to it, in this process."""

    def __init__(self, number: int = 0, size: int = 1, check: str = "full", **model: Any) -> None:
        self.stamp = Stamp()
        self.tensors = in_arena(random_tensors(SHAPES, 0))
        self.model = ToyModel(SHAPES, number, size, **model)
        self.session = Session(self.model, number, torch.device("cpu"))
        shards = whole_map(self.tensors, self.stamp)
        neighbours = [0] * size
        self.info = InitInfo("first", 3, neighbours, ["cpu-0"] * size, check, shards.to_json())
        self.session.connect(self.info)

    def train(self, seed: int) -> None:
        for name, tensor in random_tensors(SHAPES, seed).items():
            self.tensors[name].copy_(tensor)

    def update(self, version: int, **message: Any) -> None:
        self.session.start()
        self.session.receive(UpdateInfo(version, **message))
        self.session.finish()

    def assert_synced(self, version: int) -> None:
        number, size = self.session.number, self.model.size
        assert self.model.digests() == loaded(SHAPES, self.tensors, number, size).digests()
        assert self.session.state()["version"] == version

    def bucket(self) -> dict[str, Any]:
        flat = create_arena(1 << 16).tensor
        end, listed = 0, []
        for name, tensor in self.tensors.items():
            flat[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            listed.append([name, "float32", list(tensor.shape), end])
            end += -(-tensor.nbytes // 64) * 64
        sums = dict(zip(self.tensors, checksums(list(self.tensors.values())), strict=True))
        return {"handles": {"cpu-0": arena_of(flat)[0].describe()}, "tensors": listed, "sums": sums, "last": True}


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        (["layers.0.norm.weight"], "8 of the 8 elements of its parameter layers.0.norm.weight: "),
        (["layers.0.experts.1.up_proj.weight"], "96 of the 576 elements of its parameter layers.0.experts.w13: "),
        (["layers.0.k_proj.weight", "embed_tokens.weight"], "embed_tokens.weight, nor into parts of 1 others: "),
    ],
)
@pytest.mark.parametrize("planned", [True, False])
def test_a_parameter_that_nothing_is_loaded_into_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, left_out: list[str], words: str, planned: bool
) -> None:
    write = ToyModel._write

    def computing(self: ToyModel, params: Any, name: str, tensor: torch.Tensor) -> None:
        write(self, params, name, tensor * 1 if "o_proj" in name else tensor)

    if not planned:
        monkeypatch.setattr(ToyModel, "_write", computing)
    trainer = Trainer()
    held = {name: tensor for name, tensor in trainer.tensors.items() if name not in left_out}
    info = replace(trainer.info, shards=whole_map(in_arena(held), trainer.stamp).to_json())
    trainer.session.attempt("connect", info)
    failure = trainer.session.state()["failure"]
    assert (failure["phase"], failure["where"]) == ("connect", "engine 3, worker 0")
    assert words in failure["cause"]
    trainer.session.attempt("start")
    assert "not connected" in trainer.session.state()["failure"]["cause"]


@pytest.mark.parametrize(("number", "size"), [(0, 1), (0, 2), (1, 2)])
def test_planned_and_bucketed_leave_what_the_loader_would(number: int, size: int) -> None:
    trainer = Trainer(number, size)
    trainer.stamp.set(1)
    trainer.model.poison()
    trainer.update(1)
    trainer.assert_synced(1)
    trainer.train(5)
    trainer.model.poison()
    trainer.update(2, bucket=trainer.bucket())
    trainer.assert_synced(2)
    trainer.train(6)
    trainer.stamp.set(3)
    trainer.model.poison()
    trainer.update(3)
    trainer.assert_synced(3)


def test_another_version_than_told_is_refused_before_a_byte_is_written() -> None:
    trainer = Trainer()
    trainer.stamp.set(1)
    trainer.update(1)
    before = trainer.model.digests()
    trainer.train(1)
    for stamped, words in ((1, "holds version 1, expected version 2"), (Stamp.WRITING, "being changed")):
        trainer.stamp.set(stamped)
        with pytest.raises(WeightSyncError, match=words) as caught:
            trainer.update(2)
        assert (caught.value.phase, caught.value.where) == ("version", "engine 3, worker 0")
        assert trainer.model.digests() == before
        assert trainer.session.state()["version"] is None
    trainer.stamp.set(2)
    trainer.update(2)
    trainer.assert_synced(2)


def test_a_trainer_that_goes_on_during_the_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    trainer.stamp.set(1)
    run = copy_cpu.CpuCopier.run

    def run_and_train(self: copy_cpu.CpuCopier) -> None:
        run(self)
        trainer.stamp.set(Stamp.WRITING)

    monkeypatch.setattr(copy_cpu.CpuCopier, "run", run_and_train)
    with pytest.raises(WeightSyncError, match="went on during the copy"):
        trainer.update(1)
    assert trainer.session.state()["version"] is None


@pytest.mark.parametrize("param", ["layers.0.norm.weight", "layers.0.experts.w13"])
def test_one_flipped_bit_in_transit_names_tensor_rank_and_worker(monkeypatch: pytest.MonkeyPatch, param: str) -> None:
    trainer = Trainer()
    trainer.stamp.set(1)
    run = copy_cpu.CpuCopier.run

    def run_and_flip(self: copy_cpu.CpuCopier) -> None:
        run(self)
        for copy, target in zip(self.program.copies, self._targets, strict=True):
            if copy.param == param:
                target.view(torch.int32)[(0,) * target.dim()] ^= 1 << 13
                return

    monkeypatch.setattr(copy_cpu.CpuCopier, "run", run_and_flip)
    with pytest.raises(WeightSyncError, match=rf"from trainer rank 0 to {param}") as caught:
        trainer.update(1)
    assert (caught.value.phase, caught.value.where) == ("checksum", "engine 3, worker 0")
    monkeypatch.undo()
    trainer.update(1)
    trainer.assert_synced(1)


def test_the_sampled_check_finds_a_faulty_place_within_32_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(check="sampled")
    run = copy_cpu.CpuCopier.run

    def run_and_flip(self: copy_cpu.CpuCopier) -> None:
        run(self)
        for copy, target in zip(self.program.copies, self._targets, strict=True):
            if copy.param == "embed_tokens.weight":
                target.view(-1)[77] += 1

    monkeypatch.setattr(copy_cpu.CpuCopier, "run", run_and_flip)
    found = []
    for version in range(32):
        trainer.stamp.set(version)
        try:
            trainer.update(version)
        except WeightSyncError as error:
            found.append(error.cause)
    assert len(found) == 1
    assert "embed_tokens.weight" in found[0]


@pytest.mark.parametrize("by_bucket", [False, True])
def test_a_failure_in_the_middle_can_be_followed_by_a_whole_update(by_bucket: bool) -> None:
    trainer = Trainer()
    trainer.stamp.set(1)
    trainer.model.fails = RuntimeError("the loader stumbles")
    message = {"bucket": trainer.bucket()} if by_bucket else {}
    with pytest.raises(RuntimeError, match="the loader stumbles"):
        trainer.update(1, **message)
    assert trainer.session.state()["version"] is None
    with pytest.raises(WeightSyncError, match="no weights have arrived"):
        trainer.session.finish()
    trainer.update(1, **message)
    trainer.assert_synced(1)


@pytest.mark.parametrize("stage_bytes", [1, 1 << 30])
@pytest.mark.parametrize("step", ["open", "close"])
def test_layers_opened_together_are_put_back_when_one_fails(
    monkeypatch: pytest.MonkeyPatch, step: str, stage_bytes: int
) -> None:
    monkeypatch.setattr(receiver, "STAGE_BYTES", stage_bytes)
    trainer = Trainer()
    trainer.stamp.set(1)
    first, second = trainer.model.staged()
    seen: list[str] = []

    def watch(layer: PackedLayer, name: str, fails: bool = False) -> None:
        method = getattr(layer, name)

        def called() -> Any:
            seen.append(f"{name} {layer.params[0].split('.')[-2]}")
            if fails:
                raise RuntimeError("the layer stumbles")
            return method()

        monkeypatch.setattr(layer, name, called)

    for layer in (first, second):
        for name in ("open", "close", "abort"):
            watch(layer, name, fails=layer is second and name == step)
    with pytest.raises(RuntimeError, match="the layer stumbles"):
        trainer.update(1)
    apart = stage_bytes == 1
    assert (
        seen
        == {
            ("open", True): ["open qkv_proj", "close qkv_proj", "open experts", "abort experts"],
            ("open", False): ["open qkv_proj", "open experts", "abort qkv_proj", "abort experts"],
            ("close", True): ["open qkv_proj", "close qkv_proj", "open experts", "close experts", "abort experts"],
            ("close", False): ["open qkv_proj", "open experts", "close qkv_proj", "close experts", "abort experts"],
        }[step, apart]
    )
    monkeypatch.undo()
    trainer.update(1)
    trainer.assert_synced(1)


def test_load_format_tensors_do_not_outlive_their_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    trainer.stamp.set(1)
    alive = LoadFormatTensors(monkeypatch)
    trainer.update(1)
    assert [*alive.when_closed, alive()] == [2, 1, 0]


def test_load_format_tensors_do_not_outlive_a_failed_update(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    trainer.stamp.set(1)
    alive = LoadFormatTensors(monkeypatch)

    def fail(*_: Any) -> Any:
        raise RuntimeError("nothing was sent")

    monkeypatch.setattr(remote.Staging, "receive", lambda self, stage, *_: fail() if stage else [])
    with pytest.raises(RuntimeError, match="nothing was sent"):
        trainer.update(1)
    assert alive() == 0


def test_a_layer_that_cannot_be_put_back_keeps_no_other_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    trainer.stamp.set(1)
    first, second = trainer.model.staged()
    put_back: list[str] = []

    def fail(cause: str) -> Any:
        raise RuntimeError(cause)

    monkeypatch.setattr(first, "close", lambda: fail("the layer stumbles"))
    monkeypatch.setattr(first, "abort", lambda: fail("and again"))
    monkeypatch.setattr(second, "abort", lambda: put_back.append("second"))
    with pytest.raises(RuntimeError, match="the layer stumbles"):
        trainer.update(1)
    assert put_back == ["second"]


def test_an_update_left_open_is_forgotten_by_abort() -> None:
    trainer = Trainer()
    trainer.stamp.set(1)
    trainer.session.start()
    trainer.session.receive(UpdateInfo(1, bucket=trainer.bucket()))
    trainer.session.abort()
    trainer.update(1)
    trainer.assert_synced(1)


def test_only_whoever_has_failed_loses_its_version() -> None:
    """A trainer that connects again aborts whatever is open in healthy engines too; with ``leave`` something failed."""
    trainer = Trainer()
    trainer.stamp.set(1)
    trainer.update(1)
    trainer.session.abort()
    trainer.assert_synced(1)
    trainer.session.abort(leave=True)
    assert trainer.session.state()["version"] is None
    trainer.update(1)
    trainer.session.start()
    trainer.session.abort()
    assert trainer.session.state()["version"] is None
    trainer.update(1)
    trainer.session.connect(trainer.info)  # of another trainer, or this one anew
    assert trainer.session.state()["version"] is None


def test_moved_arenas_are_opened_again_and_only_those() -> None:
    trainer = Trainer()
    trainer.stamp.set(1)
    trainer.update(1)
    elsewhere = in_arena(random_tensors(SHAPES, 9))
    old = arena_of(next(iter(trainer.tensors.values())))[0]
    trainer.tensors = elsewhere
    moved = whole_map(elsewhere, trainer.stamp).ranks[0]
    trainer.stamp.set(2)
    trainer.model.poison()
    trainer.update(2, moved=[vars(moved)])
    trainer.assert_synced(2)
    old.close()
    trainer.stamp.set(3)
    trainer.update(3)  # nothing asks for the old one
    trainer.assert_synced(3)


def test_what_fails_after_the_last_bucket_is_the_updates_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before finish, from which on vLLM takes an update for a good one."""
    trainer = Trainer()

    def fail() -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(trainer.model, "end_load", fail)
        trainer.session.attempt("start")
        trainer.session.attempt("receive", UpdateInfo(1, bucket=trainer.bucket()))
        failure = trainer.session.failure
        assert failure is not None
        assert (failure["phase"], failure["cause"]) == ("update", "RuntimeError: out of memory")
    trainer.update(2, bucket=trainer.bucket())
    trainer.assert_synced(2)


def test_an_update_whose_last_bucket_has_not_come_cannot_finish() -> None:
    trainer = Trainer()
    trainer.session.start()
    trainer.session.receive(UpdateInfo(1, bucket=trainer.bucket() | {"last": False}))
    with pytest.raises(WeightSyncError, match="not all weights have arrived"):
        trainer.session.finish()


EMBEDDING = "embed_tokens.weight"


def _alter(bucket: dict[str, Any], number: int, **change: Any) -> list[dict[str, Any]]:
    listed = [list(item) for item in bucket["tensors"]]
    for place, value in change.items():
        listed[number][("name", "dtype", "shape").index(place)] = value
    return [bucket | {"tensors": listed}]


def _flip(bucket: dict[str, Any]) -> list[dict[str, Any]]:
    flip_bit(bucket["handles"]["cpu-0"], 77)
    return [bucket]


def _swap(bucket: dict[str, Any]) -> list[dict[str, Any]]:
    listed = [list(item) for item in bucket["tensors"]]
    k, v = (next(item for item in listed if kind in item[0]) for kind in ("k_proj", "v_proj"))
    k[3], v[3] = v[3], k[3]
    return [bucket | {"tensors": listed}]


def _halves(bucket: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return bucket | {"tensors": bucket["tensors"][:5], "last": False}, bucket | {"tensors": bucket["tensors"][5:]}


BUCKET_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], list[dict[str, Any]]], str, str]] = {
    "the first is lost": (lambda b: [_halves(b)[1]], "update", f"5 of 15 tensors did not come, the first {EMBEDDING}"),
    "the first comes twice": (lambda b: [*_halves(b)[:1] * 2, _halves(b)[1]], "update", f"{EMBEDDING} came twice"),
    "the last comes twice": (lambda b: [b, b], "update", f"{EMBEDDING} came twice"),
    "a bit differs": (_flip, "checksum", f"{EMBEDDING} arrived changed: its checksum is "),
    "tensors are exchanged": (_swap, "checksum", "layers.0.k_proj.weight arrived changed"),
    "no checksums": (lambda b: [b | {"sums": {}}], "checksum", f"no checksum came with {EMBEDDING}"),
    "another name": (lambda b: _alter(b, 0, name="bias"), "update", "bias came, which the trainer does not have"),
    "another shape": (lambda b: _alter(b, 0, shape=[49, 8]), "update", "came with shape (49, 8), the trainer's has "),
    "another dtype": (
        lambda b: _alter(b, 0, dtype="int32"),
        "update",
        "came as int32, the trainer holds it as ",
    ),
}


@pytest.mark.parametrize("fault", BUCKET_FAULTS)
def test_buckets_that_are_not_what_was_sent_end_the_update(fault: str) -> None:
    trainer = Trainer()
    distort, phase, words = BUCKET_FAULTS[fault]
    trainer.session.attempt("start")
    for bucket in distort(trainer.bucket()):
        trainer.session.attempt("receive", UpdateInfo(1, bucket=bucket))
    failure = trainer.session.failure
    assert failure is not None
    assert (failure["phase"], failure["where"]) == (phase, "engine 3, worker 0")
    assert words in failure["cause"]
    trainer.session.attempt("finish")
    assert trainer.session.state()["version"] is None
    trainer.train(2)
    trainer.update(2, bucket=trainer.bucket())
    trainer.assert_synced(2)


@pytest.mark.parametrize(
    ("fault", "phase", "words"),
    [
        ("none", "", ""),
        ("a bit differs", "checksum", f"{EMBEDDING} arrived changed"),
        ("one is missing", "update", f"1 of 15 tensors did not come, the first {EMBEDDING}"),
        ("one is there twice", "update", f"{EMBEDDING} came twice"),
        ("one is shorter", "update", f"{EMBEDDING} came with shape (49, 8)"),
        ("one too many", "update", "old.weight came, which the trainer does not have"),
        ("no checksums", "checksum", "no checksum came with "),
    ],
)
def test_a_directory_that_is_not_what_was_written_ends_the_update(
    tmp_path: Path, fault: str, phase: str, words: str
) -> None:
    trainer = Trainer()
    tensors = {name: tensor.clone() for name, tensor in trainer.tensors.items()}
    sums = {} if fault == "no checksums" else dict(zip(tensors, checksums(list(tensors.values())), strict=True))
    if fault == "a bit differs":
        tensors[EMBEDDING].view(torch.int32)[4, 4] ^= 4
    elif fault == "one is missing":
        del tensors[EMBEDDING]
    elif fault == "one is there twice":
        save_file({EMBEDDING: tensors[EMBEDDING]}, tmp_path / "again.safetensors")
    elif fault == "one is shorter":
        tensors[EMBEDDING] = tensors[EMBEDDING][:49]
    elif fault == "one too many":
        tensors["old.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors")
    trainer.session.attempt("start")
    trainer.session.attempt("receive", UpdateInfo(1, directory=str(tmp_path), sums=sums))
    trainer.session.attempt("finish")
    if fault == "none":
        trainer.assert_synced(1)
        return
    failure = trainer.session.failure
    assert failure is not None
    assert (failure["phase"], failure["where"]) == (phase, "engine 3, worker 0")
    assert words in failure["cause"]
    assert trainer.session.state()["version"] is None


def test_without_checks_no_checksums_are_needed() -> None:
    trainer = Trainer(check="off")
    trainer.update(1, bucket=trainer.bucket() | {"sums": {}})
    trainer.assert_synced(1)


def test_a_payload_without_this_workers_device_is_refused_with_those_it_has() -> None:
    trainer = Trainer()
    bucket = trainer.bucket()
    bucket["handles"] = {"cpu-7": bucket["handles"]["cpu-0"]}
    with pytest.raises(WeightSyncError, match="no handle for its device cpu-0, only for: cpu-7"):
        trainer.update(1, bucket=bucket)


def test_attempts_keep_their_failure_and_skip_the_rest_until_the_next_start() -> None:
    trainer = Trainer()
    session = trainer.session
    trainer.stamp.set(1)
    session.attempt("start")
    session.attempt("receive", UpdateInfo(2))
    trainer.stamp.set(2)
    session.attempt("receive", UpdateInfo(2))
    session.attempt("finish")
    failure = session.state()["failure"]
    assert (failure["phase"], failure["where"]) == ("version", "engine 3, worker 0")
    assert failure["cause"] == "trainer rank 0 holds version 1, expected version 2"
    assert session.state()["version"] is None
    session.attempt("start")
    assert session.state()["failure"] is None
    session.attempt("receive", UpdateInfo(2))
    session.attempt("finish")
    trainer.assert_synced(2)
    trainer.model.fails = RuntimeError("the loader stumbles")
    session.attempt("start")
    session.attempt("receive", UpdateInfo(2))
    assert session.state()["failure"] == {
        "phase": "update",
        "where": "worker 0",
        "cause": "RuntimeError: the loader stumbles",
    }


def test_before_connecting_nothing_works() -> None:
    session = Session(ToyModel(SHAPES), 0, torch.device("cpu"))
    assert session.state() == {"node": node_name(), "connection": None, "failure": None}
    with pytest.raises(WeightSyncError, match="not connected"):
        session.start()


def test_a_dead_trainer_is_said_at_connect() -> None:
    trainer = Trainer()
    shards = trainer.info.shards
    shards["ranks"][0]["stamp"] = sealed(shards["ranks"][0]["stamp"] | {"pid": 2**22 - 3})
    with pytest.raises(ArenaError, match="must be alive"):
        trainer.session.connect(replace(trainer.info, shards=shards))


def test_a_model_that_cannot_be_planned_says_which_parameter_and_takes_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    write = ToyModel._write

    def computing(self: ToyModel, params: Any, name: str, tensor: torch.Tensor) -> None:
        write(self, params, name, tensor * 1 if "norm" in name else tensor)

    monkeypatch.setattr(ToyModel, "_write", computing)
    trainer = Trainer()
    assert set(trainer.session.state()["problems"]) == {"layers.0.norm.weight"}
    with pytest.raises(WeightSyncError, match="no copy program"):
        trainer.update(1)
    trainer.update(1, bucket=trainer.bucket())
    trainer.assert_synced(1)


def test_a_loader_that_looks_at_values_takes_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    write = ToyModel._write

    def looking(self: ToyModel, params: Any, name: str, tensor: torch.Tensor) -> None:
        assert float(tensor.sum()) != 0.5
        write(self, params, name, tensor)

    monkeypatch.setattr(ToyModel, "_write", looking)
    trainer = Trainer()
    assert "without data" in trainer.session.state()["problems"]["the whole model"]
    trainer.update(1, bucket=trainer.bucket())
    trainer.assert_synced(1)


def test_a_thousand_updates_leave_memory_and_descriptors_as_they_were() -> None:
    trainer = Trainer(check="sampled")
    process = psutil.Process()

    def updates(start: int, count: int) -> None:
        for version in range(start, start + count):
            trainer.stamp.set(version)
            trainer.update(version)

    updates(0, 50)
    gc.collect()
    before = (len(os.listdir("/proc/self/fd")), len(process.memory_maps(grouped=False)), process.memory_info().rss)
    updates(50, 1000)
    gc.collect()
    after = (len(os.listdir("/proc/self/fd")), len(process.memory_maps(grouped=False)), process.memory_info().rss)
    assert after[0] == before[0]
    assert after[1] <= before[1] + 2
    assert after[2] <= before[2] + (2 << 20)
    trainer.assert_synced(1049)
