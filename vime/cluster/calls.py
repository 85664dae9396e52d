"""Waiting for calls to several actors: with a deadline, and with one error that names the one to blame."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from vime.errors import VimeError

# When a rank dies, its peers' collectives fail too, often sooner than Ray notices the death. After the first failure
# the others get this long to turn out to be the cause.
_BLAME_SECONDS = 5.0


def gather(calls: Mapping[str, ray.ObjectRef], what: str, timeout: float, error: type[VimeError]) -> dict[str, Any]:
    """Results of ``calls`` by label, as soon as all are there or one has failed.

    Args:
        calls: label (as a person should read it, e.g. "trainer rank 3") -> reference.
        what: what is waited for, for the message.
        timeout: seconds.
        error: type raised for a death or a missed deadline; an actor's own VimeError is raised as it is.
    """
    labels = {ref: label for label, ref in calls.items()}
    results: dict[str, Any] = {}
    failures: dict[str, BaseException] = {}
    deadline = time.monotonic() + timeout
    pending = list(labels)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            if failures:
                break
            late = ", ".join(sorted(labels[ref] for ref in pending))
            raise error(f"{what}: no answer from {late} within {timeout:.0f} s")
        for ref in done:
            try:
                results[labels[ref]] = ray.get(ref, timeout=60)
            except (RayError, GetTimeoutError, VimeError) as failure:
                if not failures:
                    deadline = min(deadline, time.monotonic() + _BLAME_SECONDS)
                failures[labels[ref]] = failure
    if failures:
        raise _blame(failures, what, error)
    return {label: results[label] for label in calls}


def _blame(failures: Mapping[str, BaseException], what: str, error: type[VimeError]) -> BaseException:
    """The failure that explains the others: a death, else an error raised on purpose, else whatever came first."""
    dead = [label for label, failure in failures.items() if isinstance(failure, RayActorError)]
    if dead:
        verb = "has" if len(dead) == 1 else "have"
        return error(f"{', '.join(dead)} {verb} died during: {what}")
    causes = {label: f.cause if isinstance(f, RayTaskError) else f for label, f in failures.items()}
    for cause in causes.values():
        if isinstance(cause, VimeError):
            return cause
    label, failure = next(iter(failures.items()))
    wrapped = error(f"{label} raised during: {what}: {type(causes[label]).__name__}: {causes[label]}")
    wrapped.__cause__ = failure
    return wrapped
