"""Weight sync between trainer and engine layouts on two GPUs of one host: exactness, who reads what from where, speed.

    python benchmarks/weight_sync_layouts.py                               # two GPUs, about a quarter of an hour
    python benchmarks/weight_sync_layouts.py --models 30B-A3B --engines "one TP2"
    python benchmarks/weight_sync_layouts.py --device cpu --models 0.6B    # the same in miniature, without a GPU

Trainer ranks are stand-ins with parameters of the real names, shapes and cuts and random values; everything after that
is the real thing: Gloo and NCCL groups, UpdateWeightFromTensor, HTTP, vLLM engines with our plug-in. The first update
of every case proves itself: planned and bucketed path leave the same bytes in every parameter and buffer. Then two
updates with a full check, and some with the sampled one, which are measured, each after a rest. What the other paths
leave is compared with what the planned one has left.

Every layout meets one TP2 engine and two one-GPU engines. Processes see only their own GPU; then some cases again by
the bucketed path, through NCCL, with processes that see both GPUs, in reversed order, and with expandable segments.
Last, processes are killed while the workers of an engine copy.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import logging
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.layout_ranks import REST, Ranks, View, link_bandwidth, local_bandwidth, sync
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
    "DP2": {"world_size": 2},
}
ENGINES = {"one TP2": ((0, 2),), "two of one GPU": ((0, 1), (1, 2))}
TIMEOUT = 60.0
_VICTIMS = {"one TP2": "worker", "two of one GPU": "engine"}  # each model's engines are started once


VIEWS = (
    View("both GPUs", "both"),
    View("both GPUs, other order", "reversed"),
    View("own GPU, expandable segments", "own", expandable=True),
)


# ---------------------------------------------------------------------------------------------------- engines


class Engines:
    """The engines of one model: one of two workers, two of one. Those that are not in use sleep."""

    def __init__(self, config: Any, spec: ModelSpec, device: str, kinds: list[str], logs: Path) -> None:
        self.device = device
        self._made: dict[tuple[int, int], EngineProcess] = {}
        commands = {}
        for number, slot in enumerate(slot for kind in kinds for slot in ENGINES[kind]):
            workers = slot[1] - slot[0]
            sized = dataclasses.replace(
                config,
                cluster=dataclasses.replace(config.cluster, rollout_num_gpus=2, rollout_num_gpus_per_engine=workers),
            )
            gpus = list(range(*slot)) if device == "cuda" else []
            commands[slot] = engine_command(sized, spec, number, device=device, gpu_ids=gpus)
        for slot, command in commands.items():
            self._made[slot] = EngineProcess(command, logs / f"engine-{slot[0]}-{slot[1]}.log")
            self._made[slot].start()
        for process in self._made.values():
            process.wait_ready(600)
            if device == "cuda":
                EngineClient(process.url).sleep(2)

    @contextmanager
    def awake(self, kind: str) -> Iterator[list[EngineAddress]]:
        slots = ENGINES[kind]
        if self.device == "cuda":
            for slot in slots:
                EngineClient(self._made[slot].url).wake_up()
        yield self.addresses(kind)
        for slot in slots if self.device == "cuda" else ():
            if self._made[slot].alive():
                with suppress(EngineError):  # it is about to find out that a worker was killed
                    EngineClient(self._made[slot].url).sleep(2)

    def addresses(self, kind: str) -> list[EngineAddress]:
        return [
            EngineAddress(number, self._made[slot].url, slot[1] - slot[0], Slot(*slot))
            for number, slot in enumerate(ENGINES[kind])
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
        with bench.ranks(View()) as ranks:
            for kind in options.engines:
                with engines.awake(kind):
                    for case in options.cases:
                        if case != "EP2" or spec.num_experts:
                            bench.case(ranks, case, kind)
                    if kind == "two of one GPU":  # over the link, while nothing else reads the GPU it is read from
                        bench.case(ranks, "TP1, one GPU", kind, only=1)
                    if options.skip_views:
                        continue
                    bench.case(ranks, "TP2", kind, transport="bucketed")
                    if kind == "two of one GPU":  # NCCL wants a GPU per member: the engine where no rank is
                        bench.case(ranks, "TP1, one GPU", kind, transport="distributed", only=1)
        views = VIEWS if options.device == "cuda" and "one TP2" in options.engines and not options.skip_views else ()
        for view in views:
            with bench.ranks(view) as ranks, engines.awake("one TP2"):
                if not view.expandable:
                    bench.case(ranks, "TP1, one GPU", "one TP2")
                bench.case(ranks, "TP2", "one TP2")
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
    # (trainer, engines) -> by engine what the planned path has left there; weights depend on the trainer's layout only
    left: dict[tuple[str, str], dict[int, list[dict[str, str]]]] = dataclasses.field(default_factory=dict)

    @contextmanager
    def ranks(self, view: View) -> Iterator[Ranks]:
        made = Ranks(view, self.options.device)
        try:
            yield made
        finally:
            made.close()

    def case(self, ranks: Ranks, layout: str, kind: str, transport: str = "planned", only: int | None = None) -> None:
        """One trainer layout against one kind of engines, or the ``only`` one of them that is used."""
        sizes, used = LAYOUTS[layout], [only] if only is not None else list(range(len(ENGINES[kind])))
        slots = [ENGINES[kind][number] for number in used]
        addresses = [self.engines.addresses(kind)[number] for number in used]
        if sizes["world_size"] == 1:  # the second GPU has no rank: an engine, or worker, there has no slot
            addresses = [dataclasses.replace(a, slot=a.slot if a.slot and a.slot.end <= 1 else None) for a in addresses]
        self.config.weight_sync.update_weight_transport = transport
        started = time.perf_counter()
        args = (self.config, self.spec, sizes, addresses, self.options.rounds)
        found = ranks.run(sizes["world_size"], sync, *args)
        self.config.weight_sync.update_weight_transport = "planned"
        trainer = layout if transport == "planned" else f"{layout}, {transport}"
        kind += ", the other GPU's only" if only is not None else ""
        row: dict[str, Any] = {"model": self.model, "trainer": trainer, "engine": kind, "view": ranks.view.name}
        errors = [part["error"] for part in found if "error" in part]
        if errors:
            row["error"] = errors[0]
            log.warning("%s: %s", row, found[0].get("trace", errors[0]))
        elif wrong := self._differing(layout, kind, transport == "planned", found):
            row["error"] = f"left other bytes than the planned path in {wrong}"
        else:
            row |= self._figures(found, addresses, slots)
            if transport != "planned":
                row["worker"]["copy"] = None  # what is timed there is not the way over the link
            if transport == "bucketed":
                row["link"] = None  # of the plan, which this path does not use
        row["took"] = time.perf_counter() - started
        self.table.add(row)
        log.info("%s", row)

    def _differing(self, layout: str, kind: str, planned: bool, found: list[Any]) -> str:
        """Which worker holds other bytes than after the first planned case with these weights, which proved itself."""
        digests: dict[int, list[dict[str, str]]] = {}
        for part in found:
            digests |= part["digests"]
        first = self.left.setdefault((layout, kind), {})
        if planned:
            first.update({index: workers for index, workers in digests.items() if index not in first})
        for index, workers in digests.items():
            for number, (mine, theirs) in enumerate(zip(workers, first.get(index, workers), strict=True)):
                if mine != theirs or not mine:
                    return f"engine {index}, worker {number}"
        return ""

    def _figures(
        self, found: list[Any], addresses: list[EngineAddress], slots: list[tuple[int, int]]
    ) -> dict[str, Any]:
        stats = found[0]["stats"]
        measured = stats.get("sampled") or stats["off"]
        rounds = len(measured)
        states = {index: updates for part in found for index, updates in part["states"].items()}
        workers = [
            _reads([update[number] for update in states[address.index]], slot[0] + number, self.table.bandwidths)
            for address, slot in zip(addresses, slots, strict=True)
            for number in range(address.world_size)
        ]
        return {
            "leaders": [len({rank for rank, part in enumerate(found) if a.index in part["starts"]}) for a in addresses],
            "starts": sum(len(part["starts"]) for part in found) == rounds * len(addresses),
            "update": statistics.median(stat["seconds"] for stat in measured),
            "full": statistics.median(stat["seconds"] for stat in stats["full"]) if "full" in stats else None,
            "call": statistics.median(stat.get("update_seconds", 0.0) for stat in measured),
            "bytes": sum(worker["local"] + worker["link"] for worker in workers),
            "link": sum(worker["link"] for worker in workers),
            "crossed": found[0]["crossed"] / rounds if found[0]["crossed"] is not None else None,
            "worker": max(workers, key=lambda worker: worker["copy"] or 0.0),
            "workers": workers,
        }


def _reads(states: list[dict[str, Any]], gpu: int, bandwidths: dict[str, float | None]) -> dict[str, Any]:
    """What one worker, on this GPU, reads from where (rank i is on GPU i), what its copy takes (the median of its
    states after each update) and should take."""
    link = sum(count for rank, count in states[0]["bytes_by_rank"].items() if int(rank) != gpu)
    local = sum(states[0]["bytes_by_rank"].values()) - link
    copies = [state["seconds"]["copy"] for state in states if "copy" in state["seconds"]]
    at_link, at_local = bandwidths["link"] or bandwidths["local"] or 1.0, bandwidths["local"] or 1.0
    return {
        **{"local": float(local), "link": float(link)},
        "copy": statistics.median(copies) if copies else None,
        "predicted": local / at_local + link / at_link,
    }


def kills(bench: Bench) -> None:
    """A trainer rank whose memory is read over a link and from its own GPU, a worker, and an engine's server end by
    SIGKILL while an engine's workers copy."""
    for kind in bench.options.engines:
        for victim in ("trainer rank", _VICTIMS[kind]):
            kill: dict[str, Any] = {"model": bench.model, "victim": victim, "engine": kind, "seconds": 0.0}
            try:
                kill |= _kill(bench, kind, victim)
            except EngineError as error:  # it has not survived the one before
                kill["said"] = [f"not killed: {error}"]
            bench.table.kills.append(kill)
            log.info("%s", kill)
            bench.table.write()


def _kill(bench: Bench, kind: str, victim: str) -> dict[str, Any]:
    """``said`` by each rank, and after how many ``seconds``."""
    with bench.ranks(View()) as ranks, bench.engines.awake(kind):
        if victim == "trainer rank":
            pid = ranks.processes[1].pid or 0
        else:
            pid = _process(bench.engines.process(kind).pid or 0, victim)
        addresses = bench.engines.addresses(kind)
        ranks.start(2, sync, bench.config, bench.spec, LAYOUTS["PP2"], addresses, 100000, 0.0)
        came = ranks.wait_updating(240)
        if came:
            time.sleep(bench.table.call_seconds(bench.model, "PP2", kind) / 2)
            os.kill(pid, signal.SIGKILL)
        killed = time.perf_counter()
        found = [ranks.result(rank, TIMEOUT + 60) for rank in range(2)]
        seconds = time.perf_counter() - killed
    said = [part.get("error", "no error") if isinstance(part, dict) else str(part) for part in found]
    return {"seconds": seconds, "said": said if came else ["not killed, no update came", *said]}


def _process(supervisor: int, which: str) -> int:
    """An engine's "engine", which is its server, or its last "worker"."""
    import psutil

    (server,) = psutil.Process(supervisor).children()
    if which == "engine":
        return server.pid
    leaves = [child for child in server.children(recursive=True) if not child.children()]
    return max(leaves, key=lambda child: child.memory_info().rss).pid  # others only look after resources


# ---------------------------------------------------------------------------------------------------- table


class Table:
    def __init__(self, options: argparse.Namespace) -> None:
        self.rows: list[dict[str, Any]] = []
        self.kills: list[dict[str, Any]] = []
        self.bandwidths: dict[str, float | None] = {}
        self._rounds = options.rounds
        self._device = (
            "2 x " + torch.cuda.get_device_name() if options.device == "cuda" else "a CPU, models in miniature"
        )
        default = "h200x2" if options.device == "cuda" else "cpu"
        self._path = options.out or Path(__file__).parent / f"weight_sync_layouts_{default}.md"

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.write()

    def call_seconds(self, model: str, trainer: str, engine: str) -> float:
        """Of the call in which an engine's workers copy, in a case that was measured; else 0."""
        case = {"model": model, "trainer": trainer, "engine": engine, "view": View().name}
        found = [row["call"] for row in self.rows if case.items() <= row.items() and "call" in row]
        return found[0] if found else 0.0

    def write(self) -> None:
        self._path.write_text(self.text())

    def text(self) -> str:
        measured = ", ".join(f"{k} {v / 1e9:.0f} GB/s" for k, v in self.bandwidths.items() if v)
        lines = [
            "# Weight sync between layouts on two devices",
            "",
            f"`python {shlex.join(['benchmarks/weight_sync_layouts.py', *sys.argv[1:]])}` on {datetime.date.today()}, "
            f"{self._device}, torch {torch.__version__}. Trainer ranks are stand-ins (parameters of the real names, "
            "shapes and cuts, random values). Every case was first proved equal, planned path and vLLM's "
            "own loading, in every byte of every parameter and buffer; then come two updates with the full check, and "
            f"{self._rounds} with the sampled one, which are measured (median), each after {REST:.1f} s of rest. What "
            "the other paths leave is compared with what the planned one has left; buckets are sent once.",
            "",
            f"Measured in the same run by torch's own copies, one way: {measured}. Predicted: local and link bytes of "
            "the slowest worker at these. Bytes over the link are of one update, all workers; counters also count the "
            "check, and what NCCL and others send.",
            "",
            "| model | trainer | engines | processes see | leaders | GB | link GB, planned | link GB, counted "
            "| slowest worker: local, link GB | copy | predicted | GB/s of it | update | with full check |",
            "| --- |" + " --- |" * 13,
            *(self._line(row) for row in self.rows),
            "",
        ]
        if self.kills:
            when = "half of the usual time after an engine's workers were told to copy"
            lines += [f"Killed {when} (PP2 trainer, deadline 60 s):", ""]
            for kill in self.kills:
                said = "; ".join(f"rank {rank}: {text[:300]}" for rank, text in enumerate(kill["said"]))
                case = f"{kill['model']}, {kill['engine']}, {kill['victim']}"
                lines.append(f"- {case}: after {kill['seconds']:.1f} s; {said}")
        return "\n".join(lines) + "\n"

    def _line(self, row: dict[str, Any]) -> str:
        start = [row["model"], row["trainer"], row["engine"], row["view"]]
        if "error" in row:
            return "| " + " | ".join([*start, row["error"][:300].replace("\n", " "), *[""] * 9]) + " |"
        worker, crossed = row["worker"], row["crossed"]
        copy = worker["copy"]
        rate = (worker["local"] + worker["link"]) / copy / 1e9 if copy else 0.0
        cells = [
            *start,
            " and ".join(map(str, row["leaders"])) + ("" if row["starts"] else " (starts counted wrong)"),
            f"{row['bytes'] / 1e9:.2f}",
            f"{row['link'] / 1e9:.3f}" if row["link"] is not None else "",
            f"{crossed / 1e9:.3f}" if crossed is not None else "",
            f"{worker['local'] / 1e9:.2f}, {worker['link'] / 1e9:.2f}" if copy else "",
            f"{copy * 1e3:.2f} ms" if copy else "",
            f"{worker['predicted'] * 1e3:.2f} ms ({copy / worker['predicted']:.2f}x)" if copy else "",
            f"{rate:.0f}" if copy else "",
            f"**{row['update'] * 1e3:.0f} ms**",
            f"{row['full'] * 1e3:.0f} ms" if row["full"] else "",
        ]
        return "| " + " | ".join(cells) + " |"


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
    both = Ranks(View("both GPUs", "both"), options.device)
    table.bandwidths = {"link": both.run(1, link_bandwidth)[0], "local": both.run(1, local_bandwidth)[0]}
    both.close()
    for model in options.models:
        run_model(options, model, folder, table)
    print(table.text())


if __name__ == "__main__":
    main()
