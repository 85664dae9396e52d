"""Links to other GPUs are woken before they are needed: which ones, when, and by how little."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.weight_sync.toy import ToyModel, Whole, in_arena, loaded, random_tensors
from vime.weight_sync import receiver, session
from vime.weight_sync.arena import Stamp, node_name
from vime.weight_sync.arena_cuda import wake_links
from vime.weight_sync.boxes import contiguous_strides, whole
from vime.weight_sync.receiver import Place, Receiver
from vime.weight_sync.session import InitInfo, Session, UpdateInfo
from vime.weight_sync.shard_map import ShardMap, describe_rank, merge, place

SHAPES: dict[str, tuple[int, ...]] = {
    "embed_tokens.weight": (48, 8),
    "layers.0.q_proj.weight": (8, 16),
    "layers.0.norm.weight": (8,),
    "norm.weight": (8,),
}


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
                handle["device"] = f"GPU-{rank}"
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


def test_memory_that_is_not_mapped_any_more_wakes_nothing(woken: list[list[int]]) -> None:
    trainer = Trainer(list(SHAPES))
    worker = trainer.worker("GPU-1")
    worker.release()
    worker.make_ready()
    assert woken == [[]]
    worker.update(1, trainer.shards.ranks)
    worker.make_ready()
    assert woken[1:] == [sizes(trainer, 0)]


def test_when_an_update_starts_and_before_anything_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has something else to do between the two, and the links are awake by then."""
    done: list[str] = []
    update = Receiver.update

    def copy(self: Receiver, *args: Any) -> None:
        done.append("copy")
        update(self, *args)

    def wake(arenas: list[torch.Tensor]) -> None:
        done.append(f"wake {len(arenas)}")

    monkeypatch.setattr(Receiver, "update", copy)
    monkeypatch.setattr(receiver, "wake_links", wake)
    trainer = Trainer(list(SHAPES))

    class OnGpuOne(Place):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args[:5], gpu="GPU-1")

    monkeypatch.setattr(session, "Place", OnGpuOne)
    worker = Session(ToyModel(SHAPES), 0, torch.device("cpu"))
    worker.connect(InitInfo("first", 0, [0], ["cpu-0"], "full", trainer.shards.to_json()))
    for version in (1, 2):
        trainer.stamps[0].set(version)
        worker.start()
        worker.receive(UpdateInfo(version))
        worker.finish()
    assert done == ["wake 4", "copy", "wake 4", "copy"]


def test_little_is_read_however_many_and_large_the_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine waits for it before its first update: twenty thousand arenas are twenty thousand launches."""
    read: list[tuple[int, int]] = []

    def note(self: torch.Tensor) -> torch.Tensor:
        read.append((self.numel(), self.stride(0)))
        return self

    monkeypatch.setattr(torch.Tensor, "any", note)
    mib = torch.empty(256 << 20, dtype=torch.uint8)  # never written, so it takes no memory
    wake_links([mib[:100], *(mib[: number << 20] for number in (3, 1, 256, 2, 64, 4))])
    assert read == [(number << 4, 64 << 10) for number in (256, 64, 4, 3)]
    read.clear()
    wake_links([mib[:100]])
    assert [count for count, _ in read] == [1]
    wake_links([])
