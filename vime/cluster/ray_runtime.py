"""Ray: a local cluster of our own that ends with the run, or an existing one that we join and leave."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from vime.cluster.device import Device, gpu_count
from vime.cluster.janitor import Janitor
from vime.cluster.process import LOOPBACK, RUN_VARIABLE, run_id
from vime.config import Config
from vime.errors import VimeError

_OBJECT_STORE_BYTES = 256 << 20  # a rollout is tokens and log-probs: tens of megabytes at most for a local run
_CONNECT_SECONDS = 5.0
_JOIN = "--ray-address (or RAY_ADDRESS)"


def expect_listener(address: str) -> None:
    """Say at once that nobody is there, which takes Ray minutes. What is no host:port ("auto") is left to Ray.

    Raises:
        VimeError: nothing accepts connections at ``address``.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise VimeError(
            f"{_JOIN} {address}: no Ray cluster answers there ({error}); start one by `ray start --head`, or leave "
            "the address out for a cluster of the run's own"
        ) from error


@contextmanager
def ray_runtime(config: Config, device: Device) -> Iterator[None]:
    """Within: Ray is connected. Afterwards nothing that the run started is left, also when the driver is killed.

    A cluster of the run's own listens on the loopback interface alone, and answers those who have the run's token
    (:func:`vime.cluster.process.start_of_process`).
    """
    mark = {RUN_VARIABLE: run_id()}
    address = config.cluster.existing_ray
    if address:
        expect_listener(address)
    # Short, because Ray puts unix sockets (107 characters at most) below it.
    folder = tempfile.mkdtemp(prefix="vime-")
    with Janitor(run_id(), folder):
        if address:
            try:
                ray.init(
                    address=address, namespace=run_id(), logging_level=logging.ERROR, runtime_env={"env_vars": mark}
                )
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise VimeError(f"{_JOIN} {address}: cannot join this Ray cluster: {error}") from error
        else:
            processes = config.cluster.world_size + config.cluster.num_rollout_gpus
            ray.init(
                address="local",  # a new one, also where another is found
                # Each rank and each engine worker asks for one CPU; on a small machine they share the cores.
                num_cpus=max(os.cpu_count() or 1, processes),
                num_gpus=gpu_count() if device == "cuda" else 0,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                logging_level=logging.ERROR,
                log_to_driver=False,  # every process writes its own file in the run's directory
                namespace=run_id(),
                _temp_dir=folder,
                _node_ip_address=LOOPBACK,
            )
        try:
            if not address and ray.util.get_node_ip_address() != LOOPBACK:
                raise RuntimeError(
                    "Ray was imported before vime.cluster.process.start_of_process() or that was told of another "
                    f"cluster: the run's own listens on {ray.util.get_node_ip_address()}, not on {LOOPBACK} alone"
                )
            yield
        finally:
            ray.shutdown()
