"""Who reaches a run's Ray: the run alone where it started the cluster; a cluster that exists is joined as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import psutil
import pytest

from tests.listening import exposed
from vime.cluster.process import ON_LOOPBACK

# Prints what its Ray is, and holds it until stdin ends.
_RUN = """
    import json, os, sys
    from vime.config import CheckpointOptions, ClusterOptions, Config, RolloutOptions
    from vime.cluster.process import ON_LOOPBACK, start_of_process
    config = Config(
        checkpoint=CheckpointOptions(hf_checkpoint="unused"),
        rollout=RolloutOptions(rollout_batch_size=1),
        cluster=ClusterOptions(ray_address=sys.argv[1] if len(sys.argv) > 1 else None),
    )
    start_of_process(config.cluster.existing_ray)
    import ray
    from vime.cluster.placement import Placement
    from vime.cluster.ray_runtime import ray_runtime
    with ray_runtime(config, "cpu"):
        placement = Placement(config, "cpu")
        gcs = ray.get_runtime_context().gcs_address
        session = ray._private.worker._global_node.get_session_dir_path()
        token = os.environ.get("RAY_AUTH_TOKEN")
        variables = ray.remote(lambda: {name: os.environ.get(name) for name in ON_LOOPBACK})
        variables = ray.get(variables.options(**placement.actor_options(0, 0.5)).remote())
        print(json.dumps({"gcs": gcs, "token": token, "session": session,
                          "interfaces": variables, "seats": [seat.node for seat in placement.seats]}), flush=True)
        sys.stdin.read()
"""


# What the processes of a run find, on a cluster that was started elsewhere.
_ACTORS = """
    import json, os, sys
    from vime.config import CheckpointOptions, ClusterOptions, Config, RolloutOptions
    from vime.cluster.process import start_of_process
    config = Config(
        checkpoint=CheckpointOptions(hf_checkpoint="unused"),
        rollout=RolloutOptions(rollout_batch_size=1),
        cluster=ClusterOptions(ray_address=sys.argv[1]),
    )
    start_of_process(config.cluster.existing_ray)
    import ray
    from vime.cluster.engine_group import EngineHost
    from vime.cluster.ray_runtime import ray_runtime
    from vime.cluster.trainer_group import TrainerRank
    from vime.errors import VimeError

    def start(kind, log):
        actor = ray.remote(concurrency_groups={"watch": 1})(kind)
        return actor.options(num_cpus=0.1).remote(0, log, os.getcwd())

    def error(call):
        try:
            return ray.get(call)
        except VimeError as error:
            return str(error)

    with ray_runtime(config, "cpu"):
        actors = [start(TrainerRank, os.path.abspath("trainer.log")), start(EngineHost, os.path.abspath("engine.log"))]
        folders = ray.get([actor.__ray_call__.remote(lambda self: os.getcwd()) for actor in actors])
        lost = [start(TrainerRank, "/not/there/t.log").begin.remote(),
                start(EngineHost, "/not/there/e.log").start.remote(None, None, None, None, None)]
        print(json.dumps({"folders": folders, "errors": [error(call) for call in lost]}), flush=True)
        sys.stdin.read()
"""


# A cluster that somebody else has started: likewise.
_CLUSTER = """
    import json, sys, ray
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    print(json.dumps(ray.get_runtime_context().gcs_address), flush=True)
    sys.stdin.read()
"""


@contextmanager
def program(
    code: str, *words: str, folder: Path | None = None, variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[psutil.Process, Any]]:
    """The program and what it printed, while it holds its Ray. Of Ray's variables it has those given, and no other."""
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith(("RAY_", *ON_LOOPBACK))}
        | dict(variables),
    )
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        yield psutil.Process(program.pid), json.loads(program.stdout.readline())
    finally:
        program.stdin.close()
        try:
            assert program.wait(60) == 0
        finally:
            program.kill()


def alive(gcs: str, *metadata: tuple[str, str]) -> grpc.StatusCode:
    """What the cluster's first server answers to the empty request whether it lives."""
    with grpc.insecure_channel(gcs) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
        try:
            ask(b"", timeout=30, metadata=metadata)
        except grpc.RpcError as refused:
            return refused.code()  # type: ignore[attr-defined]
    return grpc.StatusCode.OK


def test_a_cluster_of_the_runs_own_answers_the_run_alone() -> None:
    with program(_RUN) as (driver, own):
        assert own["seats"] == ["127.0.0.1"] * 2
        assert own["interfaces"] == ON_LOOPBACK
        assert exposed(driver) == []
        assert alive(own["gcs"]) == grpc.StatusCode.UNAUTHENTICATED
        assert alive(own["gcs"], ("authorization", "Bearer " + "0" * 64)) == grpc.StatusCode.UNAUTHENTICATED
        assert alive(own["gcs"], ("authorization", f"Bearer {own['token']}")) == grpc.StatusCode.OK
        # The token is in no command line and no file, Ray's logs among them.
        lines = [" ".join(process.cmdline()) for process in (driver, *driver.children(recursive=True))]
        assert [line for line in lines if own["token"] in line] == []
        files = [path for path in Path(own["session"]).parent.rglob("*") if path.is_file()]
        assert any(path.name.startswith("raylet") for path in files)
        assert [path for path in files if own["token"].encode() in path.read_bytes()] == []
    with program(_RUN) as (_, other):
        assert other["token"] != own["token"]


@pytest.mark.parametrize(
    "theirs", [{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}, {"RAY_AUTH_MODE": "disabled"}]
)
def test_a_cluster_that_exists_is_joined_as_it_is(theirs: dict[str, str]) -> None:
    with program(_CLUSTER, variables=theirs) as (_, gcs), program(_RUN, gcs, variables=theirs) as (_, joined):
        assert joined["gcs"] == gcs
        assert joined["token"] == theirs.get("RAY_AUTH_TOKEN")
        # The cluster listens as it was told to; what the run starts on this one node need not be reached from another.
        assert joined["seats"] == ["127.0.0.1"] * 2
        assert joined["interfaces"] == ON_LOOPBACK


def test_a_cluster_that_was_started_in_another_folder(tmp_path: Path) -> None:
    """Its processes are in that folder; --save, --hf-checkpoint and all other paths may be relative to the driver's."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    off = {"RAY_AUTH_MODE": "disabled"}
    with (
        program(_CLUSTER, folder=theirs, variables=off) as (_, gcs),
        program(_ACTORS, gcs, folder=ours, variables=off) as (_, found),
    ):
        assert found["folders"] == [str(ours)] * 2
        for log, error in zip(("/not/there/t.log", "/not/there/e.log"), found["errors"], strict=True):
            assert f"cannot write {log} on node " in error
            assert "--run-dir must lie where all nodes" in error
    assert sorted(path.name for path in ours.iterdir()) == ["engine.log", "trainer.log"]
