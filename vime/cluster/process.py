"""The driver process: what is set once at its start, and how it ends on a signal."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

RUN_VARIABLE = "VIME_RUN"  # marks every process of a run; the janitor finds them by it

LOOPBACK = "127.0.0.1"
# Where Gloo and NCCL listen, of processes that are all on one node: they take the address of the machine's name, or the
# first interface that leads elsewhere. ("=": this name, not what begins with it.)
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived. Not an ``Exception``: nothing but the clean-up may hold it up.

    A KeyboardInterrupt, because Ray's waits know no other: they turn whatever else a signal raises within them into a
    SystemError, and this one into a new KeyboardInterrupt, which :func:`signals_as_exceptions` turns back.
    """

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(f"stopped by {signal.Signals(signum).name}")


def start_of_process(existing_ray: str | None = None) -> str:
    """Mark this process and all that it will start as one run; return the run's id.

    Called once, before Ray or torch is imported: this is the only place where vime writes its own environment. Ray
    reads these variables when it is imported or its first process starts, and offers no argument for them.

    Args:
        existing_ray: address of the cluster to join, whose variables are the business of whoever started it. Without
            one, the run starts a cluster of its own, which nobody else is to reach.
    """
    run_id = f"{os.getpid()}-{secrets.token_hex(4)}"
    os.environ[RUN_VARIABLE] = run_id
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A thread that is left behind and calls Ray once it has been shut down would start a new one.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    # Ray would otherwise warn, at every start, that it is about to change how it treats processes without a GPU.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if existing_ray is None:
        # Ray knows the loopback interface as a node's address only where it knows no clusters of several nodes;
        # elsewhere it replaces 127.0.0.1 by an address that other machines reach, and listens on all interfaces.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # Whoever can call a Ray process can make it run anything, and loopback is open to all users of this machine.
        # Ray's own token stands in ~/.ray, is that of all clusters, and may be read by all; this one is nowhere else.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        for name, value in ON_LOOPBACK.items():
            os.environ.setdefault(name, value)
    return run_id


def run_id() -> str:
    """Id of the run that this process belongs to.

    Raises:
        RuntimeError: :func:`start_of_process` was not called in the driver.
    """
    try:
        return os.environ[RUN_VARIABLE]
    except KeyError:
        raise RuntimeError("vime.cluster.process.start_of_process() must be called first in the driver") from None


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Within: SIGTERM and SIGHUP raise :class:`Terminated` in the main thread, so that ``finally`` blocks run."""

    received: list[Terminated] = []

    def raise_terminated(signum: int, frame: FrameType | None) -> None:
        received.append(Terminated(signum))
        raise received[-1]

    before = {s: signal.signal(s, raise_terminated) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt as error:
        if received and not isinstance(error, Terminated):
            raise received[-1] from error
        raise
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
