"""What fails in a weight update, phase by phase: every rank gets one error that names phase, place and cause; the other
engines have the new weights or keep the old; and the next update, by these ranks or by new ones, succeeds.

Engines: connect, pause, start, update, finish, resume. Ranks: their meetings (connect, ready, done) and what they do
between (update). Real processes and toy engines, as in test_update_weight_from_tensor.py; what only a real engine shows
stands in tests/unit/backends/vllm_utils/test_update_failures.py, whole runs in tests/e2e/test_failures_in_update.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.distributed import run_ranks
from tests.unit.backends.megatron_utils.update_weight import failing
from tests.unit.backends.megatron_utils.update_weight.failing import CONNECT, DEADLINE, Fault
from tests.unit.backends.megatron_utils.update_weight.scenarios import by_label, run_all
from tests.unit.backends.megatron_utils.update_weight.toy_engine import ToyEngine, expected_digests, processes
from vime.models.layout import ParallelLayout
from vime.types import EngineAddress, Slot

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

DP2 = ParallelLayout(world_size=2, ep=2)
ABORT_SECONDS = 15.0  # an engine that is late is also waited for until it has dropped what it was at

CALLS = {
    "connect": CONNECT,
    "pause": "/pause",
    "start": "vime_start_weight_update",
    "update": "vime_update_weights",
    "finish": "/finish_weight_update",
    "resume": "/reset_prefix_cache",
}
FAULTS = {
    **{f"{phase}: raises": Fault(call, "refused by the test", phase == "connect") for phase, call in CALLS.items()},
    **{f"{phase}: late": Fault(call, f"slow {DEADLINE + 1}", phase == "connect") for phase, call in CALLS.items()},
    **{f"{phase}: killed": Fault(call, "die", phase == "connect") for phase, call in CALLS.items()},
    **{f"{phase}: its worker raises": Fault(CALLS[phase], "worker", phase == "connect")
       for phase in ("connect", "start", "update", "finish")},
    "checksum: one flipped bit": Fault("vime_update_weights", "flip"),
    "proof: one flipped bit that no checksum sees": Fault("/finish_weight_update", "flip unseen", fresh=True),
}  # fmt: skip
STEPS = ("_fill", "_share", "serving")  # what a rank does between the meetings: BucketStream's, and Channels'
CAUSES = {
    "raises": "refused by the test",
    "late": "no answer within",
    "killed": "connection lost",
    "its worker raises": "worker 0: RuntimeError: out of memory",
    "one flipped bit": "copies arrived changed, the first of model.embed_tokens.weight from trainer rank 1 to ",
    "one flipped bit that no checksum sees": "different bytes in 1 of ",
}

BUCKETS = {
    "lost": ("update", " tensors did not come, the first model."),
    "doubled": ("update", " came twice"),
    "altered": ("checksum", " arrived changed: its checksum is "),
}


@pytest.fixture(scope="module")
def ranks(engines: Callable[..., ToyEngine]) -> dict[str, list[dict[str, Any]]]:
    """Label -> both ranks' results."""
    first = [engines(index, Slot(index, index + 1)).address for index in range(2)]
    replaced = sum(fault.fresh + (fault.kind == "die") for fault in FAULTS.values())
    spare = [engines(1, Slot(1, 2)).address for _ in range(replaced)]
    common = {"layout": DP2, "addresses": first}
    lasting = common | {"addresses": [first[0], engines(1, Slot(1, 2)).address]}
    steps = [
        ("faults", failing.engine_faults, common | {"faults": FAULTS, "spare": spare}),
        ("delayed", failing.delayed, lasting),
        ("left open", failing.left_open, lasting),
        ("left open, not cleared", failing.left_open, lasting | {"mutant": "nobody_clears_an_open_update"}),
        ("a rank raises", failing.a_rank_raises, lasting),
        ("buckets", failing.bucket_faults, lasting | {"kinds": list(BUCKETS)}),
        ("no memory", failing.no_memory_for_buckets, lasting),
        *(
            (
                f"rank {victim} {step} {how}",
                failing.cannot_go_on,
                lasting | {"victim": victim, "step": step, "transport": how},
            )
            for victim in (0, 1)
            for step in STEPS
            for how in ("bucketed", "planned")
        ),
    ]
    return by_label(run_ranks(2, run_all, steps, timeout=280, context=processes()))


@pytest.mark.parametrize("label", list(FAULTS))
def test_an_engines_failure_reaches_every_rank_and_the_next_update_succeeds(ranks: dict[str, Any], label: str) -> None:
    phase, kind = label.split(": ")
    found = [rank[label] for rank in ranks["faults"]]
    errors = [rank["failed"]["error"] for rank in found]
    assert errors[0] == errors[1]
    assert errors[0]["phase"] == phase
    assert errors[0]["where"].startswith("engine 1 (http://")
    assert CAUSES[kind] in errors[0]["cause"]
    assert ("nobody answers at its address any more" in errors[0]["cause"]) == (kind == "killed")
    assert errors[0]["engines"] == [1]
    for rank in found:
        assert rank["failed"]["seconds"] < (DEADLINE if kind == "late" else 60) + ABORT_SECONDS
    version = 1 + 2 * list(FAULTS).index(label)
    # The other engine has the new weights; where one cannot be connected, no update was begun.
    assert found[0]["others"] == expected_digests(version - (phase == "connect"), 1)
    if kind != "killed" and phase not in ("connect", "pause"):
        assert found[0]["paused"]  # it generates nothing meanwhile
    for rank in found:
        assert "error" not in rank["again"], rank["again"]
    assert found[0]["digests"] == [expected_digests(version + 1, 1)] * 2


@pytest.mark.parametrize("kind", BUCKETS)
def test_a_bucket_that_is_not_what_was_sent_fails_its_engine_alone(ranks: dict[str, Any], kind: str) -> None:
    phase, words = BUCKETS[kind]
    found = [rank[kind] for rank in ranks["buckets"]]
    errors = [rank["failed"]["error"] for rank in found]
    assert errors[0] == errors[1]
    assert (errors[0]["phase"], errors[0]["engines"]) == (phase, [1])
    assert words in errors[0]["cause"]
    version = 2 * list(BUCKETS).index(kind)
    assert found[0]["versions"] == [[version], [None]]
    for rank in found:
        assert "error" not in rank["again"], rank["again"]
    assert found[0]["digests"] == [expected_digests(version + 1, 1)] * 2


def test_five_seconds_of_delay_within_the_deadline_are_no_failure(ranks: dict[str, Any]) -> None:
    first = ranks["delayed"][0]
    assert first["digests"] == [expected_digests(1, 1)] * 2
    assert first["stats"]["ready_seconds"] > 4  # it waited for the other rank
    assert min(first["stats"]["update_seconds"], first["stats"]["finish_seconds"]) > 4  # and for the engines


def test_an_update_that_a_dead_trainer_left_open_is_cleared(ranks: dict[str, Any]) -> None:
    for rank in ranks["left open"]:
        assert "error" not in rank["synced"]
    assert ranks["left open"][0]["digests"] == [expected_digests(1, 1)] * 2
    for rank in ranks["left open, not cleared"]:
        assert "already active" in rank["synced"]["error"]["cause"]


@pytest.mark.parametrize("phase", ["connect", "ready"])
def test_a_ranks_failure_reaches_every_rank_before_anything_is_written(ranks: dict[str, Any], phase: str) -> None:
    found = ranks["a rank raises"]
    for rank in found:
        error = rank[phase]["error"]
        assert (error["phase"], error["where"], error["engines"]) == (phase, "trainer rank 1", [])
        assert "private memory" in error["cause"]
        assert "error" not in rank["again"]
    assert found[0]["calls"] == [[], []]
    assert found[0]["digests"] == [expected_digests(3, 1)] * 2


def test_memory_that_one_rank_cannot_have_is_said_by_all_before_anything_is_written(ranks: dict[str, Any]) -> None:
    found = ranks["no memory"]
    for rank in found:
        error = rank["failed"]["error"]
        assert (error["phase"], error["where"], error["engines"]) == ("ready", "trainer rank 1", [])
        assert "bytes of shared memory for the weight buckets: none is left" in error["cause"]
        assert "error" not in rank["again"]
    assert found[0]["calls"] == [[], []]
    assert found[0]["digests"] == [expected_digests(2, 1)] * 2


@pytest.mark.parametrize("how", ["bucketed", "planned"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_cannot_go_on_comes_to_every_meeting_and_says_why(
    ranks: dict[str, Any], victim: int, step: str, how: str
) -> None:
    found = ranks[f"rank {victim} {step} {how}"]
    errors = [rank["failed"]["error"] for rank in found]
    assert errors[0] == errors[1]
    assert (errors[0]["phase"], errors[0]["where"]) == ("update", f"trainer rank {victim}")
    assert "MemoryError: CUDA error: out of memory" in errors[0]["cause"]
    # What a rank does not bring is missing in every engine. Not sending concerns its own alone.
    assert errors[0]["engines"] == ([victim] if step == "serving" else [0, 1])
    for engine, versions in enumerate(found[0]["versions"]):
        assert versions == [None if engine in errors[0]["engines"] else 1]
    for rank in found:
        assert rank["failed"]["seconds"] < 30
        assert "error" not in rank["again"], rank["again"]
    assert found[0]["digests"] == [expected_digests(2, 1)] * 2


# ---------------------------------------------------------------- ranks that die, or do not come


def _outcome(rank: int, store: str, results: Any, scenario: Callable[..., Any], arguments: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results.put((rank, scenario(rank, **arguments)))


@contextmanager
def two_ranks(folder: Path, scenario: Callable[..., Any], **arguments: Any) -> Iterator[tuple[list[Any], Any]]:
    """The processes of two ranks, and the queue in which each puts its number and result."""
    context = processes()
    results = context.Queue()
    args = (str(folder / scenario.__name__), results, scenario, arguments)
    ranks: list[ForkServerProcess] = [
        context.Process(target=_outcome, args=(rank, *args), daemon=True) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        yield ranks, results
    finally:
        for process in ranks:
            process.kill()
            process.join(10)


def test_a_rank_that_dies_on_its_way_to_a_meeting_of_its_slot_is_named(
    engines: Callable[..., ToyEngine], tmp_path: Path
) -> None:
    what = {"layout": DP2, "addresses": [engines(0, Slot(0, 2)).address], "victim": 1, "phase": "slot"}
    with two_ranks(tmp_path, failing.goes_missing, **what, kind="killed") as (ranks, results):
        _, outcome = results.get(timeout=60)
        victim = ranks[1].pid
    assert outcome["error"]["where"] == f"trainer rank 1 (pid {victim}, dead)"
    assert outcome["error"]["engines"] == [0]


PHASES = ("connect", "ready", "update", "bucket", "done")
SEEN_AT = {"update": "done", "bucket": "update"}  # where the others wait for it


@pytest.mark.parametrize("kind", ["killed", "late"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_does_not_come_is_named_and_its_successors_sync(
    engines: Callable[..., ToyEngine], tmp_path: Path, phase: str, kind: str
) -> None:
    addresses: list[EngineAddress] = [engines(index, Slot(index, index + 1)).address for index in range(2)]
    common = {"layout": DP2, "addresses": addresses}
    with two_ranks(tmp_path, failing.goes_missing, **common, victim=1, phase=phase, kind=kind) as (ranks, results):
        rank, outcome = results.get(timeout=60)
        victim = ranks[1].pid
    assert rank == 0
    error = outcome["error"]
    assert error["where"] == f"trainer rank 1 (pid {victim}, {'dead' if kind == 'killed' else 'late'})"
    assert error["phase"] == SEEN_AT.get(phase, phase)
    assert outcome["seconds"] < 60
    if phase == "bucket":  # its own engine, which holds half of the weights, has forgotten the update
        assert error["engines"] == [0]
        assert outcome["calls"][-1] == "vime_abort_weight_update"
    with two_ranks(tmp_path, failing.comes_after, **common) as (_, results):
        found = dict(results.get(timeout=60) for _ in range(2))
    assert found[0]["digests"] == [expected_digests(7, 1)] * 2
