"""One engine's weight update, as its slot leader drives it: pause, start, weights, finish, reset prefix cache, resume.

Only the leader, the lowest global rank of the engine's slot, makes these calls, so each is made once per engine.
"""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeAlias

from vime.backends.megatron_utils.update_weight.exchange import error_value
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import WORKER_DIED
from vime.errors import EngineError, WeightSyncError
from vime.types import EngineAddress

State = dict[str, Any]  # what a worker says of itself (weight_transfer.py)
_ABORT_SECONDS, _HEALTH_SECONDS = 10.0, 1.0


P = ParamSpec("P")
Step: TypeAlias = Callable[Concatenate["EngineUpdate", P], None]


def _step(phase: str) -> Callable[[Step[P]], Step[P]]:
    """Make a method a step: timed; skipped after a failure; its own failure kept."""

    def decorate(method: Step[P]) -> Step[P]:
        @functools.wraps(method)
        def step(self: EngineUpdate, *args: P.args, **kwargs: P.kwargs) -> None:
            if self.failure is not None:
                return
            started = time.perf_counter()
            try:
                method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - whatever it is, the leader must come to the next meeting
                self.fail(error, phase)
            finally:
                self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

        return step

    return decorate


class EngineUpdate:
    """Steps of one update of one engine.

    A step that fails is kept as ``failure``, and the steps after it do nothing: the leader has to come to the ranks'
    next meeting whatever happens to its engine. The engine then holds a mixture of weights. It refuses to generate
    (weight_guard.py) and can be updated again.

    Args:
        timeout: seconds that all steps together may take.

    Attributes:
        seconds: phase -> how long it took.
        knew_us: every worker had our shard map before :meth:`connect`.
        states: the workers' states after the last step that asked for them.
    """

    def __init__(self, address: EngineAddress, connection: str, timeout: float) -> None:
        self.address, self.connection = address, connection
        self.seconds: dict[str, float] = {}
        self.failure: dict[str, Any] | None = None
        self.states: list[State] = []
        self.knew_us = True
        self._client = EngineClient(address.url, address.index)
        self._end = time.monotonic() + timeout
        self._digests: list[State] = []
        self._aborted = False

    def __str__(self) -> str:
        return f"engine {self.address.index} ({self.address.url})"

    # ------------------------------------------------------------------ steps

    @_step("connect")
    def connect(self, info: Callable[[str], dict[str, Any]]) -> None:
        """Hand the shard map to every worker, unless they have it already. ``info``: InitInfo for an engine that runs
        on this node."""
        self._workers("vime_abort_weight_update")  # one that an earlier trainer has left open
        self.states = self._workers("vime_weight_state")
        if len(self.states) != self.address.world_size:
            raise EngineError(f"has {len(self.states)} workers, {self.address.world_size} were expected")
        if any(state.get("connection") != self.connection for state in self.states):
            self.knew_us = False
            self._client.init_weight_transfer(info(self.states[0]["node"]), timeout=self._left())
            self.states = self._workers("vime_weight_state")

    @_step("connect")
    def open_channel(self, info: dict[str, Any]) -> None:
        """Have every worker meet the ranks that send to it (ChannelInfo)."""
        self._workers("vime_open_channel", info)
        self._workers("vime_weight_state")

    @_step("disconnect")
    def disconnect(self) -> None:
        """Have every worker forget this trainer and unmap its memory. An engine that a failed update has left paused
        goes on; requests that it had queued, for which the weights may be no good, are aborted. (Then the guard answers
        new ones with an error until an update succeeds.)"""
        self._workers("vime_disconnect")
        if self._client.is_paused_for_update(timeout=self._left()):
            self._client.pause("abort", timeout=self._left(), for_update=True)
            self._client.resume(timeout=self._left(), for_update=True)

    @_step("pause")
    def pause(self) -> None:
        """Until nothing runs: answers in flight end, also those that somebody's pause had frozen; new ones wait."""
        self._client.pause("wait", timeout=self._left(), for_update=True)

    @_step("start")
    def start(self, moved: Collection[int] | None = None) -> None:
        """Open an update; one that somebody has left open ends. ``moved``: of one by plan, the ranks whose new arenas
        the workers have not been told yet."""
        self._workers("vime_start_weight_update", None if moved is None else sorted(moved))

    @_step("update")
    def send(self, message: dict[str, Any]) -> None:
        """One message of the update: the planned path's only one, or a bucket. Every worker says how it went."""
        self._workers("vime_update_weights", message)

    @_step("finish")
    def finish(self, version: int) -> None:
        """Commit the version, now that every worker has its weights, and have every worker confirm it."""
        self._client.finish_weight_update(version, timeout=self._left())
        self.states = self._workers("vime_weight_state")
        for number, state in enumerate(self.states):
            if (state.get("version"), state.get("connection")) != (version, self.connection):
                raise EngineError(f"worker {number} holds version {state.get('version')}, not {version}")

    @_step("resume")
    def resume(self) -> None:
        """Generate again, unless somebody has put it to sleep or paused it as well, who ends that himself."""
        self._client.reset_prefix_cache(timeout=self._left())
        self._client.resume(timeout=self._left(), for_update=True)

    @_step("proof")
    def poison(self) -> None:
        """Make every weight NaN, so that whatever the next path leaves out shows."""
        self._workers("vime_poison_weights")

    @_step("proof")
    def keep_digests(self) -> None:
        """Remember what one path has left in the engine."""
        self._digests = self._workers("vime_weight_digests")

    @_step("proof")
    def compare_digests(self) -> None:
        """The other path must have left the same bytes in every parameter and buffer of every worker."""
        for worker, (ours, theirs) in enumerate(zip(self._digests, self._workers("vime_weight_digests"), strict=True)):
            names, other = ours["digests"], theirs["digests"]
            differing = [name for name in names.keys() | other.keys() if names.get(name) != other.get(name)]
            if differing or not names:
                raise EngineError(
                    f"worker {worker}: the planned and the bucketed path left different bytes in "
                    f"{len(differing)} of {len(names)} tensors, for instance {min(differing, default='none')}; "
                    "this is a fault of vime: report it, and use --update-weight-transport bucketed meanwhile"
                )

    def fail(self, error: Exception, phase: str = "update") -> None:
        """Keep a failure, unless there is one: what comes of it says less. A worker's own phase ("version", "checksum")
        says more than that of the call."""
        if self.failure is not None:
            return
        value = error_value(error, phase, str(self))
        if isinstance(error, WeightSyncError):
            value["cause"] = f"{error.where}: {error.cause}"
        value["cause"] = value["cause"].removeprefix(f"{self}: ")  # an EngineError begins with whose it is
        if isinstance(error, EngineError):
            value["cause"] += self._health(error)
        self.failure = value | {"where": str(self), "engines": [self.address.index]}

    def abort(self) -> None:
        """After a failure: leave the engine in a state from which another update can start, and have its workers leave
        their channel, so that no rank goes on sending to them."""
        if self.failure is not None and not self._aborted:
            self._aborted = True
            with contextlib.suppress(EngineError):
                self._client.collective_rpc("vime_abort_weight_update", "", True, timeout=_ABORT_SECONDS)

    def close(self) -> None:
        """After the last step."""
        self.abort()
        self._client.close()

    # ------------------------------------------------------------------ inside

    def _workers(self, method: str, *args: Any) -> list[State]:
        """Call a method of every worker (plugin.py).

        Raises:
            WeightSyncError: the failure of the first worker that has one.
            EngineError: the answers are not to this call: vLLM's executor has lost count of its workers' answers.
        """
        token = uuid.uuid4().hex
        answers = self._client.collective_rpc(method, token, *args, timeout=self._left())
        for number, answer in enumerate(answers):
            if not isinstance(answer, dict) or answer.get("token") != token:
                raise EngineError(f"worker {number} answers to an earlier call; the engine must be replaced")
            if answer["failure"] is not None:
                raise WeightSyncError(**answer["failure"])
        return [answer for answer in answers if isinstance(answer, dict)]

    def _health(self, failed: EngineError) -> str:
        """What is to be said of the engine after a call that failed. Of one during which a process of it dies, vLLM
        says only "cancelled", for instance."""
        died = "; one of its processes has died, its log says which"
        if WORKER_DIED in str(failed):
            return died
        try:
            self._client.health(timeout=_HEALTH_SECONDS)
        except EngineError as error:
            if error.status == 503:
                return died
            if error.unreachable:
                return "; nobody answers at its address any more, its log may say why"
        return ""

    def _left(self) -> float:
        """Seconds to the deadline; never none at all, so that a call that comes too late names itself."""
        return max(self._end - time.monotonic(), 0.1)


def for_each(updates: Sequence[EngineUpdate], steps: Callable[[EngineUpdate], None]) -> None:
    """Take some steps with several engines at once."""
    if len(updates) <= 1:
        for update in updates:
            steps(update)
        return
    with ThreadPoolExecutor(len(updates)) as threads:
        list(threads.map(steps, updates))
