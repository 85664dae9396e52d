"""Links to other GPUs are woken before they are needed: which ones, when, and by how little."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.unit.weight_sync.toy import ToyModel, Whole, in_arena, loaded, random_tensors
from vime.backends.megatron_utils.update_weight.summary import engine_stats
from vime.errors import WeightSyncError
from vime.weight_sync import receiver, session
from vime.weight_sync.arena import Stamp, create_arena, node_name, sealed
from vime.weight_sync.arena_cuda import wake_links
from vime.weight_sync.boxes import contiguous_strides, whole
from vime.weight_sync.copy_cpu import CpuCopier
from vime.weight_sync.receiver import Place, Receiver
from vime.weight_sync.remote import Staging
from vime.weight_sync.session import InitInfo, Session, UpdateInfo
from vime.weight_sync.shard_map import ShardMap, describe_rank, merge, place

SHAPES: dict[str, tuple[int, ...]] = {
    "embed_tokens.weight": (48, 8),
    "layers.0.q_proj.weight": (8, 16),
    "layers.0.norm.weight": (8,),
    "norm.weight": (8,),
}


CPU = torch.device("cpu")


class Trainer:
    """Ranks in this process, one per list of tensors that it holds, each tensor in an arena of its own; rank i says
    that its memory is on GPU i."""

    def __init__(self, *held: list[str]) -> None:
        whole_tensors = random_tensors(SHAPES, 1)
        self.tensors = {name: in_arena({name: tensor})[name] for name, tensor in whole_tensors.items()}
        self.stamps = [Stamp() for _ in held]
        parts = []
        for rank, (names, stamp) in enumerate(zip(held, self.stamps, strict=True)):
            stamp.set(1)
            params = {(0, name): self.tensors[name] for name in names}
            info, places = place(rank, node_name(), f"gpu-{rank}", params, stamp)
            for handle in info.arenas:
                handle |= sealed(handle | {"device": f"GPU-{rank}"})
            pieces = [Whole(name, whole(SHAPES[name]), contiguous_strides(SHAPES[name])) for name in names]
            parts.append(describe_rank(info, places, SHAPES, pieces, params))
        self.shards: ShardMap = merge(parts, SHAPES)

    def worker(self, gpu: str | None) -> Receiver:
        made = Receiver(ToyModel(SHAPES), Place(0, 0, 0, node_name(), gpu=gpu), "full")
        made.connect(self.shards)
        return made


@pytest.fixture
def woken(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sizes of the arenas in which something was read to wake links, one list per GPU."""
    found: list[list[int]] = []
    monkeypatch.setattr(receiver, "wake_links", lambda arenas: found.append([arena.numel() for arena in arenas]))
    return found


@pytest.mark.parametrize("neighbours", [[], [0], [1], [2]])
@pytest.mark.parametrize(("gpu", "near"), [("GPU-0", 0), ("GPU-1", 1), ("GPU-9", None)])
def test_a_worker_reads_the_replica_on_its_own_gpu_whatever_it_is_told(
    monkeypatch: pytest.MonkeyPatch, neighbours: list[int], gpu: str, near: int | None
) -> None:
    """The trainer goes by the order of ranks and workers, and that of GPUs can be another."""
    trainer = Trainer(list(SHAPES), list(SHAPES), list(SHAPES))
    monkeypatch.setattr(Session, "_gpu", lambda self: gpu)
    session = Session(ToyModel(SHAPES), 0, CPU)
    session.connect(InitInfo("c", 0, neighbours, ["gpu-0"], "full", trainer.shards.to_json()))
    state = session.state()
    assert state["neighbour"] == near
    if near is not None:
        assert state["bytes_by_rank"] == {str(near): sum(tensor.nbytes for tensor in trainer.tensors.values())}


@pytest.mark.parametrize(("offered", "taken"), [([0, 1], 1), ([0], 0), ([], None)])
def test_a_worker_takes_the_bucket_on_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, offered: list[int], taken: int | None
) -> None:
    """Or else that of the rank that it was told."""
    trainer = Trainer(list(SHAPES), list(SHAPES))
    monkeypatch.setattr(Session, "_gpu", lambda self: "GPU-1")
    session = Session(ToyModel(SHAPES), 0, CPU)
    session.connect(InitInfo("c", 0, [0], ["gpu-0"], "full", trainer.shards.to_json()))
    buckets = {rank: create_arena(8, "test") for rank in offered}
    for rank, bucket in buckets.items():
        bucket.tensor.fill_(rank)
    handles = {f"gpu-{rank}": bucket.describe() for rank, bucket in buckets.items()}
    if taken is None:
        with pytest.raises(WeightSyncError, match="no handle for its device gpu-0, only for: "):
            session._shared_bucket(handles)
    else:
        assert session._shared_bucket(handles).tolist()[:8] == [taken] * 8


@pytest.mark.parametrize(
    ("told", "here", "found"),
    [(1, [0, 1], 1), (2, [0, 1], 0), (None, [3, 2], 2), (None, [], None), (1, [], None)],
)
def test_which_rank_is_the_neighbour(told: int | None, here: list[int], found: int | None) -> None:
    assert session._neighbour(told, here) == found


def test_what_a_worker_reads_on_its_own_device_is_local_whatever_its_number() -> None:
    states = [
        {"bytes_by_rank": {"0": 1, "1": 20}, "neighbour": 1, "seconds": {}, "senders": []},
        {"bytes_by_rank": {"0": 300, "1": 4000, "2": 50000}, "neighbour": 0, "seconds": {}, "senders": [2]},
        {"bytes_by_rank": {"2": 600000}, "neighbour": None, "seconds": {}, "senders": [2]},
    ]
    found = engine_stats(SimpleNamespace(states=states, seconds={}))  # pyright: ignore[reportArgumentType]
    assert (found["bytes"], found["local"], found["network"]) == (654321, 320, 650000)


def sizes(trainer: Trainer, rank: int) -> list[int]:
    return [handle["bytes"] for handle in trainer.shards.ranks[rank].arenas]


@pytest.mark.parametrize("gpu", ["GPU-0", "GPU-1", "GPU-2", "GPU-9", None])
def test_links_to_the_gpus_that_are_read_from_and_no_other(woken: list[list[int]], gpu: str | None) -> None:
    names = list(SHAPES)
    trainer = Trainer(names[:2], names[2:3], names[3:])
    worker = trainer.worker(gpu)
    assert woken == []
    worker.make_ready()
    far = [rank for rank in range(3) if gpu is not None and gpu != f"GPU-{rank}"]
    assert woken == [sizes(trainer, rank) for rank in far]
    worker.update(1)
    assert isinstance(worker.model, ToyModel)
    assert worker.model.digests() == loaded(SHAPES, trainer.tensors, 0, 1).digests()


def test_memory_that_may_be_gone_is_not_read(woken: list[list[int]]) -> None:
    """Whoever moves or frees parameters says so with the update, and links are woken before that."""
    names = list(SHAPES)
    trainer = Trainer(names[:2], names[2:])
    worker = trainer.worker("GPU-9")
    worker.make_ready(moved=[1])
    assert woken == [sizes(trainer, 0)]
    worker.release()
    worker.make_ready()
    assert len(woken) == 1
    worker.update(1, trainer.shards.ranks)
    worker.make_ready()
    assert woken[1:] == [sizes(trainer, 0), sizes(trainer, 1)]


def test_after_an_update_has_started_and_before_it_brings_anything(
    woken: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has something else to do between the two, and the links are awake by then."""
    trainer = Trainer(list(SHAPES))
    monkeypatch.setattr(session, "device_uuid", lambda device: "GPU-1")
    monkeypatch.setattr(receiver, "make_copier", lambda program, *_: CpuCopier(program))
    worker = Session(ToyModel(SHAPES), 0, CPU)
    worker.device = torch.device("cuda")  # by name: nothing is put there
    monkeypatch.setattr(receiver, "Staging", lambda parts, where, check, *_: Staging(parts, where, check, CPU))
    worker.connect(InitInfo("first", 0, [0], ["cpu-0"], "full", trainer.shards.to_json()))
    for version in (1, 2):
        trainer.stamps[0].set(version)
        woken.clear()
        worker.start()
        assert woken == []  # not for buckets: they come another way
        worker.make_ready([0])
        assert woken == []
        worker.make_ready([])
        assert woken == [sizes(trainer, 0)]
        worker.receive(UpdateInfo(version))
        worker.finish()
        assert woken == [sizes(trainer, 0)]


def test_little_is_read_however_many_and_large_the_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every update waits until it is enqueued: twenty thousand arenas would be twenty thousand launches."""
    read: list[tuple[int, int]] = []

    def note(self: torch.Tensor) -> torch.Tensor:
        read.append((self.numel(), self.stride(0)))
        return self

    monkeypatch.setattr(torch.Tensor, "any", note)
    memory = torch.empty(256 << 20, dtype=torch.uint8)  # never written, so it takes none
    wake_links([memory[:100], *(memory[: mib << 20] for mib in (3, 1, 256, 2, 64, 4))])
    assert read == [(mib << 4, 64 << 10) for mib in (256, 64, 4, 3)]
    read.clear()
    wake_links([memory[:100]])
    assert [count for count, _ in read] == [1]
