"""Ranks and engine workers sit where the slots say. Real Ray placement groups."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from vime.cluster import placement as placement_module
from vime.cluster.placement import Placement
from vime.config import CheckpointOptions, ClusterOptions, Config, RolloutOptions, TrainOptions
from vime.errors import VimeError
from vime.types import Slot


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=32, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    yield
    ray.shutdown()


def _config(loss_type: str = "policy_loss", **cluster: object) -> Config:
    return Config(
        checkpoint=CheckpointOptions(hf_checkpoint="unused"),
        rollout=RolloutOptions(rollout_batch_size=1),
        cluster=ClusterOptions(**cluster),  # type: ignore[arg-type]
        train=TrainOptions(loss_type=loss_type),
    )


def test_colocated_engines_share_the_seats_of_their_slot(cluster: None) -> None:
    placement = Placement(_config(colocate=True, actor_num_gpus_per_node=4, rollout_num_gpus_per_engine=2), "cpu")
    assert len(placement.seats) == 4
    assert [placement.slot(index) for index in range(placement.num_engines)] == [Slot(0, 2), Slot(2, 4)]
    assert [list(placement.engine_seats(index)) for index in range(2)] == [[0, 1], [2, 3]]


def test_engines_beyond_the_ranks_have_seats_of_their_own(cluster: None) -> None:
    options = {"colocate": True, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 6, "rollout_num_gpus_per_engine": 2}
    placement = Placement(_config(**options), "cpu")
    assert len(placement.seats) == 6
    assert [placement.slot(index) for index in range(3)] == [Slot(0, 2), None, None]
    assert [list(placement.engine_seats(index)) for index in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_separate_engines_follow_the_trainer(cluster: None) -> None:
    placement = Placement(_config(actor_num_gpus_per_node=2, rollout_num_gpus=3), "cpu")
    assert len(placement.seats) == 5
    assert [placement.slot(index) for index in range(3)] == [None, None, None]
    assert [list(placement.engine_seats(index)) for index in range(3)] == [[2], [3], [4]]


def test_supervised_training_reserves_nothing_for_engines(cluster: None) -> None:
    placement = Placement(_config("sft_loss", actor_num_gpus_per_node=2), "cpu")
    assert (len(placement.seats), placement.num_engines) == (2, 0)


def test_bundles_whose_processes_do_not_answer_are_named(
    cluster: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def hangs_the_fourth_time() -> tuple[str, int | None]:
        for name in ("the driver", "first", "second"):
            with contextlib.suppress(FileExistsError):
                (tmp_path / name).mkdir()
                return "10.0.0.1", None
        threading.Event().wait()
        raise AssertionError

    late: list[ray.ObjectRef] = []
    wait_for = placement_module.gather

    def gather(calls: dict[str, ray.ObjectRef], *rest: Any) -> dict[str, Any]:
        # Processes that are slow to start are not what is meant here.
        late.extend(ray.wait(list(calls.values()), num_returns=2, timeout=60)[1])
        return wait_for(calls, *rest)

    monkeypatch.setattr(placement_module, "_node_address", hangs_the_fourth_time)
    monkeypatch.setattr(placement_module, "gather", gather)
    monkeypatch.setattr(placement_module, "_LOCATE_SECONDS", 0.5)
    with pytest.raises(VimeError, match=r"for their node and GPU: no answer from bundle \d within"):
        Placement(_config(actor_num_gpus_per_node=2, rollout_num_gpus=1), "cpu")
    (hanging,) = late
    ray.cancel(hanging, force=True)
