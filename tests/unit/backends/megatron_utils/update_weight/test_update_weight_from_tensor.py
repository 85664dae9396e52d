"""UpdateWeightFromTensor, row by row of the design's S1 to S11: real ranks, real Gloo groups, real shared memory, toy
engines that answer vLLM's routes (toy_engine.py). For each rule the wrong one is put in and the judgement turns red.

Processes are shared: all scenarios of one world size run one after the other in the same ranks, once per module.
"""

from __future__ import annotations

import inspect
import multiprocessing as mp
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.unit.backends.megatron_utils.update_weight.scenarios import dies_or_is_late, run_all
from tests.unit.backends.megatron_utils.update_weight.toy_engine import ToyEngine, expected_digests, make_config
from vime.models.layout import ParallelLayout
from vime.types import Slot

TP4_CP2_EP8 = ParallelLayout(world_size=8, tp=4, cp=2, ep=8, etp=1)
TP2_PP2 = ParallelLayout(world_size=4, tp=2, pp=2, ep=1, etp=2)
DP2 = ParallelLayout(world_size=2, ep=2)

PLANNED = [
    *("/is_sleeping", "/pause", "vime_abort_weight_update", "/start_weight_update", "/update_weights"),
    *("vime_weight_state", "/finish_weight_update", "vime_weight_state", "/reset_prefix_cache", "/resume"),
]
BUCKETED: dict[str, Any] = {"update_weight_transport": "bucketed", "check_weight_update": "off"}
BUCKETED |= {"update_weight_buffer_size": 4096}
WRONG_RULES = ("leader_is_tp_rank_0", "gather_over_tp_group", "barrier_in_the_loop")
FAULTS = {
    "pause": ["/pause", "no"],
    "start": ["/start_weight_update", "no"],
    "update": ["/update_weights", "no"],
    "finish": ["/finish_weight_update", "no"],
    "resume": ["/reset_prefix_cache", "no"],
    "a worker": ["/update_weights", "worker"],
    "too slow": ["/update_weights", "slow 8"],
}


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[..., ToyEngine]]:
    started: list[ToyEngine] = []

    def start(*args: Any) -> ToyEngine:
        started.append(ToyEngine(*args))
        return started[-1]

    yield start
    for engine in started:
        engine.stop()


@pytest.fixture(scope="module")
def eight(engines: Callable[..., ToyEngine]) -> dict[str, list[dict[str, Any]]]:
    """Label -> every rank's result, with one 8-GPU engine: a topology that once failed."""
    engine = engines(0, Slot(0, 8)).address
    common = {"layout": TP4_CP2_EP8, "addresses": [engine]}
    steps = [
        ("planned", "sync", common),
        ("bucketed", "sync", common | BUCKETED | {"slow": True}),
        *[
            (mutant, "sync", common | BUCKETED | {"mutant": mutant, "slow": mutant == "buffer_filled_too_early"})
            for mutant in (
                "leader_is_tp_rank_0",
                "gather_over_tp_group",
                "barrier_in_the_loop",
                "buffer_filled_too_early",
            )
        ],
    ]
    return by_label(run_ranks(8, run_all, steps, timeout=280))


@pytest.fixture(scope="module")
def four(engines: Callable[..., ToyEngine]) -> dict[str, list[dict[str, Any]]]:
    """The same with four ranks and several engines."""
    singles = [engines(index, Slot(index, index + 1)) for index in range(4)]
    pair, remote = engines(5, Slot(2, 4)), engines(6, None, 2)
    replacement, mortal = engines(3, Slot(3, 4)), engines(1, Slot(1, 2))
    addresses = [engine.address for engine in singles]
    common = {"layout": TP2_PP2, "addresses": addresses}
    mixed = {"layout": TP2_PP2, "addresses": [addresses[0], pair.address, remote.address]}
    steps = [
        ("planned", "sync", common),
        ("group_for_every_slot", "sync", common | {"mutant": "group_for_every_slot"}),
        ("mixed", "sync", mixed),
        ("mixed bucketed", "sync", mixed | BUCKETED),
        ("faults", "faults", common | {"each": FAULTS}),
        ("a rank raises", "a_rank_raises", common),
        ("replaced", "replaced_engine", common | {"replacement": replacement.address}),
        ("engine dies", "engine_dies", common | {"addresses": [addresses[0], mortal.address]}),
    ]
    return by_label(run_ranks(4, run_all, steps, timeout=280))


@pytest.fixture(scope="module")
def two(engines: Callable[..., ToyEngine]) -> dict[str, list[dict[str, Any]]]:
    """TP1, two ranks, one 2-GPU engine: another topology that once failed, since rank 1 also is TP rank 0."""
    common = {"layout": DP2, "addresses": [engines(0, Slot(0, 2)).address]}
    steps = [
        ("planned", "sync", common),
        ("bucketed", "sync", common | BUCKETED),
        ("leader_is_tp_rank_0", "sync", common | BUCKETED | {"mutant": "leader_is_tp_rank_0"}),
        ("names", "disagreeing_rank", common | {"what": "names"}),
        ("dtypes", "disagreeing_rank", common | {"what": "dtypes"}),
        ("dtypes unseen", "disagreeing_rank", common | {"what": "dtypes", "mutant": "metadata_is_not_compared"}),
    ]
    return by_label(run_ranks(2, run_all, steps, timeout=280))


def by_label(ranks: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {label: [rank[label] for rank in ranks] for label in ranks[0]}


# ---------------------------------------------------------------- judgements; each is also seen to turn red


def judge_synced(ranks: list[dict[str, Any]], workers: list[int]) -> None:
    """Both syncs succeeded, and left in every worker what loading the second checkpoint would."""
    for rank in ranks:
        assert "error" not in rank["first"], rank["first"]
        assert "error" not in rank["second"], rank["second"]
    for found, count in zip(ranks[0]["digests"], workers, strict=True):
        assert found == expected_digests(2, count)


def judge_one_leader(ranks: list[dict[str, Any]]) -> None:
    """S2: each engine was started and finished once."""
    for engine in ranks[0]["calls"]:
        for call in ("/pause", "/start_weight_update", "/finish_weight_update", "/resume"):
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


def red(judgement: Callable[..., None], *args: Any) -> None:
    with pytest.raises((AssertionError, KeyError)):
        judgement(*args)


# ---------------------------------------------------------------- S1 to S6


def test_s1_one_class_with_two_methods() -> None:
    from vime.backends.megatron_utils.update_weight.update_weight_from_tensor import UpdateWeightFromTensor

    assert list(inspect.signature(UpdateWeightFromTensor.connect_rollout_engines).parameters) == ["self", "addresses"]
    assert list(inspect.signature(UpdateWeightFromTensor.update_weights).parameters) == ["self", "version", "only"]


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


def commands(monkeypatch: pytest.MonkeyPatch, **cluster: Any) -> list[Any]:
    from tests.unit.backends.megatron_utils.update_weight.toy_engine import SPEC
    from vime.backends.vllm_utils.command import engine_command
    from vime.config import ClusterOptions

    config = make_config()
    config.cluster = ClusterOptions(actor_num_gpus_per_node=4, rollout_num_gpus=4, **cluster)

    def refuse(*_: Any) -> None:
        raise AssertionError("os.environ was written")

    with monkeypatch.context() as patch:
        for name in ("__setitem__", "__delitem__", "update", "setdefault"):
            patch.setattr(type(os.environ), name, refuse)
        return [
            engine_command(config, SPEC, index, device="cuda", gpu_ids=[index], vllm_version="0.26.0")
            for index in range(4)
        ]


@pytest.mark.parametrize("cluster", [{"colocate": True}, {"offload_rollout": True}])
def test_s7_every_engine_can_sleep(monkeypatch: pytest.MonkeyPatch, cluster: dict[str, Any]) -> None:
    for command in commands(monkeypatch, **cluster):
        assert command.argv.count("--enable-sleep-mode") == 1


def test_s8_no_constructor_writes_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.backends.megatron_utils.update_weight.toy_engine import Rank

    made = commands(monkeypatch, colocate=True)  # fails by itself if it writes
    assert [command.env["CUDA_VISIBLE_DEVICES"] for command in made] == ["0", "1", "2", "3"]
    before = dict(os.environ)
    Rank(0, ParallelLayout(world_size=1))
    assert dict(os.environ) == before


# ---------------------------------------------------------------- S9 to S11


def test_s9_ranks_that_disagree_are_refused_before_anything_is_written(two: dict[str, Any]) -> None:
    for rank in two["names"]:
        assert rank["connect"]["error"]["where"] == "trainer rank 1"
        assert "names, order or shapes" in rank["connect"]["error"]["cause"]
    assert two["names"][0]["calls"] == [[]]
    for rank in two["dtypes"]:
        assert "error" not in rank["connect"], rank["connect"]
        assert "its bucket differs" in rank["update"]["error"]["cause"]
    assert "/update_weights" not in two["dtypes"][0]["calls"][0]
    assert "/update_weights" in two["dtypes unseen"][0]["calls"][0]  # without the comparison it would be written


@pytest.mark.parametrize("path", ["mixed", "mixed bucketed"])
def test_s10_engines_with_and_without_a_slot_get_the_same_bytes(four: dict[str, Any], path: str) -> None:
    judge_synced(four[path], [1, 2, 2])
    judge_one_leader(four[path])


def test_s11_a_replaced_engine_is_connected_and_synced_and_the_others_left_alone(four: dict[str, Any]) -> None:
    rank = four["replaced"][0]
    assert rank["before"] != expected_digests(1, 1)
    assert rank["digests"] == [expected_digests(1, 1)] * 4
    for calls in rank["calls"][:-1]:
        assert calls == ["vime_abort_weight_update", "vime_weight_state"]
    assert "/init_weight_transfer_engine" in rank["calls"][-1]
    assert rank["calls"][-1].count("/resume") == 1


# ---------------------------------------------------------------- proof, figures, failures


def test_the_first_sync_runs_both_paths_on_poisoned_weights(four: dict[str, Any]) -> None:
    for calls in four["planned"][0]["first_calls"]:
        kept = [call for call in calls if call.startswith(("vime_poison", "vime_weight_digests", "/start", "/finish"))]
        one = ["/start_weight_update", "vime_poison_weights", "/finish_weight_update", "vime_weight_digests"]
        assert kept == one * 2


def test_figures_are_the_same_on_every_rank_and_say_where_bytes_came_from(eight: dict[str, Any]) -> None:
    stats = [rank["second"]["stats"] for rank in eight["planned"]]
    for name in ("bytes", "copy_seconds", "gb_per_second", "local_share", "link_share"):
        assert len({found[name] for found in stats}) == 1
    assert stats[0]["bytes"] > 0
    assert stats[0]["local_share"] + stats[0]["link_share"] == pytest.approx(1)
    assert 0 < stats[0]["local_share"] < 1
    assert {f"{phase}_seconds" for phase in ("pause", "start", "update", "finish", "resume")} <= set(stats[0])


@pytest.mark.parametrize("label", list(FAULTS))
def test_an_engines_failure_reaches_every_rank_and_the_next_sync_succeeds(four: dict[str, Any], label: str) -> None:
    errors = [rank["faults"][label]["failed"]["error"] for rank in by_rank(four)]
    assert all(error == errors[0] for error in errors)
    assert errors[0]["phase"] == (label if label in ("pause", "start", "finish", "resume") else "update")
    assert errors[0]["where"].startswith("engine 1 (http://")
    causes = {"a worker": "worker 0: RuntimeError: out of memory", "too slow": "no answer within"}
    assert causes.get(label, "Call to collective_rpc method failed: no") in errors[0]["cause"]
    assert errors[0]["engines"] == [1]
    assert all(rank["faults"][label]["failed"]["seconds"] < 7 for rank in by_rank(four))  # the deadline is 5 s
    first = four["faults"][0][label]
    version = 1 + 2 * list(FAULTS).index(label)
    assert first["others"] == expected_digests(version, 1)  # the other engines have the new weights
    if label != "pause":
        assert first["paused"] == {"is_paused": True}  # it serves nothing meanwhile
    for rank in by_rank(four):
        assert "error" not in rank["faults"][label]["again"]
    assert first["digests"] == [expected_digests(version + 1, 1)] * 4


def by_rank(results: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [{label: ranks[number] for label, ranks in results.items()} for number in range(len(results["planned"]))]


def test_an_engine_that_dies_is_named_and_the_others_have_the_new_weights(four: dict[str, Any]) -> None:
    errors = [rank["failed"]["error"] for rank in four["engine dies"]]
    assert all(error == errors[0] for error in errors)
    assert (errors[0]["phase"], errors[0]["engines"]) == ("update", [1])
    assert "connection lost" in errors[0]["cause"]
    assert four["engine dies"][0]["digests"] == [expected_digests(2, 1)]


def test_a_ranks_failure_reaches_every_rank_before_anything_is_written(four: dict[str, Any]) -> None:
    for rank in four["a rank raises"]:
        error = rank["failed"]["error"]
        assert (error["phase"], error["where"], error["engines"]) == ("ready", "trainer rank 2", [])
        assert "private memory" in error["cause"]
        assert "error" not in rank["again"]
    assert four["a rank raises"][0]["calls"] == [[]] * 4


def _outcome(rank: int, store: str, results: Any, arguments: dict[str, Any]) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results.put((rank, dies_or_is_late(rank, **arguments)))


@pytest.mark.parametrize("kind", ["killed", "late"])
def test_a_rank_that_does_not_come_is_named_within_the_deadline(
    engines: Callable[..., ToyEngine], tmp_path: Any, kind: str
) -> None:
    addresses = [engines(0, Slot(0, 1)).address]
    arguments = {"layout": DP2, "addresses": addresses, "victim": 1, "kind": kind}
    context = mp.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=_outcome, args=(rank, str(tmp_path / "store"), results, arguments), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    rank, outcome = results.get(timeout=120)
    for process in ranks:
        process.kill()
        process.join(10)
    assert rank == 0
    assert outcome["seconds"] < 7.5
    words = "dead" if kind == "killed" else "late"
    assert outcome["error"]["where"] == f"trainer rank 1 (pid {ranks[1].pid}, {words})"
    assert outcome["error"]["phase"] == "ready"
