"""What the trainer ranks do: build a real trainer, sync it, and report what was seen. Run in the pool's processes."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from tests.unit.backends.megatron_utils.trainer_helpers import trainer
from vime.backends.megatron_utils.hf_weights import load_hf_weights
from vime.backends.vllm_utils.client import EngineClient
from vime.models.layout import pieces
from vime.types import EngineAddress
from vime.weight_sync import arena

Call = tuple[int, str, int]  # number of the engine, what was asked of it, handles in the bucket
Digests = list[dict[str, str]]  # per worker: name -> digest of a parameter or buffer

_WATCHED = ("pause", "collective_rpc", "finish_weight_update", "resume")
_QUESTIONS = ("vime_weight_state", "vime_weight_digests", "vime_poison_weights", "vime_abort_weight_update")
COMMON = {"weight_sync.check_weight_update": "full", "weight_sync.weight_update_timeout": 90.0}


@contextlib.contextmanager
def calls_made() -> Iterator[list[Call]]:
    """What this rank asks of engines; of the weights that it sends, whether by plan or in a bucket."""
    calls: list[Call] = []
    kept = {name: getattr(EngineClient, name) for name in _WATCHED}

    def watch(name: str, method: Any) -> Any:
        @functools.wraps(method)
        def watched(self: EngineClient, *args: Any, **kwargs: Any) -> Any:
            what, handles = args[0] if name == "collective_rpc" else name, 0
            if what == "vime_update_weights":
                bucket = args[2].get("bucket")
                what = "bucket" if bucket is not None else "plan"
                handles = len(bucket.get("handles", ())) if bucket is not None else 0
            if what not in _QUESTIONS:
                calls.append((self.index, what, handles))
            return method(self, *args, **kwargs)

        return watched

    for name, method in kept.items():
        setattr(EngineClient, name, watch(name, method))
    try:
        yield calls
    finally:
        for name, method in kept.items():
            setattr(EngineClient, name, method)


def ask(address: EngineAddress, method: str) -> list[Any]:
    with EngineClient(address.url, address.index, timeout=60) as client:
        answers: list[Any] = client.collective_rpc(method, "")
    for answer in answers:
        assert answer["failure"] is None, answer
    return answers


def digests(address: EngineAddress) -> Digests:
    return [answer["digests"] for answer in ask(address, "vime_weight_digests")]


def as_loaded(rank: int, checkpoint: str, addresses: list[EngineAddress]) -> list[Digests]:
    """What fresh engines hold: they are connected (a digest of packed weights needs the plan), and nothing is sent."""
    with trainer(rank, checkpoint, COMMON) as built:
        built.connect_rollout_engines(addresses)
        found = [digests(address) for address in addresses]
    _give_up_shared_memory()
    return found


def sync(
    rank: int,
    options: dict[str, Any],
    checkpoints: dict[str, str],
    sets: dict[str, list[EngineAddress]],
    bucketed: bool,
    export: str | None,
    spoil: str | None = None,
) -> dict[str, Any]:
    """Bring checkpoint "b" and then "a" into every engine set, and report.

    The first update of a connection, of "b", is the one in which the planned and the bucketed path prove each other;
    the second is by plan alone. With ``bucketed``, a second connection brings "b" and "a" by buckets alone. ``export``:
    directory that takes the trainer's weights, "a", afterwards. ``spoil``: parameter of rank 0 in which a bit of "a" is
    wrong.

    Returns:
        Engine set -> list of updates: ``weights`` ("b" or "a"), ``version``, ``calls`` of this rank, ``stats``, and on
        rank 0 per engine ``digests`` and ``states``.
    """
    report: dict[str, Any] = {name: [] for name in sets}
    transports = ("planned", "bucketed") if bucketed else ("planned",)
    version = 0
    with trainer(rank, checkpoints["b"], {**COMMON, **options}) as built:
        held = pieces(built.spec, built.layout, rank)
        for transport, name in itertools.product(transports, sets):
            addresses = sets[name]
            built.config.weight_sync.update_weight_transport = transport
            built._engines = None  # a connection of its own, which proves itself
            built.connect_rollout_engines(addresses)
            for weights in ("b", "a"):
                load_hf_weights(checkpoints[weights], built._data(), held, built.spec)
                if spoil is not None and rank == 0 and weights == "a":
                    built.named_params[0, spoil].data.view(torch.int32).view(-1)[-1] ^= 1
                version += 1
                with calls_made() as calls:
                    stats = built.update_weights(version)
                found = {"weights": weights, "version": version, "calls": calls, "stats": stats}
                if rank == 0:
                    found["digests"] = {address.index: digests(address) for address in addresses}
                    found["states"] = {address.index: ask(address, "vime_weight_state") for address in addresses}
                report[name].append(found)
        if export is not None:
            built.save_hf(export)
    _give_up_shared_memory()
    return report


def _give_up_shared_memory() -> None:
    """A trainer's ends with its process; this process goes on to the next trainer."""
    for shared in list(arena._ARENAS.values()):
        shared.close()
