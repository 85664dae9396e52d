"""Waiting for several actors names the one to blame, and does not wait longer than said. Real Ray processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import ray

from vime.cluster.calls import gather
from vime.errors import EngineError, TrainerError, WeightSyncError


class Rank:
    def __init__(self) -> None:
        self._peer_died = threading.Event()

    def pid(self) -> int:
        return os.getpid()

    def work(self) -> str:
        return "done"

    def fail(self, kind: str) -> None:
        if kind == "on purpose":
            raise WeightSyncError("copy", "engine 1", "a flipped bit")
        raise ValueError("a bug")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self) -> None:
        threading.Event().wait()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def ranks(cluster: None) -> Iterator[list]:
    actors = [ray.remote(num_cpus=0.5)(Rank).remote() for _ in range(3)]
    ray.get([actor.pid.remote() for actor in actors])
    yield actors
    for actor in actors:
        ray.kill(actor)  # type: ignore[arg-type]


def test_results_keep_their_labels(ranks: list) -> None:
    calls = {f"rank {number}": rank.work.remote() for number, rank in enumerate(ranks)}
    assert list(gather(calls, "work", 30, TrainerError).items()) == [(f"rank {n}", "done") for n in range(3)]


def test_a_death_is_blamed_before_the_errors_it_causes(ranks: list) -> None:
    # rank 0's own error arrives first, as when a collective notices that its peer is gone
    calls = {"rank 0": ranks[0].fail.remote("bug"), "rank 1": ranks[1].hang.remote(), "rank 2": ranks[2].die.remote()}
    with pytest.raises(TrainerError, match="rank 2 has died during: training"):
        gather(calls, "training", 30, TrainerError)


def test_an_error_on_purpose_arrives_as_it_was_raised(ranks: list) -> None:
    calls = {"rank 0": ranks[0].fail.remote("bug"), "rank 1": ranks[1].fail.remote("on purpose")}
    with pytest.raises(WeightSyncError) as caught:
        gather(calls, "sync", 30, TrainerError)
    assert (caught.value.phase, caught.value.where, caught.value.cause) == ("copy", "engine 1", "a flipped bit")


def test_a_bug_names_rank_and_type(ranks: list) -> None:
    with pytest.raises(TrainerError, match="rank 0 raised during: training: ValueError: a bug"):
        gather({"rank 0": ranks[0].fail.remote("bug")}, "training", 30, TrainerError)


def test_a_missed_deadline_names_who_is_late(ranks: list) -> None:
    start = time.monotonic()
    with pytest.raises(EngineError, match="starting: no answer from engine 1 within 1 s"):
        gather({"engine 0": ranks[0].work.remote(), "engine 1": ranks[1].hang.remote()}, "starting", 1, EngineError)
    assert time.monotonic() - start < 20
