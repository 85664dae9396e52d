"""A rank connects the engines that it leads at once, and says of each what none of its workers takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.backends.megatron_utils.update_weight.toy_engine import Rank, ToyEngine, digests, expected_digests
from vime.backends.megatron_utils.update_weight.engine_update import EngineUpdate
from vime.backends.megatron_utils.update_weight.summary import unused_by_all
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import EngineError, WeightSyncError
from vime.models.layout import ParallelLayout
from vime.types import EngineAddress
from vime.weight_sync.arena import node_name


def test_engines_are_connected_at_once(engines: Callable[..., ToyEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, each with the whole deadline, a leader of many would be late at the ranks' meeting."""
    addresses = [engines(index, None).address for index in range(3)]
    together = threading.Barrier(len(addresses))
    connect = EngineUpdate.connect

    def connect_together(self: EngineUpdate, *args: Any) -> None:
        together.wait(30)
        connect(self, *args)

    monkeypatch.setattr(EngineUpdate, "connect", connect_together)
    me = Rank(0, ParallelLayout(world_size=1))
    me.update.connect_rollout_engines(addresses)
    me.train(1)
    me.update.update_weights(1)
    assert [digests(address) for address in addresses] == [expected_digests(1, 1)] * 3


@pytest.mark.parametrize("unwanted", [False, True])
def test_workers_are_told_whether_they_may_use_copy_engines(engines: Callable[..., ToyEngine], unwanted: bool) -> None:
    address = engines(0, None).address
    me = Rank(0, ParallelLayout(world_size=1), no_copy_engines=unwanted)
    me.update.connect_rollout_engines([address])
    assert me.update._init_info(address, node_name())["copy_engines"] is not unwanted


def test_an_engines_first_failure_stays() -> None:
    """What the ranks notice later, that a bucket is missing for instance, says less."""
    update = EngineUpdate(EngineAddress(3, "http://127.0.0.1:9", 1, None), "connection", 5.0)
    update.fail(EngineError("its worker is out of memory"), "start")
    update.fail(WeightSyncError("update", "the trainer", "1 of its ranks could not fill a bucket"))
    assert update.failure is not None
    cause = "its worker is out of memory; nobody answers at its address any more, its log may say why"
    assert (update.failure["phase"], update.failure["cause"]) == ("start", cause)


def test_a_dead_worker_is_said_while_the_engine_still_calls_itself_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM needs some seconds to end the other processes, and /health answers 200 until then."""
    monkeypatch.setattr(EngineClient, "health", lambda self, timeout: None)
    said = "engine 3 (http://127.0.0.1:9): POST /collective_rpc answered 500: "
    for cause, more in (
        (
            "Call to collective_rpc method failed: Executor failed.",
            "; one of its processes has died, its log says which",
        ),
        ("Call to collective_rpc method failed: out of memory", ""),
    ):
        update = EngineUpdate(EngineAddress(3, "http://127.0.0.1:9", 1, None), "connection", 5.0)
        update.fail(EngineError(said + cause, status=500))
        assert update.failure is not None
        assert update.failure["cause"] == said.removeprefix("engine 3 (http://127.0.0.1:9): ") + cause + more


def test_what_a_worker_leaves_to_another_is_not_unused() -> None:
    """Pipeline and expert parallel engines: each worker takes its part of the checkpoint."""
    states = [{"unused": ["layers.1", "extra", "rotary"]}, {"unused": ["layers.0", "rotary", "extra"]}]
    assert unused_by_all(states) == ["extra", "rotary"]
    assert unused_by_all(states[:1]) == states[0]["unused"]
