"""The worker's end of a weight update as vLLM knows it: a WeightTransferEngine around vime's session.

It is called in this order: ``init`` once per connection, then per update ``start``, ``update`` (once by plan, or once
per bucket) and ``finish``. The trainer has paused the engine before ``start``. ``init`` and ``finish`` come by vLLM's
own routes, which answer with nothing, and a worker must not raise (Session.attempt): the trainer asks the
WorkerExtension how they went. The others come through that extension (plugin.py), which answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from vime.backends.vllm_utils.adapter import VllmModel, check_version, worker_number
from vime.weight_sync.session import InitInfo, Session, UpdateInfo

# Not this module's own name: vLLM configures only loggers below "vllm".
logger = init_logger("vllm.vime.weight_transfer")


@dataclass
class VllmInitInfo(InitInfo, WeightTransferInitInfo):
    """InitInfo, as vLLM wants it typed."""


@dataclass
class VllmUpdateInfo(UpdateInfo, WeightTransferUpdateInfo):
    """UpdateInfo, as vLLM wants it typed."""


class VimeWeightTransferEngine(WeightTransferEngine[VllmInitInfo, VllmUpdateInfo]):
    """One per worker."""

    init_info_cls = VllmInitInfo
    update_info_cls = VllmUpdateInfo
    supports_draft_weight_update = False

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Abstract in 0.26, so it must be here, and gone in 0.32. For a caller other than our trainer, which sends
        through UpdateWeightFromTensor and never comes here, an error is the only true answer."""
        raise NotImplementedError("vime's trainer sends weights with UpdateWeightFromTensor")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_version()
        model = VllmModel(self.model, self.model_config)
        self.session = Session(model, worker_number(self.vllm_config), torch.device(self.device))

    def init_transfer_engine(self, init_info: VllmInitInfo) -> None:
        self.session.attempt("connect", init_info)
        state = self.session.state()
        if state["failure"] is not None:
            logger.error("engine %d cannot be connected: %s", init_info.engine, state["failure"]["cause"])
            return
        for param, why in state["problems"].items():
            logger.warning("%s cannot be written by plan: %s", param, why)
        seconds = ", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in state["seconds"].items())
        logger.info("engine %d: %d copies planned (%s)", init_info.engine, state["copies"], seconds)

    def start_weight_update(self) -> None:
        self.session.attempt("start")

    def receive_weights(self, update_info: VllmUpdateInfo) -> None:
        self.session.attempt("receive", update_info)

    def finish_weight_update(self) -> None:
        self.session.attempt("finish")

    def shutdown(self) -> None:
        self.session.close()
