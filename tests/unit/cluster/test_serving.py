"""Serving keeps to S11: an engine that takes another's place has the weights of the current version before anybody gets
its address. Real updates of toy engines in processes of their own; only Ray is not there."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.unit.backends.megatron_utils.update_weight.toy_engine import (
    SPEC,
    Rank,
    ToyEngine,
    calls,
    digests,
    expected_digests,
    fail_at,
    make_config,
)
from vime.backends.megatron_utils.update_weight import weight_update_class
from vime.backends.vllm_utils.protocol import listens
from vime.cluster.serving import Serving
from vime.errors import EngineError, WeightSyncError
from vime.models.layout import ParallelLayout
from vime.types import EngineAddress, Slot


class Trainer:
    """One rank, in this process, as a TrainerGroup is called."""

    def __init__(self, transport: str = "planned") -> None:
        self.rank = Rank(0, ParallelLayout(world_size=1))
        if transport != "planned":
            config = make_config(update_weight_transport=transport)
            update = weight_update_class(transport)
            self.rank.update = update(config, SPEC, self.rank.layout, 0, self.rank.params, "cpu")
        self.connect = self.rank.update.connect_rollout_engines
        self.update_weights = self.rank.update.update_weights


class Engines:
    """Toy engines, as an EngineGroup is called. As there, a death shows late: at the second look, unless it is waited
    for."""

    def __init__(self) -> None:
        self.running = [ToyEngine(0, Slot(0, 1)), ToyEngine(1, None)]
        self.ended: list[ToyEngine] = []
        self.replaced: list[int] = []
        self.restarts = 3
        self.suspected: list[int] = []
        self._looks: list[int] = []

    @property
    def addresses(self) -> list[EngineAddress]:
        return [engine.address for engine in self.running]

    def listens(self, index: int) -> bool:
        return listens(self.running[index].address.url)

    def dead(self, suspects: Sequence[int] = ()) -> dict[int, str]:
        self.suspected += suspects
        for index in suspects:
            self.running[index].process.join(2)
        ended = [index for index, engine in enumerate(self.running) if not engine.process.is_alive()]
        before, self._looks = self._looks, ended
        return {index: "killed" for index in ended if index in before or index in suspects}

    def replace(self, index: int, cause: str) -> None:
        if self.restarts <= len(self.replaced):
            raise EngineError(f"engine {index} died ({cause}) and the restarts have been used up")
        self.replaced.append(index)
        self.ended.append(self.running[index])
        self.running[index] = ToyEngine(index, (Slot(0, 1), None)[index])

    def stop(self) -> None:
        for engine in self.running + self.ended:
            engine.stop()


@pytest.fixture
def engines() -> Iterator[Engines]:
    group = Engines()
    yield group
    group.stop()


def kill(engines: Engines, index: int) -> None:
    """End an engine; somebody has noticed."""
    engines.running[index].stop()
    engines.dead()


def serving(engines: Engines, transport: str = "planned") -> tuple[Serving, Trainer]:
    trainer = Trainer(transport)
    return Serving(make_config(), "cpu", trainer, engines), trainer  # type: ignore[arg-type]


def judge_recovered(engines: Engines) -> None:
    """Whoever is given the address of the new engine 1 finds the weights of version 5 there."""
    served, trainer = serving(engines)
    trainer.rank.train(5)
    served.start(5)
    kill(engines, 1)
    address = served.recover(1)
    assert address == engines.addresses[1]
    assert engines.replaced == [1]
    assert digests(address) == expected_digests(5, 1)


def test_s11_an_engine_that_died_while_answering_comes_back_with_the_weights(engines: Engines) -> None:
    judge_recovered(engines)


def test_engines_that_die_together_come_back_together(engines: Engines) -> None:
    """The trainer connects all engines or none: to replace one of them alone is to fail."""
    served, trainer = serving(engines)
    trainer.rank.train(5)
    served.start(5)
    kill(engines, 0)
    kill(engines, 1)
    assert served.recover(1) == engines.addresses[1]
    assert served.recover(0) == engines.addresses[0]  # it is asked for as well, and has been seen to
    assert sorted(engines.replaced) == [0, 1]
    assert [digests(address) for address in engines.addresses] == [expected_digests(5, 1)] * 2


@pytest.mark.parametrize("call", ["/init_weight_transfer_engine", "vime_update_weights"])
def test_an_engine_that_dies_while_another_is_replaced_is_replaced_as_well(engines: Engines, call: str) -> None:
    served, trainer = serving(engines)
    trainer.rank.train(5)
    served.start(5)
    kill(engines, 1)
    replace = engines.replace

    def replace_by_one_that_dies(index: int, cause: str) -> None:
        replace(index, cause)
        if len(engines.replaced) == 1:
            fail_at(engines.addresses[index], call, "die")

    engines.replace = replace_by_one_that_dies
    assert served.recover(1) == engines.addresses[1]
    assert engines.replaced == [1, 1]
    assert digests(engines.addresses[1]) == expected_digests(5, 1)


@pytest.mark.parametrize("transport", ["planned", "distributed"])
def test_a_new_engine_inherits_nothing_when_it_is_connected_again(engines: Engines, transport: str) -> None:
    """Both have died. The new engine 0 is connected, the new engine 1 dies in that; then all are connected again, and
    the first one knows the trainer already. It has no channel yet, and nothing of it is proven."""
    served, trainer = serving(engines, transport)
    trainer.rank.train(5)
    served.start(5)
    kill(engines, 0)
    kill(engines, 1)
    replace = engines.replace

    def replace_by_one_that_dies(index: int, cause: str) -> None:
        replace(index, cause)
        if engines.replaced == [0, 1]:
            fail_at(engines.addresses[1], "/init_weight_transfer_engine", "die")

    engines.replace = replace_by_one_that_dies
    served.recover(0)
    assert engines.replaced == [0, 1, 1]
    for address in engines.addresses:
        assert "vime_poison_weights" in calls(address)
        assert digests(address) == expected_digests(5, 1)


def test_nothing_is_done_while_a_replacement_that_nobody_waits_for_goes_on(engines: Engines) -> None:
    """A rollout that ends does not end the thread that it had sent to replace an engine."""
    served, trainer = serving(engines)
    served.start(0)
    kill(engines, 1)
    replace, begun, go_on = engines.replace, threading.Event(), threading.Event()

    def replace_slowly(index: int, cause: str) -> None:
        begun.set()
        assert go_on.wait(30)
        replace(index, cause)

    engines.replace = replace_slowly
    recovering = threading.Thread(target=served.recover, args=(1,))
    recovering.start()
    assert begun.wait(30)
    trainer.rank.train(1)
    updating = threading.Thread(target=served.to_engines, args=(1,))
    updating.start()
    go_on.set()
    recovering.join(60)
    updating.join(60)
    assert engines.replaced == [1]
    assert served.version == 1
    assert [digests(address) for address in engines.addresses] == [expected_digests(1, 1)] * 2


def test_s11_nobody_is_given_the_address_of_an_engine_that_is_still_being_replaced(engines: Engines) -> None:
    """The round whose request found the engine dead is over, the next one asks which engines there are."""
    served, trainer = serving(engines)
    trainer.rank.train(5)
    served.start(5)
    kill(engines, 1)
    update, begun, go_on, order = trainer.update_weights, threading.Event(), threading.Event(), []

    def update_slowly(version: int, only: list[int] | None = None) -> dict[str, float]:
        begun.set()  # the new engine runs, and has the weights it started with
        assert go_on.wait(60)
        measured = update(version, only)
        order.append("synced")
        return measured

    trainer.update_weights = update_slowly
    recovering = threading.Thread(target=served.recover, args=(1,))
    recovering.start()
    assert begun.wait(60)

    def next_round() -> None:
        order.append(served.ready())

    asking = threading.Thread(target=next_round)
    asking.start()
    asking.join(0.5)  # with another rule it has the addresses by then
    go_on.set()
    recovering.join(60)
    asking.join(60)
    assert order == ["synced", engines.addresses]
    assert digests(engines.addresses[1]) == expected_digests(5, 1)


def test_an_engine_that_has_closed_its_port_is_waited_for_and_replaced(engines: Engines) -> None:
    """A server that was told to end does so first; its death shows seconds later, when requests have given up."""
    served, trainer = serving(engines)
    trainer.rank.train(5)
    served.start(5)
    engines.running[1].stop()  # nobody has noticed: at the first look without suspicion it still counts as alive
    assert served.recover(1) == engines.addresses[1]
    assert engines.replaced == [1]
    assert engines.suspected == [1]
    assert digests(engines.addresses[1]) == expected_digests(5, 1)


def test_an_engine_that_listens_is_not_waited_for(engines: Engines) -> None:
    served, _ = serving(engines)
    served.start(0)
    before = engines.addresses
    assert served.recover(1) == before[1]
    assert engines.suspected == engines.replaced == []


def test_a_replacement_that_failed_unseen_is_told_to_whoever_needs_the_engines_next(engines: Engines) -> None:
    """Else they would go on with fewer engines, or with one that has other weights."""
    served, _ = serving(engines)
    served.start(0)
    kill(engines, 1)
    replace = engines.replace

    def replace_by_one_that_refuses(index: int, cause: str) -> None:
        replace(index, cause)
        fail_at(engines.addresses[index], "vime_update_weights", "no")

    engines.replace = replace_by_one_that_refuses
    with pytest.raises(WeightSyncError) as caught:
        served.recover(1)
    for use in (served.ready, lambda: served.recover(0), lambda: served.to_engines(1)):
        with pytest.raises(WeightSyncError) as again:
            use()
        assert again.value is caught.value


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_an_engine_that_dies_of_being_woken_is_replaced(engines: Engines, tag: str) -> None:
    served, trainer = serving(engines)
    served.start(0)
    served._engines_sleep = True
    woken: list[str] = []

    def wake(now: str) -> None:
        woken.append(now)
        if now == tag and not engines.replaced:
            engines.running[1].stop()
            raise EngineError("engine 1: nobody answers", unreachable=True)

    engines.wake = wake  # type: ignore[attr-defined]
    trainer.rank.train(1)
    served.to_engines(1)
    assert engines.replaced == [1]
    assert woken[-2:] == ["weights", "kv_cache"]
    assert [digests(address) for address in engines.addresses] == [expected_digests(1, 1)] * 2


def test_an_engine_that_lives_and_does_not_wake_ends_the_run(engines: Engines) -> None:
    served, _ = serving(engines)
    served.start(0)
    served._engines_sleep = True

    def wake(tag: str) -> None:
        raise EngineError("engine 1 does not wake")

    engines.wake = wake  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="engine 1 does not wake"):
        served.to_engines(1)
    assert engines.replaced == []


@pytest.mark.parametrize("forgotten", ["connect", "update_weights"])
def test_s11_wrong_rules_are_seen(engines: Engines, monkeypatch: pytest.MonkeyPatch, forgotten: str) -> None:
    """A replaced engine that is not connected, or not synced, before its address is given away."""
    recover = Serving.recover

    def recover_in_part(self: Any, index: int) -> EngineAddress:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._trainer, forgotten, lambda *_: {})
            return recover(self, index)

    monkeypatch.setattr(Serving, "recover", recover_in_part)
    with pytest.raises((AssertionError, WeightSyncError)):
        judge_recovered(engines)


def test_an_engine_that_lives_is_not_replaced(engines: Engines) -> None:
    served, _ = serving(engines)
    served.start(0)
    before = engines.addresses
    assert served.recover(0) == before[0]
    assert engines.addresses == before


def test_an_engine_that_dies_in_an_update_is_replaced_and_all_get_the_weights(engines: Engines) -> None:
    served, trainer = serving(engines)
    served.start(0)
    fail_at(engines.addresses[1], "vime_update_weights", "die")
    trainer.rank.train(1)
    served.to_engines(1)
    assert engines.replaced == [1]
    assert served.version == 1
    assert [digests(address) for address in engines.addresses] == [expected_digests(1, 1)] * 2


def test_an_update_that_fails_though_every_engine_lives_ends_the_run(engines: Engines) -> None:
    served, _ = serving(engines)
    served.start(0)
    fail_at(engines.addresses[1], "vime_update_weights", "worker")
    with pytest.raises(WeightSyncError, match="out of memory") as caught:
        served.to_engines(1)
    assert caught.value.engines == (1,)
    assert served.version == 0


def test_restarts_are_limited(engines: Engines) -> None:
    served, _ = serving(engines)
    engines.restarts = 0
    served.start(0)
    kill(engines, 1)
    with pytest.raises(EngineError, match="used up"):
        served.recover(1)
