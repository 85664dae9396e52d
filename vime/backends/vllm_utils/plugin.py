"""What vLLM loads of vime by itself: a plug-in (entry point ``vllm.general_plugins``) and a worker extension.

The plug-in runs in the API server, in EngineCore and in every worker, before a worker is built; VLLM_PLUGINS, where it
is set, must name it. Both stay light: they are imported by processes that never see a weight.
"""

from __future__ import annotations

import contextlib
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
    """Methods that ``/collective_rpc`` calls on every worker: vLLM's own weight update routes answer with nothing."""

    weight_transfer_engine: Any  # vLLM's worker has it

    def vime_weight_state(self) -> dict[str, Any]:
        """What the worker's weight transfer engine knows: connection, plan, and its last update."""
        return self.weight_transfer_engine.session.state()

    def vime_abort_weight_update(self) -> dict[str, Any]:
        """End an update that nobody will finish, so that another can start: live tensors are put back, vLLM's "update
        already active" is cleared. What was written stays written."""
        from vime.backends.vllm_utils.adapter import clear_active_update

        self.weight_transfer_engine.session.abort()
        clear_active_update(self)
        return {}

    def vime_poison_weights(self) -> dict[str, Any]:
        """Overwrite what the plan writes with NaN."""
        self.weight_transfer_engine.session.model.poison()
        return {}

    def vime_weight_digests(self) -> dict[str, Any]:
        """Name -> digest (as text: 64-bit integers do not survive JSON readers) of all parameters and buffers."""
        digests = self.weight_transfer_engine.session.model.digests()
        return {name: str(value) for name, value in digests.items()}
