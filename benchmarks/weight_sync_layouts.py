"""Weight sync between trainer and engine layouts on two GPUs of one host: exactness, who reads what from where, speed.

    python benchmarks/weight_sync_layouts.py                               # two GPUs, about twenty minutes
    python benchmarks/weight_sync_layouts.py --models 30B-A3B --engines "one TP2"
    python benchmarks/weight_sync_layouts.py --device cpu --models 0.6B    # the same in miniature, without a GPU

Trainer ranks are stand-ins with parameters of the real names, shapes and cuts; everything after that is the real thing:
Gloo and NCCL groups, UpdateWeightFromTensor, HTTP, vLLM engines with our plug-in. Their values depend on the tensor and
the place in it alone (known_weights.py), and others come with every update. The first update of every case proves
itself: planned path and vLLM's own loading leave the same bytes in every parameter and buffer. Then two updates with a
full check, and some with the sampled one, which are measured, each after a rest. After the last one an engine must hold
what it held after the first case, whatever the layout and the path.

Every layout meets one TP2 engine and two one-GPU engines. Trainer ranks see only their own GPU; then some cases again
by the bucketed path, through NCCL, with ranks that see both GPUs, in reversed order, and with expandable segments, and
with an engine whose workers have the GPUs in reversed order. Last, processes are killed in the middle of an update.

The program ends with 1 where something does not hold (layout_table.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.layout_ranks import OWN, Ranks, View, link_bandwidth, local_bandwidth, sync
from benchmarks.layout_table import TIMEOUT, Table
from benchmarks.weight_sync import make_config, write_checkpoint
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.command import engine_command
from vime.backends.vllm_utils.engine import EngineProcess
from vime.config import Config
from vime.errors import EngineError
from vime.models.spec import ModelSpec, spec_from_hf
from vime.types import EngineAddress, Slot

log = logging.getLogger("benchmark")
LAYOUTS: dict[str, dict[str, int]] = {
    "TP1, one GPU": {"world_size": 1},
    "TP2": {"world_size": 2, "tp": 2},
    "PP2": {"world_size": 2, "pp": 2},
    "CP2": {"world_size": 2, "cp": 2},
    "EP2": {"world_size": 2, "ep": 2},
    "TP2 EP2": {"world_size": 2, "tp": 2, "ep": 2, "etp": 1},
    "DP2": {"world_size": 2},
}
REVERSED = "one TP2, GPUs 1 and 0"
# Of every engine the GPUs of its workers.
ENGINES = {"one TP2": ((0, 1),), "two of one GPU": ((0,), (1,)), REVERSED: ((1, 0),)}
BOTH, OTHER = View("both GPUs", "both"), View("both GPUs, other order", "reversed")
EXPANDABLE = View("own GPU, expandable segments", "own", expandable=True)
VIEWS = ((BOTH, "one TP2"), (OTHER, "one TP2"), (EXPANDABLE, "one TP2"), (OWN, REVERSED), (OTHER, REVERSED))
# Transport and victim; those of the 0.6B model only come first. What ends an engine comes last: they are started once.
KILLS = {
    "one TP2": (
        [("planned", "trainer rank 1"), ("bucketed", "trainer rank 1")],
        [("planned", "trainer rank 0"), ("planned", "worker")],
    ),
    "two of one GPU": ([("bucketed", "trainer rank 0")], [("planned", "trainer rank 1"), ("planned", "engine")]),
    REVERSED: ([("bucketed", "worker")], []),
}


# ---------------------------------------------------------------------------------------------------- engines


class Engines:
    """The engines of one model. Those that are not in use sleep."""

    def __init__(self, config: Any, spec: ModelSpec, device: str, kinds: list[str], logs: Path) -> None:
        self.device = device
        self._made: dict[tuple[int, ...], EngineProcess] = {}
        commands = {}
        for number, gpus in enumerate(gpus for kind in kinds for gpus in ENGINES[kind]):
            sized = dataclasses.replace(
                config,
                cluster=dataclasses.replace(config.cluster, rollout_num_gpus=2, rollout_num_gpus_per_engine=len(gpus)),
            )
            seen = list(gpus) if device == "cuda" else []
            commands[gpus] = engine_command(sized, spec, number, device=device, gpu_ids=seen)
        for gpus, command in commands.items():
            self._made[gpus] = EngineProcess(command, logs / f"engine-{'-'.join(map(str, gpus))}.log")
            self._made[gpus].start()
        for process in self._made.values():
            process.wait_ready(600)
        for process in self._made.values() if device == "cuda" else ():  # vLLM wants no other to allocate meanwhile
            EngineClient(process.url).sleep(2)

    @contextmanager
    def awake(self, kind: str) -> Iterator[list[EngineAddress]]:
        processes = [self._made[gpus] for gpus in ENGINES[kind]] if self.device == "cuda" else []
        for process in processes:
            EngineClient(process.url).wake_up()
        yield self.addresses(kind)
        for process in processes:
            if process.alive():
                with suppress(EngineError):  # it is about to find out that a worker was killed
                    client = EngineClient(process.url)
                    client.collective_rpc("vime_abort_weight_update", "", True)  # or, its trainer dead, it cannot sleep
                    client.sleep(2)

    def addresses(self, kind: str) -> list[EngineAddress]:
        return [
            EngineAddress(number, self._made[gpus].url, len(gpus), Slot(min(gpus), max(gpus) + 1))
            for number, gpus in enumerate(ENGINES[kind])
        ]

    def process(self, kind: str, number: int = 0) -> EngineProcess:
        return self._made[ENGINES[kind][number]]

    def close(self) -> None:
        for process in self._made.values():
            process.terminate()


# ---------------------------------------------------------------------------------------------------- cases


def run_model(options: argparse.Namespace, model: str, folder: Path, table: Table) -> None:
    checkpoint = write_checkpoint(model, folder / model, options.device)
    if options.layers and options.device == "cuda":
        path = Path(checkpoint, "config.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": options.layers}))
    spec, config = spec_from_hf(checkpoint), make_config(checkpoint, options.device, None)
    config.weight_sync.weight_update_timeout = TIMEOUT
    engines = Engines(config, spec, options.device, options.engines, folder)
    bench = Bench(options, model, config, spec, engines, table)
    try:
        with bench.ranks(OWN) as ranks:
            for kind in options.engines:
                if kind == REVERSED:
                    continue
                with engines.awake(kind):
                    for case in options.cases:
                        if "EP2" not in case or spec.num_experts:
                            bench.case(ranks, case, kind)
                    if kind == "two of one GPU":  # over the link, while nothing else reads the GPU it is read from
                        bench.case(ranks, "TP1, one GPU", kind, only=1)
                    if options.skip_views:
                        continue
                    bench.case(ranks, "TP2", kind, transport="bucketed")
                    if kind == "two of one GPU":  # NCCL wants a GPU per member: the engine where no rank is
                        bench.case(ranks, "TP1, one GPU", kind, transport="distributed", only=1)
        for view, kind in VIEWS:
            if kind not in options.engines or options.skip_views or (options.device == "cpu" and view is not OWN):
                continue
            with bench.ranks(view) as ranks, engines.awake(kind):
                if not view.expandable:
                    bench.case(ranks, "TP1, one GPU", kind)
                bench.case(ranks, "TP2", kind)
                if kind == REVERSED and view is OWN:
                    bench.case(ranks, "DP2", kind)  # each worker has a replica on its own GPU, not that of its number
                    bench.case(ranks, "TP2", kind, transport="bucketed")
        if not options.skip_kills:
            kills(bench)
    finally:
        engines.close()


@dataclasses.dataclass
class Bench:
    """One model's engines, and the cases that are measured with them."""

    options: argparse.Namespace
    model: str
    config: Config
    spec: ModelSpec
    engines: Engines
    table: Table
    # Workers of every engine -> by engine what the first case has left, by plan, proved equal to vLLM's own loading.
    left: dict[tuple[int, ...], dict[int, list[dict[str, str]]]] = dataclasses.field(default_factory=dict)

    @contextmanager
    def ranks(self, view: View) -> Iterator[Ranks]:
        made = Ranks(view, self.options.device)
        try:
            yield made
        finally:
            made.close()

    def using(self, transport: str) -> Config:
        weight_sync = dataclasses.replace(self.config.weight_sync, update_weight_transport=transport)
        return dataclasses.replace(self.config, weight_sync=weight_sync)

    def case(self, ranks: Ranks, layout: str, kind: str, transport: str = "planned", only: int | None = None) -> None:
        """One trainer layout against one kind of engines, or the ``only`` one of them that is used."""
        sizes, used = LAYOUTS[layout], [only] if only is not None else list(range(len(ENGINES[kind])))
        gpus = [ENGINES[kind][number] for number in used]
        addresses = [self.engines.addresses(kind)[number] for number in used]
        if sizes["world_size"] == 1:  # the second GPU has no rank: an engine, or worker, there has no slot
            addresses = [dataclasses.replace(a, slot=a.slot if a.slot and a.slot.end <= 1 else None) for a in addresses]
        started = time.perf_counter()
        args = (self.using(transport), self.spec, sizes, addresses, self.options.rounds)
        found = ranks.run(sizes["world_size"], sync, *args)
        trainer = layout if transport == "planned" else f"{layout}, {transport}"
        plain, kind = kind, kind + (", the other GPU's only" if only is not None else "")
        row: dict[str, Any] = {"model": self.model, "trainer": trainer, "engine": kind, "view": ranks.view.name}
        errors = [part["error"] for part in found if "error" in part]
        if errors:
            row["error"] = errors[0]
            log.warning("%s: %s", row, found[0].get("trace", errors[0]))
        elif wrong := self._differing(plain, found):
            row["error"] = f"left other bytes than the first case in {wrong}"
        else:
            row |= self._figures(found, addresses, gpus)
            if transport != "planned":
                row["worker"]["copy"] = None  # what is timed there is not the way over the link
            if transport == "bucketed":
                row["bytes"] = row["link"] = None  # of the plan, which this path does not use
        row["took"] = time.perf_counter() - started
        self.table.add(row)
        log.info("%s", row)

    def _differing(self, kind: str, found: list[Any]) -> str:
        """Which worker holds other bytes than after the first case with these engines."""
        digests: dict[int, list[dict[str, str]]] = {}
        for part in found:
            digests |= part["digests"]
        first = self.left.setdefault(tuple(len(gpus) for gpus in ENGINES[kind]), {})
        for index, workers in digests.items():
            for number, (mine, theirs) in enumerate(zip(workers, first.setdefault(index, workers), strict=True)):
                if mine != theirs or not mine:
                    return f"engine {index}, worker {number}"
        return ""

    def _figures(self, found: list[Any], addresses: list[EngineAddress], gpus: list[tuple[int, ...]]) -> dict[str, Any]:
        stats = found[0]["stats"]
        measured = stats.get("sampled") or stats["off"]
        rounds = len(measured)
        states = {index: updates for part in found for index, updates in part["states"].items()}
        workers = [
            _reads([update[number] for update in states[address.index]], gpu, self.table.bandwidths)
            for address, mine in zip(addresses, gpus, strict=True)
            for number, gpu in enumerate(mine)
        ]
        return {
            "leaders": [len({rank for rank, part in enumerate(found) if a.index in part["starts"]}) for a in addresses],
            "starts": sum(len(part["starts"]) for part in found) == rounds * len(addresses),
            "update": statistics.median(stat["seconds"] for stat in measured),
            "updates": [stat["seconds"] for stat in measured],
            "full": statistics.median(stat["seconds"] for stat in stats["full"]) if "full" in stats else None,
            "call": statistics.median(stat.get("update_seconds", 0.0) for stat in measured),
            "bytes": sum(worker["local"] + worker["link"] for worker in workers),
            "link": sum(worker["link"] for worker in workers),
            "crossed": found[0]["crossed"] / rounds if found[0]["crossed"] is not None else None,
            "worker": max(workers, key=lambda worker: worker["copy"] or 0.0),
            "workers": workers,
            # For the log: how the last update went in every worker.
            "seconds": [state["seconds"] for updates in states.values() for state in updates[-1]],
            "phases": [{name: round(value, 5) for name, value in stat.items()} for stat in measured],
        }


def _reads(states: list[dict[str, Any]], gpu: int, bandwidths: dict[str, float | None]) -> dict[str, Any]:
    """What one worker, on this GPU, reads from where (rank i is on GPU i), what its copy takes (the median of its
    states after each update) and should take."""
    link = sum(count for rank, count in states[0]["bytes_by_rank"].items() if int(rank) != gpu)
    local = sum(states[0]["bytes_by_rank"].values()) - link
    copies = [state["seconds"]["copy"] for state in states if "copy" in state["seconds"]]
    at_link, at_local = bandwidths["link"] or bandwidths["local"] or 1.0, bandwidths["local"] or 1.0
    return {
        **{"local": float(local), "link": float(link), "engines": float(states[0].get("engine_bytes", 0))},
        "copy": statistics.median(copies) if copies else None,
        "predicted": local / at_local + link / at_link,
        "beside": local / at_local,  # of that, within its own GPU
    }


def kills(bench: Bench) -> None:
    """Trainer ranks, a worker, and an engine's server end by SIGKILL in the middle of an update."""
    for kind in bench.options.engines:
        small, always = KILLS[kind]
        for transport, victim in (small if bench.model == "0.6B" else []) + always:
            kill: dict[str, Any] = {"model": bench.model, "victim": victim, "engine": kind, "transport": transport}
            try:
                kill |= _kill(bench, kind, transport, victim)
            except EngineError as error:  # it has not survived the one before
                kill |= {"seconds": 0.0, "said": [f"not killed: {error}"]}
            bench.table.kills.append(kill)
            log.info("%s", kill)
            bench.table.write()


def _kill(bench: Bench, kind: str, transport: str, victim: str) -> dict[str, Any]:
    """``said`` by each rank, and after how many ``seconds``."""
    trainer = "PP2" if transport == "planned" else "TP2"
    usual = bench.table.usual_seconds(bench.model, trainer, kind, transport)
    with bench.ranks(OWN) as ranks, bench.engines.awake(kind):
        dies = int(victim[-1]) if "rank" in victim else None
        if dies is not None:
            pid = ranks.processes[dies].pid or 0
        else:
            pid = _process(bench.engines.process(kind).pid or 0, victim)
        addresses = bench.engines.addresses(kind)
        rounds = 100000 if transport == "planned" else 1  # of the one that is measured there are many buckets
        ranks.start(2, sync, bench.using(transport), bench.spec, LAYOUTS[trainer], addresses, rounds, 0.0)
        came = ranks.wait_updating(240)
        if came:
            time.sleep(usual / 2)
            os.kill(pid, signal.SIGKILL)
        killed = time.perf_counter()
        found = [ranks.result(rank, TIMEOUT + 60) if rank != dies else "killed" for rank in range(2)]
        seconds = time.perf_counter() - killed
    said = [part.get("error", "no error") if isinstance(part, dict) else str(part) for part in found]
    return {"seconds": seconds, "said": said if came else ["not killed, no update came", *said]}


def _process(supervisor: int, which: str) -> int:
    """An engine's "engine", which is its server, or one "worker"."""
    import psutil

    (server,) = psutil.Process(supervisor).children()
    if which == "engine":
        return server.pid
    leaves = [child for child in server.children(recursive=True) if not child.children()]
    return max(leaves, key=lambda child: child.memory_info().rss).pid  # others only look after resources


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.6B", "30B-A3B"])
    parser.add_argument("--layers", type=int, default=0, help="of every model (default: all it has)")
    parser.add_argument("--cases", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-views", action="store_true", help="and without the other transports")
    parser.add_argument("--skip-kills", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--logs", type=Path, default=None, help="folder of the engines' logs")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    folder = options.logs or Path(tempfile.mkdtemp(prefix="vime-benchmark-"))
    table = Table(options)
    both = Ranks(BOTH, options.device)
    table.bandwidths = {"link": both.run(1, link_bandwidth)[0], "local": both.run(1, local_bandwidth)[0]}
    both.close()
    for model in options.models:
        run_model(options, model, folder, table)
    table.finished = True
    table.write()
    print(table.text())
    sys.exit(1 if table.broken() else 0)


if __name__ == "__main__":
    main()
