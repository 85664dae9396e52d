"""A trainer rank's part in sending whole tensors, bucket by bucket, to the engines that it leads; and what a failure in
that means, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vime.backends.megatron_utils.update_weight.bucketed import BucketStream, FailedElsewhere
from vime.backends.megatron_utils.update_weight.channels import Channels
from vime.backends.megatron_utils.update_weight.connected import Engine
from vime.backends.megatron_utils.update_weight.engine_update import EngineUpdate, for_each
from vime.backends.megatron_utils.update_weight.exchange import Exchange, error_value
from vime.errors import WeightSyncError


def send_buckets(
    stream: BucketStream,
    everybody: Exchange,
    rank: int,
    channels: Channels,
    to: Sequence[tuple[EngineUpdate, Engine]],
    version: int,
    unsent: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Stream all tensors. Collective: all ranks take part, also those that lead no engine.

    Args:
        stream: this rank's.
        everybody: the exchange of all ranks.
        to: the engines that this rank leads, if any.
        unsent: what could not be sent to an engine that does not open this rank's memory is added to it.

    Returns:
        What went wrong on this rank itself or in its slot, if anything did. Its engines have failed by that as well.

    Raises:
        WeightSyncError: the ranks have lost each other. Its ``engines`` are those that this rank leads.
    """
    engines = dict(to)
    updates = list(engines)

    def send_to(update: EngineUpdate, engine: Engine, bucket: dict[str, Any], payload: torch.Tensor) -> None:
        if not engine.apart:
            update.send({"version": version, "bucket": bucket})
        elif update.failure is None:
            with channels.sending(engine.address.index, payload, unsent) as how:
                whole = {key: value for key, value in bucket.items() if key != "handles"}
                update.send({"version": version, "bucket": whole | how})
                update.abort()

    def send(bucket: dict[str, Any], payload: torch.Tensor) -> None:
        for_each(updates, lambda update: send_to(update, engines[update], bucket, payload))

    try:
        failure = stream.run(send if updates else None)
    except Exception as error:
        # A rank did not come, or this one cannot: what it had still to bring is missing everywhere.
        value = error_value(error, "update", f"trainer rank {rank}")
        everybody.give_up(f"{value['where']}: {value['cause']}")
        lost = WeightSyncError(value["phase"], value["where"], value["cause"])
        for update in updates:
            update.fail(lost)
        failed = tuple(sorted({*value["engines"], *(engine.address.index for engine in engines.values())}))
        raise WeightSyncError(lost.phase, lost.where, lost.cause, failed) from error
    if failure is None:
        return []
    for update in updates:
        update.fail(failure)
    if isinstance(failure, FailedElsewhere):
        return []
    return [error_value(failure, "update", f"trainer rank {rank}")]
