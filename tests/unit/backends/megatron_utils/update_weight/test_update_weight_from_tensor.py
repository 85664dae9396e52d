"""UpdateWeightFromTensor, row by row of the design's S1 to S11: real ranks, real Gloo groups, real shared memory, toy
engines that answer vLLM's routes (toy_engine.py). For each rule the wrong one is put in and the judgement turns red.

Processes are shared: all scenarios of one world size run one after the other in the same ranks, once per module.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.unit.backends.megatron_utils.update_weight import scenarios
from tests.unit.backends.megatron_utils.update_weight.scenarios import by_label, run_all, sync
from tests.unit.backends.megatron_utils.update_weight.toy_engine import (
    SPEC,
    Rank,
    ToyEngine,
    expected_digests,
    make_config,
    processes,
)
from vime.models.layout import ParallelLayout
from vime.types import Slot

TP4_CP2_EP8 = ParallelLayout(world_size=8, tp=4, cp=2, ep=8, etp=1)
TP2_PP2 = ParallelLayout(world_size=4, tp=2, pp=2, ep=1, etp=2)
DP2 = ParallelLayout(world_size=2, ep=2)

PLANNED = [
    *("/pause", "vime_start_weight_update", "vime_update_weights"),
    *("/finish_weight_update", "vime_weight_state", "/reset_prefix_cache", "/resume"),
]
IN_BUCKETS = {  # where one rank's differ from the other's, though they agree on the checkpoint
    "dtypes": "['model.embed_tokens.weight', 'int32', [50, 16], 0, 0] where that one has ['model.embed_tokens.",
    "the last dtype": "['lm_head.weight', 'int32', ",
    "one less": "nothing where that one has ['lm_head.weight', 'float32', ",
    "another capacity": "3584, 0] where that one has ['model.layers.0.self_attn.q_proj.weight', ",
}
BUCKETED: dict[str, Any] = {"update_weight_transport": "bucketed", "check_weight_update": "off"}
BUCKETED |= {"update_weight_buffer_size": 4096}


@pytest.fixture(scope="module")
def eight(engines: Callable[..., ToyEngine]) -> dict[str, list[dict[str, Any]]]:
    """Label -> every rank's result, with one 8-GPU engine: a topology that once failed."""
    engine = engines(0, Slot(0, 8)).address
    common = {"layout": TP4_CP2_EP8, "addresses": [engine]}
    wrong = ("leader_is_tp_rank_0", "gather_over_tp_group", "barrier_in_the_loop", "buffer_filled_too_early")
    steps = [
        ("planned", sync, common),
        ("bucketed", sync, common | BUCKETED | {"slow": True}),
        *[(rule, sync, common | BUCKETED | {"mutant": rule, "slow": rule == wrong[-1]}) for rule in wrong],
    ]
    return by_label(run_ranks(8, run_all, steps, timeout=280, context=processes()))


@pytest.fixture(scope="module")
def four(engines: Callable[..., ToyEngine]) -> dict[str, list[dict[str, Any]]]:
    """The same with four ranks and several engines."""
    singles = [engines(index, Slot(index, index + 1)).address for index in range(4)]
    pair, remote = engines(5, Slot(2, 4)).address, engines(6, None, 2).address
    common = {"layout": TP2_PP2, "addresses": singles}
    mixed = {"layout": TP2_PP2, "addresses": [singles[0], pair, remote]}
    wrong = ("serves_before_its_sync", "is_only_connected")
    steps = [
        ("planned", sync, common),
        ("copies_are_shared", sync, common | {"mutant": "copies_are_shared", "check_weight_update": "off"}),
        ("group_for_every_slot", sync, common | {"mutant": "group_for_every_slot"}),
        ("mixed", sync, mixed),
        ("mixed bucketed", sync, mixed | BUCKETED),
        ("without_a_slot", sync, mixed | {"mutant": "engines_without_a_slot_are_left_out"}),
        *[
            (rule or "replaced", scenarios.replaced_engine, common | {"mutant": rule, "replacement": engine.address})
            for rule in (None, *wrong)
            for engine in [engines(3, Slot(3, 4))]
        ],
        (
            "dtypes",
            scenarios.disagreeing_rank,
            {"what": "dtypes", "who": 3}
            | BUCKETED
            | {"layout": TP2_PP2, "addresses": [engines(7, Slot(0, 2)).address, pair]},
        ),
        # The last: in it ranks may lose each other.
        ("groups_by_members_only", scenarios.connect_only, mixed | {"mutant": "groups_by_members_only"}),
    ]
    return by_label(run_ranks(4, run_all, steps, timeout=280, context=processes()))


@pytest.fixture(scope="module")
def two(engines: Callable[..., ToyEngine]) -> dict[str, list[dict[str, Any]]]:
    """TP1, two ranks, one 2-GPU engine: another topology that once failed, since rank 1 also is TP rank 0."""
    common = {"layout": DP2, "addresses": [engines(0, Slot(0, 2)).address]}
    differ = scenarios.disagreeing_rank
    steps = [
        ("planned", sync, common),
        ("bucketed", sync, common | BUCKETED),
        ("leader_is_tp_rank_0", sync, common | BUCKETED | {"mutant": "leader_is_tp_rank_0"}),
        ("names", differ, common | {"what": "names"}),
        *[(what, differ, common | {"what": what, "update_weight_buffer_size": 4096}) for what in IN_BUCKETS],
        *[
            (f"{what} unseen", differ, common | {"what": what, "mutant": "metadata_is_not_compared"})
            for what in ("names", "dtypes")
        ],
    ]
    return by_label(run_ranks(2, run_all, steps, timeout=280, context=processes()))


# ---------------------------------------------------------------- judgements; each is also seen to turn red


def judge_synced(ranks: list[dict[str, Any]], workers: list[int]) -> None:
    """Both syncs succeeded, and left in every worker what loading the second checkpoint would."""
    for rank in ranks:
        assert "error" not in rank["first"], rank["first"]
        assert "error" not in rank["second"], rank["second"]
    for found, count in zip(ranks[0]["digests"], workers, strict=True):
        assert found == expected_digests(2, count)


def judge_arenas(ranks: list[dict[str, Any]]) -> None:
    """S1: every engine was told to read the memory that the ranks' parameters themselves lie in, and no other."""
    for engine in ranks[0]["calls"]:
        assert engine["arenas"]
        for rank, told in engine["arenas"].items():
            assert {tuple(arena) for arena in told} == set(ranks[int(rank)]["arenas"])


def judge_one_leader(ranks: list[dict[str, Any]]) -> None:
    """S2: each engine was started and finished once."""
    for engine in ranks[0]["calls"]:
        for call in ("/pause", "vime_start_weight_update", "/finish_weight_update", "/resume"):
            assert engine["calls"].count(call) == 1, engine["calls"]


def judge_groups(ranks: list[dict[str, Any]], slots: list[list[int]]) -> None:
    """S3, S5: every rank took part in creating the same groups, the world's and then one per slot of several ranks."""
    world = list(range(len(ranks)))
    for rank in ranks:
        assert [event[1] for event in rank["connect_events"] if event[0] == "group"] == [world, *slots]


def judge_handles(ranks: list[dict[str, Any]], devices: int) -> None:
    """S4: every bucket's payload has a handle for every device of the engine."""
    (engine,) = ranks[0]["calls"]
    assert len(engine["devices"]) > 3
    for found in engine["devices"]:
        assert len(set(found)) == devices


def judge_meetings(ranks: list[dict[str, Any]]) -> None:
    """S6 and the design: all ranks meet twice; between, over the buckets, they only add up."""
    for rank in ranks:
        meetings = [phase for kind, phase, _ in rank["events"] if kind == "gather"]
        assert meetings == ["ready", "done"]
        kinds = [event[0] + " " + event[1] for event in rank["events"]]
        assert kinds[0] == "gather ready"
        assert kinds[-1] == "gather done"


def judge_sleep(engines: list[Any]) -> None:
    """S7."""
    assert [command.argv.count("--enable-sleep-mode") for command in engines] == [1] * 4


def judge_served_after_sync(calls: list[str]) -> None:
    """S11: the replaced engine was connected and got all weights, and then, once, was told to generate."""
    order = [
        *("/init_weight_transfer_engine", "vime_start_weight_update", "vime_update_weights", "/finish_weight_update")
    ]
    assert [call for call in calls if call in order or call == "/resume"][-4:] == [*order[1:], "/resume"], calls
    assert order[0] in calls
    assert calls.count("/resume") == 1


@contextmanager
def environment_untouched() -> Iterator[None]:
    """S8: fails at the statement that writes os.environ, and afterwards if a library below Python has done so."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("os.environ was written")

    before = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("__setitem__", "__delitem__", "update", "setdefault", "pop", "__ior__"):
            patch.setattr(type(os.environ), name, refuse)
        for name in ("putenv", "unsetenv"):
            patch.setattr(os, name, refuse)
        yield
    assert dict(os.environ) == before


def red(judgement: Callable[..., None], *args: Any) -> None:
    with pytest.raises((AssertionError, KeyError)):
        judgement(*args)


# ---------------------------------------------------------------- S1 to S6


def test_s1_one_class_with_two_methods() -> None:
    from vime.backends.megatron_utils.update_weight.update_weight_from_tensor import UpdateWeightFromTensor

    assert list(inspect.signature(UpdateWeightFromTensor.connect_rollout_engines).parameters) == ["self", "addresses"]
    assert list(inspect.signature(UpdateWeightFromTensor.update_weights).parameters) == ["self", "version", "only"]


def test_s1_engines_read_the_parameters_themselves(eight: dict[str, Any], four: dict[str, Any]) -> None:
    judge_arenas(eight["planned"])
    judge_arenas(four["planned"])
    red(judge_arenas, four["copies_are_shared"])
    red(judge_synced, four["copies_are_shared"], [1, 1, 1, 1])  # which also are old by the second sync


@pytest.mark.parametrize("path", ["planned", "bucketed"])
def test_s1_the_topologies_that_once_failed(eight: dict[str, Any], two: dict[str, Any], path: str) -> None:
    judge_synced(eight[path], [8])
    judge_synced(two[path], [2])


def test_s1_an_update_is_one_sequence_of_calls(eight: dict[str, Any], four: dict[str, Any]) -> None:
    for ranks in (eight["planned"], four["planned"]):
        for engine in ranks[0]["calls"]:
            assert engine["calls"] == PLANNED


def test_s2_one_leader_starts_and_finishes_once(eight: dict[str, Any], two: dict[str, Any]) -> None:
    for ranks in (eight["planned"], eight["bucketed"], two["planned"], two["bucketed"]):
        judge_one_leader(ranks)
    red(judge_one_leader, eight["leader_is_tp_rank_0"])
    red(judge_one_leader, two["leader_is_tp_rank_0"])


def test_s3_a_group_per_slot_of_several_ranks_made_by_everybody(eight: dict[str, Any], four: dict[str, Any]) -> None:
    judge_groups(eight["bucketed"], [list(range(8))])
    judge_groups(four["mixed"], [[2, 3]])
    red(judge_groups, eight["gather_over_tp_group"], [list(range(8))])
    red(judge_groups, four["groups_by_members_only"], [[2, 3]])


def test_s4_a_handle_for_every_gpu_of_the_engine(eight: dict[str, Any], two: dict[str, Any]) -> None:
    judge_handles(eight["bucketed"], 8)
    judge_handles(two["bucketed"], 2)
    red(judge_handles, eight["gather_over_tp_group"], 8)
    for rank in eight["gather_over_tp_group"]:
        assert "no handle for its device" in rank["first"]["error"]["cause"]


def test_s5_a_slot_of_one_rank_has_no_group_and_no_gather(four: dict[str, Any]) -> None:
    judge_groups(four["planned"], [])
    judge_synced(four["planned"], [1, 1, 1, 1])
    red(judge_groups, four["group_for_every_slot"], [])
    assert all(event[0] == "gather" for rank in four["planned"] for event in rank["events"])


def test_s6_no_barrier_in_the_loop_and_no_bucket_is_overwritten(eight: dict[str, Any]) -> None:
    judge_meetings(eight["planned"])
    judge_meetings(eight["bucketed"])
    judge_synced(eight["bucketed"], [8])  # though the engine read each bucket late
    red(judge_meetings, eight["barrier_in_the_loop"])
    red(judge_synced, eight["buffer_filled_too_early"], [8])


# ---------------------------------------------------------------- S7, S8: the engines' commands


def commands(**cluster: Any) -> list[Any]:
    """Of four engines of one GPU, made one after the other from the same options."""
    from vime.backends.vllm_utils.command import engine_command
    from vime.config import ClusterOptions

    config = make_config()
    config.cluster = ClusterOptions(actor_num_gpus_per_node=4, rollout_num_gpus=4, **cluster)
    return [
        engine_command(config, SPEC, index, device="cuda", gpu_ids=[index], vllm_version="0.26.0") for index in range(4)
    ]


@pytest.mark.parametrize("cluster", [{"colocate": True}, {"offload_rollout": True}, {"offload": True}])
def test_s7_every_engine_can_sleep(monkeypatch: pytest.MonkeyPatch, cluster: dict[str, Any]) -> None:
    from vime.backends.vllm_utils import command

    judge_sleep(commands(**cluster))
    given: list[int] = []

    def once_per_process(_: Any) -> bool:
        given.append(1)
        return len(given) == 1

    monkeypatch.setattr(command, "sleeps", once_per_process)
    red(judge_sleep, commands(**cluster))

    monkeypatch.undo()
    arguments = command.as_arguments

    def as_the_launch_before(flag: str, value: Any) -> list[str]:  # which left it where this one begins
        return arguments(flag, value) * (1 + (flag == "enable-sleep-mode"))

    monkeypatch.setattr(command, "as_arguments", as_the_launch_before)
    red(judge_sleep, commands(**cluster))


def test_s8_no_constructor_writes_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine's process needs is in its command; nothing that is made on the way to it, or to a trainer's end of
    the update, writes this process's environment."""
    from vime.backends.vllm_utils.client import AsyncEngineClient, EngineClient
    from vime.backends.vllm_utils.engine import EngineProcess
    from vime.backends.vllm_utils.weight_guard import WeightGuard

    made: list[Any] = []
    makers: Mapping[str, Callable[[], Any]] = {
        "engine_command": lambda: made.extend(commands(colocate=True)),
        "EngineProcess": lambda: EngineProcess(made[0], os.devnull),
        "EngineClient": lambda: EngineClient("http://127.0.0.1:1"),
        "AsyncEngineClient": lambda: AsyncEngineClient("http://127.0.0.1:1"),
        "WeightGuard": lambda: WeightGuard(None),  # type: ignore[arg-type]
        "UpdateWeightFromTensor": lambda: Rank(0, ParallelLayout(world_size=1)),
    }
    for make in makers.values():
        with environment_untouched():
            make()
    assert [command.env["CUDA_VISIBLE_DEVICES"] for command in made] == ["0", "1", "2", "3"]

    # As constructors have done it: for the engine's sake, in the process that starts it.
    initialise = EngineProcess.__init__

    def writing(self: Any, *args: Any) -> None:
        initialise(self, *args)
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"

    monkeypatch.setattr(EngineProcess, "__init__", writing)
    with pytest.raises(AssertionError, match=r"os\.environ was written"), environment_untouched():
        makers["EngineProcess"]()


# ---------------------------------------------------------------- S9 to S11


def test_s9_ranks_that_disagree_are_refused_before_anything_is_written(two: dict[str, Any]) -> None:
    for rank in two["names"]:
        assert rank["connect"]["error"]["where"] == "trainer rank 1"
        assert "names, order or shapes" in rank["connect"]["error"]["cause"]
    assert two["names"][0]["calls"] == [[]]
    for what, words in IN_BUCKETS.items():
        for rank in two[what]:
            assert "error" not in rank["connect"], rank["connect"]
            error = rank["update"]["error"]
            assert (error["phase"], error["where"], error["engines"]) == ("ready", "trainer rank 1", [])
            assert error["cause"].startswith("its buckets differ from those of rank 0: ")
            assert words in error["cause"]
        assert "vime_start_weight_update" not in two[what][0]["calls"][0]  # nor paused: it has what it had
    for what in ("names", "dtypes"):  # without the comparison it would be written
        assert "vime_update_weights" in two[f"{what} unseen"][0]["calls"][0]


def test_s9_what_one_slot_disagrees_on_is_said_by_all(four: dict[str, Any]) -> None:
    """Rank 3's list differs from rank 2's. The other slot, whose ranks agree, is sent nothing either."""
    errors = [rank["update"]["error"] for rank in four["dtypes"]]
    assert errors == [errors[0]] * 4
    assert (errors[0]["where"], errors[0]["engines"]) == ("trainer rank 3", [])
    assert "its buckets differ from those of rank 0" in errors[0]["cause"]
    assert all("vime_start_weight_update" not in made for made in four["dtypes"][0]["calls"])


@pytest.mark.parametrize("path", ["mixed", "mixed bucketed"])
def test_s10_engines_with_and_without_a_slot_get_the_same_bytes(four: dict[str, Any], path: str) -> None:
    judge_synced(four[path], [1, 2, 2])
    judge_one_leader(four[path])
    red(judge_synced, four["without_a_slot"], [1, 2, 2])
    judge_synced([four["without_a_slot"][0] | {"digests": four["without_a_slot"][0]["digests"][:2]}], [1, 2])


def test_s11_a_replaced_engine_is_connected_and_synced_and_the_others_left_alone(four: dict[str, Any]) -> None:
    rank = four["replaced"][0]
    assert rank["before"] != expected_digests(1, 1)
    assert rank["digests"] == [expected_digests(1, 1)] * 4
    for calls in rank["calls"][:-1]:
        assert calls == ["vime_abort_weight_update", "vime_weight_state"]
    judge_served_after_sync(rank["calls"][-1])
    red(judge_served_after_sync, four["serves_before_its_sync"][0]["calls"][-1])
    red(judge_served_after_sync, four["is_only_connected"][0]["calls"][-1])
    assert four["is_only_connected"][0]["digests"][-1] != expected_digests(1, 1)


# ---------------------------------------------------------------- proof and figures


def test_the_first_sync_runs_both_paths_on_poisoned_weights(four: dict[str, Any]) -> None:
    for calls in four["planned"][0]["first_calls"]:
        kept = [
            call for call in calls if call.startswith(("vime_poison", "vime_weight_digests", "vime_start", "/finish"))
        ]
        poisoned = ["vime_start_weight_update", "vime_poison_weights"]
        # Of the second path what it left is compared before vLLM takes the update for a good one.
        planned, bucketed = (
            ["/finish_weight_update", "vime_weight_digests"],
            ["vime_weight_digests", "/finish_weight_update"],
        )
        assert kept == [*poisoned, *planned, *poisoned, *bucketed]


def test_figures_are_the_same_on_every_rank_and_say_where_bytes_came_from(eight: dict[str, Any]) -> None:
    stats = [rank["second"]["stats"] for rank in eight["planned"]]
    for name in ("bytes", "copy_seconds", "gb_per_second", "local_share", "link_share"):
        assert len({found[name] for found in stats}) == 1
    assert stats[0]["bytes"] > 0
    assert stats[0]["local_share"] + stats[0]["link_share"] == pytest.approx(1)
    assert 0 < stats[0]["local_share"] < 1
    assert {f"{phase}_seconds" for phase in ("pause", "start", "update", "finish", "resume")} <= set(stats[0])
