"""Weights that are sent: what is packed is what was wanted, and whatever goes wrong on the way is noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.weight_sync.toy import LoadFormatTensors, ToyModel, in_arena, loaded, random_tensors, whole_map
from vime.errors import WeightSyncError
from vime.weight_sync import copy_cpu
from vime.weight_sync.arena import Stamp, arena_of
from vime.weight_sync.channel import Channel, Meeting
from vime.weight_sync.copy_cpu import source_view, target_view
from vime.weight_sync.program import Copy
from vime.weight_sync.remote import STAGING, Sender, chunks, from_request, to_request
from vime.weight_sync.session import ChannelInfo, InitInfo, Session, UpdateInfo

CPU = torch.device("cpu")
SHAPES: dict[str, tuple[int, ...]] = {
    "embed_tokens.weight": (50, 8),
    **{f"layers.0.{p}_proj.weight": (16, 8) for p in "qkv"},
    "layers.0.o_proj.weight": (8, 16),
    **{f"layers.0.experts.{e}.{p}.weight": (12, 8) for e in range(3) for p in ("gate_proj", "up_proj")},
    **{f"layers.0.experts.{e}.down_proj.weight": (8, 12) for e in range(3)},
}


@st.composite
def some_copies(draw: st.DrawFn) -> list[Copy]:
    """Copies of two dtypes from two ranks, of up to three dimensions, from anywhere in an arena of 4096 bytes."""
    out, end = [], 0
    for _ in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
        strides, span = [], 1
        for size in reversed(shape):
            strides.insert(0, span + draw(st.integers(0, 2)))
            span = strides[0] * size
        offset = draw(st.integers(0, 4096 // dtype.itemsize - span)) * dtype.itemsize
        source = (draw(st.integers(0, 1)), draw(st.integers(0, 1)))
        dense = tuple(torch.empty(shape).stride())
        out.append(Copy(source, offset, dtype, tuple(strides), "p", end, dense, shape, "t"))
        end += torch.Size(shape).numel()
    return out


@settings(max_examples=300, deadline=None)
@given(some_copies(), st.integers(1, 12), st.integers(0, 1))
def test_through_chunks_as_straight(copies: list[Copy], units: int, first: int) -> None:
    """Packing by what was requested and unpacking from the staging arena is the same as copying, element for element,
    and no message is longer than allowed."""
    arenas = {(rank, n): torch.randint(0, 256, (4096,), dtype=torch.uint8) for rank in (0, 1) for n in (0, 1)}
    total = sum(copy.numel for copy in copies)
    straight, staged = torch.full((total,), -1.0), torch.full((total,), -1.0)
    for copy in copies:
        target_view(copy, {"p": straight}).copy_(source_view(copy, arenas))
    found = chunks(copies, 16 * units, first)
    ranks = list(dict.fromkeys(chunk.rank for chunk in found))
    assert ranks == sorted(ranks, key=lambda rank: rank != first)
    for rank in (0, 1):
        mine = [chunk for chunk in found if chunk.rank == rank]
        if not mine:
            continue
        for chunk, request in zip(mine, from_request(to_request(mine), rank), strict=True):
            assert request.num_bytes == chunk.num_bytes <= 16 * units
            buffer = torch.zeros(chunk.num_bytes, dtype=torch.uint8)
            for read in request.reads:
                view = {read.param: buffer.view(getattr(torch, read.param))}
                target_view(read, view).copy_(source_view(read, arenas))
            for write in chunk.writes:
                target_view(write, {"p": staged}).copy_(source_view(write, {(rank, STAGING): buffer}))
    assert torch.equal(straight.view(torch.int32), staged.view(torch.int32))


class Pair:
    """A trainer rank with whole tensors, and a worker that may not open its memory."""

    def __init__(self, check: str = "full", timeout: float = 60.0) -> None:
        self.tensors = in_arena(random_tensors(SHAPES, 0))
        self.model = ToyModel(SHAPES, 0, 1)
        self.session = Session(self.model, 0, CPU)
        shards = whole_map(self.tensors, Stamp(), node="elsewhere")
        self.session.connect(InitInfo("c", 0, [], ["cpu-0"], check, shards.to_json(), most_bytes=512))
        arena = arena_of(next(iter(self.tensors.values())))[0]
        self.arenas = {(0, 0): arena.tensor}
        self.check, self.timeout = check, timeout
        self.meet()

    def meet(self) -> None:
        meeting = self.meeting = Meeting("127.0.0.1", self.timeout)
        info = ChannelInfo(*meeting.address, members={"0": 0}, workers=1, planned=True, timeout=self.timeout)
        opened = in_thread(lambda: self.session.open_channel(info))
        self.channel = Channel(*meeting.address, 0, 2, CPU, self.timeout)
        self.sender = Sender(self.channel, 1, 0, self.check)
        opened()

    def update(self, version: int, sent: int | None = None) -> None:
        sending = in_thread(lambda: self.sender.serve(version if sent is None else sent, self.arenas))
        try:
            self.session.start()
            self.session.receive(UpdateInfo(version))
            self.session.finish()
        finally:
            self.failure = sending()


def in_thread(work: Callable[[], Any]) -> Callable[[], Exception | None]:
    """Start it; the result waits for its end and returns what it raised."""
    failed: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - handed to the test
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> Exception | None:
        thread.join(90)
        assert not thread.is_alive()
        return failed[0] if failed else None

    return wait


@pytest.mark.parametrize("check", ["full", "off"])
def test_updates_through_a_channel_leave_what_the_loader_would(check: str) -> None:
    pair = Pair(check)
    assert pair.session.state()["senders"] == [0]
    for version in (1, 2, 3):
        for name, tensor in random_tensors(SHAPES, version).items():
            pair.tensors[name].copy_(tensor)
        pair.model.poison()
        pair.session._connected()._staging.waited = 1e9
        pair.update(version)
        assert pair.failure is None
        assert pair.model.digests() == loaded(SHAPES, pair.tensors).digests()
        assert pair.session.state()["version"] == version
        seconds = pair.session.state()["seconds"]
        assert 0 < seconds["wait"] < seconds["direct"] + seconds["staged"]
    assert pair.session.state()["bytes_by_rank"] == {"0": sum(tensor.nbytes for tensor in pair.tensors.values())}


def test_load_format_tensors_filled_through_a_channel_do_not_outlive_their_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair()
    alive = LoadFormatTensors(monkeypatch)
    pair.update(1)
    assert [*alive.when_closed, alive()] == [2, 1, 0]


def test_another_version_is_refused_and_a_new_channel_begins_anew() -> None:
    pair = Pair()
    with pytest.raises(WeightSyncError, match="trainer rank 0 sends version 1, expected 2"):
        pair.update(2, sent=1)
    assert isinstance(pair.failure, RuntimeError)  # the worker left, and the rank that was sending heard of it at once
    assert "Timed out" not in str(pair.failure)
    with pytest.raises(WeightSyncError, match="no channel"):
        pair.update(2)
    pair.meet()
    pair.update(2)
    assert pair.model.digests() == loaded(SHAPES, pair.tensors).digests()


def test_a_flipped_bit_on_the_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    send = Channel.begin_send

    def flip_and_send(self: Channel, tensor: torch.Tensor, to: int) -> Any:
        tensor[tensor.numel() // 2] ^= 4
        return send(self, tensor, to)

    monkeypatch.setattr(Channel, "begin_send", flip_and_send)
    with pytest.raises(WeightSyncError, match=r"bytes from trainer rank 0, of .* arrived changed") as error:
        pair.update(1)
    assert error.value.phase == "checksum"
    assert isinstance(pair.failure, RuntimeError)
    assert "Timed out" not in str(pair.failure)


def test_a_rank_that_goes_is_named() -> None:
    pair = Pair()
    going = in_thread(pair.channel.close)
    with pytest.raises(WeightSyncError, match="trainer rank 0 did not send its weights"):
        pair.update(1)
    going()


def test_meetings_listen_where_they_are_told_only() -> None:
    import psutil

    meeting = Meeting("127.0.0.1", 10)
    (listening,) = [c for c in psutil.Process().net_connections() if c.laddr and c.laddr.port == meeting.address[1]][:1]
    assert listening.laddr.ip == "127.0.0.1"


class Slow:
    """One end of a channel that passes a message only when somebody waits for it; and what happens there, in order."""

    device = CPU

    def __init__(self, end: str) -> None:
        self.end, self.happened = end, []
        self.begun: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # memory of messages, and what was in it when they began
        self.sent: list[torch.Tensor] = []
        self.request = b""

    def send_bytes(self, data: bytes, to: int) -> None:
        self.request = data

    def receive_bytes(self, origin: int) -> bytes:
        return self.request

    def begin_send(self, tensor: torch.Tensor, to: int) -> int:
        assert all(tensor.data_ptr() != other.data_ptr() for other, _ in self.begun)
        self.happened.append("begin")
        self.begun.append((tensor, tensor.clone()))
        return len(self.happened)

    def begin_receive(self, tensor: torch.Tensor, origin: int) -> int:
        tensor.fill_(0xAA)  # from now on anything may be there
        return self.begin_send(tensor, origin)

    def finish(self, message: Any) -> None:
        self.happened.append("finish")
        tensor, before = self.begun.pop(0)
        assert torch.equal(tensor, before), "memory that belonged to a message was written to"
        if self.end == "rank":
            self.sent.append(before)
        else:
            tensor.copy_(self.sent.pop(0))

    def close(self) -> None:
        pass


def test_while_a_message_is_on_the_way_the_next_is_packed_and_the_one_before_taken_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And none begins before the one before it has passed, nor is memory touched that belongs to a message."""
    tensors = in_arena(random_tensors(SHAPES, 0))
    model = ToyModel(SHAPES, 0, 1, packed="")  # one stage
    session = Session(model, 0, CPU)
    shards = whole_map(tensors, Stamp(), node="elsewhere")
    session.connect(InitInfo("c", 0, [], ["cpu-0"], "full", shards.to_json(), most_bytes=512))
    made: Any = session._receiver
    rank, worker = Slow("rank"), Slow("worker")
    made.open_channel(worker, {0: 0})
    rank.request = worker.request
    sender = Sender(rank, 1, 0, "full")  # pyright: ignore[reportArgumentType]
    count = len(from_request(worker.request, 0))
    assert count > 5
    run, check, at = copy_cpu.CpuCopier.run, copy_cpu.CpuCopier.check, [rank]

    def note(self: copy_cpu.CpuCopier) -> None:
        at[-1].happened.append("copy")
        run(self)

    def note_check(self: copy_cpu.CpuCopier, mode: str, version: int) -> Any:
        at[-1].happened.append("check")
        return check(self, mode, version)

    monkeypatch.setattr(copy_cpu.CpuCopier, "run", note)
    monkeypatch.setattr(copy_cpu.CpuCopier, "check", note_check)
    sender.serve(1, {(0, 0): arena_of(next(iter(tensors.values())))[0].tensor})
    assert rank.happened == ["copy", "begin"] + ["copy", "finish", "begin"] * (count - 1) + ["finish"]
    worker.sent = rank.sent
    at.append(worker)
    session.start()
    session.receive(UpdateInfo(1))
    fills, middle, last = ["copy", "check"], ["finish", "begin", "copy", "check"], ["finish", "copy", "check"]
    assert worker.happened == [*fills, "begin", *middle * (count - 1), *last]
    assert model.digests() == loaded(SHAPES, tensors, packed="").digests()
