"""When ranks add up buckets by NCCL, and that nobody waits for it without end. The sum itself: every proof on GPUs."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vime.backends.megatron_utils.update_weight.bucket_sum import BucketSum
from vime.backends.megatron_utils.update_weight.bucketed import BucketStream
from vime.errors import WeightSyncError
from vime.weight_sync.shard_map import RankInfo, TensorInfo


class Meetings:
    """Stands in for the exchange of all ranks."""

    def __init__(self, timeout: float = 0.2) -> None:
        self.ranks, self.timeout, self.events = [0, 1], timeout, []
        self.died, self.given_up = "", ""

    def gather(self, value: Any, phase: str) -> list[Any]:
        self.events.append("gather")
        return [value]

    def dead(self) -> str:
        return self.died

    def give_up(self, cause: str) -> None:
        self.given_up = cause

    def sum_in_place(self, tensor: torch.Tensor, phase: str) -> None:
        self.events.append("gloo")


class Group(dist.ProcessGroup):
    def __init__(self, events: list[str]) -> None:
        super().__init__(0, 2)  # pyright: ignore[reportCallIssue]
        self.events = events

    def abort(self) -> None:
        self.events.append("abort")


def ranks(*devices: str | None) -> list[RankInfo]:
    """On these GPUs; None: without parameters."""
    arenas = [[{"kind": "cuda_ipc", "device": device}] if device else [] for device in devices]
    return [RankInfo(number, "node", f"rank {number}", {}, found) for number, found in enumerate(arenas)]


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    state: dict[str, Any] = {"done": True, "meetings": Meetings()}
    events = state["meetings"].events

    class Event:
        def record(self) -> None:
            pass

        def query(self) -> bool:
            return state["done"]

    def form(ranks: list[int], backend: str, **_: Any) -> Group:
        assert (ranks, backend) == ([0, 1], "nccl")
        events.append("form")
        if state.get("forming") == "fails":
            raise RuntimeError("a socket was closed")
        if state.get("forming") == "stumbles":
            raise ValueError("expected a cuda device")
        if state.get("forming") == "hangs":
            state["end"].wait()
        return Group(events)

    def all_reduce(tensor: torch.Tensor, group: Any) -> None:
        if "error" in state:
            raise RuntimeError(state["error"])
        events.append("nccl" if tensor.numel() > 1 else "connect")

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **how: zeros(*size, **how))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(dist, "new_group", form)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: events.append("destroy"))
    return state


def test_ranks_with_gpus_of_their_own_meet_and_then_add_by_nccl(nccl: dict[str, Any]) -> None:
    adding = BucketSum(nccl["meetings"], ranks("GPU-a", "GPU-b"))
    for _ in range(2):
        adding.add(torch.zeros(4, dtype=torch.int32))
    adding.close()
    assert nccl["meetings"].events == ["gather", "form", "connect", "nccl", "gather", "nccl", "abort", "destroy"]


@pytest.mark.parametrize("devices", [("GPU-a", "GPU-a"), ("GPU-a", None), (None, None), ("GPU-a",)])
def test_ranks_that_share_a_gpu_or_have_none_add_by_gloo(nccl: dict[str, Any], devices: tuple[str | None, ...]) -> None:
    BucketSum(nccl["meetings"], ranks(*devices)).add(torch.zeros(4, dtype=torch.int32))
    assert nccl["meetings"].events == ["gloo"]


def test_a_sum_that_does_not_end_is_given_up_at_the_deadline(nccl: dict[str, Any]) -> None:
    nccl["done"] = False
    with pytest.raises(WeightSyncError, match=r"was not added up within 0\.2 s") as caught:
        BucketSum(nccl["meetings"], ranks("GPU-a", "GPU-b")).add(torch.zeros(4, dtype=torch.int32))
    assert caught.value.phase == "update"
    assert nccl["meetings"].events == ["gather", "form", "connect", "nccl", "abort", "destroy"]
    assert "was not added up" in nccl["meetings"].given_up  # or the others' next meeting would be with this sum


def test_a_rank_that_dies_in_a_sum_is_named_before_the_deadline(nccl: dict[str, Any]) -> None:
    nccl["done"], nccl["meetings"].timeout, nccl["meetings"].died = False, 60.0, "trainer rank 1 (pid 7, dead)"
    with pytest.raises(WeightSyncError, match="died while a bucket was added up") as caught:
        BucketSum(nccl["meetings"], ranks("GPU-a", "GPU-b")).add(torch.zeros(4, dtype=torch.int32))
    assert caught.value.where == "trainer rank 1 (pid 7, dead)"


def test_nccls_own_error_is_the_updates_error(nccl: dict[str, Any]) -> None:
    adding = BucketSum(nccl["meetings"], ranks("GPU-a", "GPU-b"))
    adding.add(torch.zeros(4, dtype=torch.int32))
    nccl["error"] = "remote process exited"
    with pytest.raises(WeightSyncError, match="cannot add up a bucket: remote process exited"):
        adding.add(torch.zeros(4, dtype=torch.int32))
    assert nccl["meetings"].events[-3:] == ["gather", "abort", "destroy"]
    assert "remote process exited" in nccl["meetings"].given_up


@pytest.mark.parametrize(
    ("forming", "died", "words"),
    [
        ("fails", "", "a socket was closed"),
        ("stumbles", "", "ValueError: expected a cuda device"),
        ("hangs", "", "was not added up within"),
        ("hangs", "trainer rank 1", "died"),
    ],
)
def test_a_communicator_that_does_not_come_about(nccl: dict[str, Any], forming: str, died: str, words: str) -> None:
    nccl |= {"forming": forming, "end": threading.Event()}
    nccl["meetings"].died, nccl["meetings"].timeout = died, 60.0 if died else 0.2
    with pytest.raises(WeightSyncError, match=words):
        BucketSum(nccl["meetings"], ranks("GPU-a", "GPU-b")).add(torch.zeros(4, dtype=torch.int32))
    assert words in nccl["meetings"].given_up
    nccl["end"].set()


def test_a_rank_that_contributes_nothing_adds_up_where_its_parameters_are() -> None:
    info = {"w": TensorInfo((4,), "float32")}
    total = BucketSum(Meetings(), ranks(None))  # pyright: ignore[reportArgumentType]
    stream = BucketStream(info, [], 1 << 10, "node/cuda/1", torch.device("meta"), total, None, False)
    assert stream._scratch.device.type == "meta"  # stands in for a GPU: NCCL adds up nothing that is elsewhere
    stream.close()
