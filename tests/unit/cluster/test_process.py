"""How a run ends on a signal, and how it begins at a Ray cluster that is not there."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from vime.cluster.process import Terminated, signals_as_exceptions
from vime.cluster.ray_runtime import expect_listener
from vime.config import ClusterOptions
from vime.errors import VimeError


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_an_interruption_that_knows_its_name(signum: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt, match=f"stopped by {signum.name}") as caught, signals_as_exceptions():
        os.kill(os.getpid(), signum)
    assert isinstance(caught.value, Terminated)
    assert not isinstance(caught.value, Exception)


def test_ctrl_c_stays_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, signals_as_exceptions():
        raise KeyboardInterrupt
    assert not isinstance(caught.value, Terminated)


_WAIT_IN_RAY = """
    import os, signal, sys, threading, time
    import ray
    from vime import cli
    from vime.cluster.process import signals_as_exceptions

    def wait(words):
        ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        with signals_as_exceptions():
            never = ray.remote(lambda: time.sleep(600)).remote()
            threading.Timer(2, os.kill, (os.getpid(), getattr(signal, words[0]))).start()
            try:
                ray.wait([never], timeout=300)
            finally:
                ray.shutdown()

    cli._report = wait
    sys.exit(cli.main(["report", sys.argv[1]]))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_while_ray_waits(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_WAIT_IN_RAY), name],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 128 + getattr(signal, name), run.stderr
    assert run.stderr.splitlines()[-1] == f"vime: stopped by {name}"
    assert "Traceback" not in run.stderr


def test_a_thread_left_behind_starts_no_new_ray() -> None:
    code = (
        "from vime.cluster.process import start_of_process\n"
        "start_of_process()\n"
        "import ray\n"
        "try:\n    ray.put(1)\nexcept Exception as error:\n    print(type(error).__name__, ray.is_initialized())\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout.endswith(" False\n"), run.stdout + run.stderr


def test_a_ray_cluster_that_is_not_there_is_said_at_once() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", "127.0.0.1:99999"):
            with pytest.raises(VimeError, match=r"--ray-address \(or RAY_ADDRESS\) .*no Ray cluster answers"):
                expect_listener(address)
        server.listen()
        expect_listener(f"127.0.0.1:{port}")
    expect_listener("auto")


def test_which_cluster_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert ClusterOptions().existing_ray is None
    assert ClusterOptions(ray_address="local").existing_ray is None  # Ray's word for a new one
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert ClusterOptions().existing_ray == "10.0.0.1:6379"
    assert ClusterOptions(ray_address="auto").existing_ray == "auto"
