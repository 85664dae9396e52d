"""A reward for runs whose engine stands still at the next weight update, so that a test can act in the middle of it."""

from __future__ import annotations

import signal
from typing import Any

import psutil

from tests.e2e.runs import parity_reward
from vime.backends.vllm_utils import launcher

_rewarded: list[int] = []


def servers(children: list[psutil.Process]) -> list[psutil.Process]:
    """The engines' API servers, which the launcher's supervisors have started, among the processes of a run."""
    return [child for child in children if {launcher.MODULE, "--supervisor"} <= _words(child)]


def _words(process: psutil.Process) -> set[str]:
    try:
        return set(process.cmdline())
    except psutil.NoSuchProcess:  # or just about to be gone: a zombie
        return set()


def reward(config: Any, sample: Any) -> float:
    """As parity_reward; the last answer of the first rollout also stops the servers (SIGSTOP). Nothing is asked of them
    then until the update."""
    _rewarded.append(sample.index)
    if len(_rewarded) == config.answers_per_rollout:
        for server in servers(psutil.Process().children(recursive=True)):
            server.send_signal(signal.SIGSTOP)
    return parity_reward(config, sample)
