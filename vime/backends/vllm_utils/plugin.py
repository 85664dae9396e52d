"""What vLLM loads of vime by itself: a plug-in (entry point ``vllm.general_plugins``) and a worker extension.

The plug-in runs in the API server, in EngineCore and in every worker, before a worker is built; VLLM_PLUGINS, where it
is set, must name it. Both stay light: they are imported by processes that never see a weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

BACKEND = "vime"
WORKER_EXTENSION = "vime.backends.vllm_utils.plugin.WorkerExtension"


def register() -> None:
    """Make ``--weight-transfer-config '{"backend": "vime"}'`` mean our engine. May be called more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(
            BACKEND, "vime.backends.vllm_utils.weight_transfer", "VimeWeightTransferEngine"
        )


class WorkerExtension:
    """Methods that ``/collective_rpc`` calls on every worker: vLLM's own weight update routes answer with nothing. vLLM
    makes it a base class of its worker, so that ``self`` is the worker.

    None of them raises (see Session.attempt): what went wrong is the answer's ``failure``. Each gives back the
    ``token`` of its call, by which the caller knows that the answer is to this call and not to an earlier one.
    """

    # vLLM's worker has them; its routes of the same names call the second and the third.
    weight_transfer_engine: Any
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]

    def vime_weight_state(self, token: str = "") -> dict[str, Any]:
        """Connection, plan, and how the last update went: Session.state."""
        return _answer(self, token, "state", self.weight_transfer_engine.session.state)

    def vime_start_weight_update(self, token: str, moved: list[int] | None = None) -> dict[str, Any]:
        """vLLM's own start_weight_update, after the end of an update that somebody has left open. ``moved``: for one by
        plan, the ranks whose memory is not where it was before."""

        def start() -> dict[str, Any]:
            _abort(self, leave=False)
            self.start_weight_update()
            if moved is not None:
                self.weight_transfer_engine.session.attempt("make_ready", moved)
            return {"failure": self.weight_transfer_engine.session.failure}

        return _answer(self, token, "start", start)

    def vime_update_weights(self, token: str, message: dict[str, Any]) -> dict[str, Any]:
        """vLLM's own update_weights with one message (session.UpdateInfo), and how it went."""

        def update() -> dict[str, Any]:
            self.update_weights(message)
            return {"failure": self.weight_transfer_engine.session.failure}

        return _answer(self, token, "update", update)

    def vime_abort_weight_update(self, token: str = "", leave: bool = False) -> dict[str, Any]:
        """End an update that nobody will finish, so that another can start: live tensors are put back, vLLM's "update
        already active" is cleared. What was written stays written. ``leave``: the channel too, so that ranks that are
        sending stop."""
        return _answer(self, token, "abort", lambda: _abort(self, leave))

    def vime_open_channel(self, token: str, info: dict[str, Any]) -> dict[str, Any]:
        """Meet the trainer ranks that send their weights (session.ChannelInfo)."""

        def open_channel() -> None:
            from vime.weight_sync.session import ChannelInfo

            self.weight_transfer_engine.session.attempt("open_channel", ChannelInfo(**info))

        return _answer(self, token, "connect", open_channel)

    def vime_disconnect(self, token: str) -> dict[str, Any]:
        """End what is open, unmap the trainer's memory, and forget the trainer."""

        def disconnect() -> None:
            try:
                _abort(self, leave=True)
            finally:
                self.weight_transfer_engine.session.close()

        return _answer(self, token, "disconnect", disconnect)

    def vime_poison_weights(self, token: str = "") -> dict[str, Any]:
        """Overwrite what the plan writes with NaN."""
        return _answer(self, token, "proof", self.weight_transfer_engine.session.model.poison)

    def vime_weight_digests(self, token: str = "") -> dict[str, Any]:
        """``digests``: name -> digest of every parameter and buffer, as text (JSON readers round 64-bit integers)."""
        digests = self.weight_transfer_engine.session.model.digests
        return _answer(
            self, token, "proof", lambda: {"digests": {name: str(value) for name, value in digests().items()}}
        )


def _abort(worker: WorkerExtension, leave: bool) -> None:
    from vime.backends.vllm_utils.adapter import clear_active_update

    worker.weight_transfer_engine.session.abort(leave)
    clear_active_update(worker)


def _answer(
    worker: WorkerExtension, token: str, phase: str, work: Callable[[], dict[str, Any] | None]
) -> dict[str, Any]:
    try:
        return {"token": token, "failure": None, **(work() or {})}
    except Exception as error:  # noqa: BLE001 - the caller raises it
        from vime.backends.vllm_utils.weight_transfer import logger

        where = f"worker {worker.weight_transfer_engine.session.number}"
        logger.exception("%s: %s", where, phase)
        return {"token": token, "failure": {"phase": phase, "where": where, "cause": f"{error!r}"}}
