"""Weight sync between trainer and engine layouts on two GPUs of one host: exactness, who reads what from where, speed.

    python benchmarks/weight_sync_layouts.py                               # two GPUs, about eight minutes
    python benchmarks/weight_sync_layouts.py --models 30B-A3B --layers 24 --cases TP2 EP2
    python benchmarks/weight_sync_layouts.py --device cpu --models 0.6B    # the same in miniature, without a GPU

Trainer ranks are stand-ins with parameters of the real names, shapes and cuts and random values; everything after that
is the real thing: Gloo groups, UpdateWeightFromTensor with a full check, HTTP, vLLM engines with our plug-in. The first
update of every case proves itself: planned and bucketed path leave the same bytes in every parameter and buffer.

Every layout meets one TP2 engine and two one-GPU engines. Processes see only their own GPU; then some cases again
with processes that see both, in reversed order, and with expandable segments. Last, processes are killed in the middle
of an update.
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
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.layout_ranks import Ranks, View, link_bandwidth, local_bandwidth, sync
from benchmarks.weight_sync import make_config, write_checkpoint
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.command import engine_command
from vime.backends.vllm_utils.engine import EngineProcess
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


VIEWS = (
    View("both GPUs", "both"),
    View("both GPUs, other order", "reversed"),
    View("own GPU, expandable segments", "own", expandable=True),
)


# ---------------------------------------------------------------------------------------------------- engines


class Engines:
    """The engines of one model: one of two workers, two of one. Those that are not in use sleep."""

    def __init__(self, config: Any, spec: ModelSpec, device: str, logs: Path) -> None:
        self.device = device
        self._made: dict[tuple[int, int], EngineProcess] = {}
        commands = {}
        for number, slot in enumerate(slot for slots in ENGINES.values() for slot in slots):
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
        if self.device == "cuda":
            for slot in slots:
                if self._made[slot].alive():
                    EngineClient(self._made[slot].url).sleep(2)

    def addresses(self, kind: str, ranks: int = 2) -> list[EngineAddress]:
        return [
            EngineAddress(number, self._made[slot].url, slot[1] - slot[0], Slot(*slot))
            for number, slot in enumerate(ENGINES[kind])
        ]

    def states(self, kind: str) -> list[list[dict[str, Any]]]:
        return [
            [state for state in EngineClient(self._made[slot].url).collective_rpc("vime_weight_state") if state]  # type: ignore[misc]
            for slot in ENGINES[kind]
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
    config.weight_sync.check_weight_update = "full"
    config.weight_sync.weight_update_timeout = TIMEOUT
    engines = Engines(config, spec, options.device, folder)
    ranks = Ranks(View(), options.device)
    try:
        cases = [case for case in options.cases if case != "EP2" or spec.num_experts]
        for kind in ENGINES:
            with engines.awake(kind):
                for case in cases:
                    one_case(options, model, case, kind, View(), ranks, engines, (config, spec), table)
        ranks.close()
        for view in VIEWS if options.device == "cuda" and not options.skip_views else ():
            ranks = Ranks(view, options.device)
            with engines.awake("one TP2"):
                one_case(options, model, "TP2", "one TP2", view, ranks, engines, (config, spec), table)
            ranks.close()
        if not options.skip_kills:
            kills(options, model, engines, config, spec, table)
    finally:
        ranks.close()
        engines.close()


def one_case(
    options: argparse.Namespace,
    model: str,
    case: str,
    kind: str,
    view: View,
    ranks: Ranks,
    engines: Engines,
    run: tuple[Any, ModelSpec],
    table: Table,
) -> None:
    sizes = LAYOUTS[case]
    addresses = engines.addresses(kind)
    if sizes["world_size"] == 1:  # the second GPU has no rank: that engine, or worker, has a slot of the first alone
        addresses = [dataclasses.replace(a, slot=a.slot if a.slot and a.slot.end <= 1 else None) for a in addresses]
    started = time.perf_counter()
    found = ranks.run(sizes["world_size"], sync, *run, sizes, addresses, options.rounds)
    row: dict[str, Any] = {"model": model, "trainer": case, "engine": kind, "view": view.name}
    errors = [part["error"] for part in found if "error" in part]
    if errors:
        row["error"] = errors[0]
        log.warning("%s %s %s %s: %s", model, case, kind, view.name, found[0].get("trace", errors[0]))
    else:
        states = engines.states(kind)
        row["leaders"] = [
            len({rank for rank, part in enumerate(found) if number in part["starts"]})
            for number in range(len(addresses))
        ]
        row["starts"] = sum(len(part["starts"]) for part in found) == options.rounds * len(addresses)
        stats = found[0]["stats"]
        row["update"] = statistics.median(stat["seconds"] for stat in stats)
        row["checked copy"] = statistics.median(stat["copy_seconds"] for stat in stats)
        row["copy"] = max(state["seconds"]["copy"] for workers in states for state in workers)
        row["bytes"], row["local"] = stats[-1]["bytes"], stats[-1]["local_share"]
        row["worker"] = _slowest(states, addresses, table.bandwidths)
    row["took"] = time.perf_counter() - started
    table.add(row)
    log.info("%s", {key: value for key, value in row.items() if key != "worker"})


def _slowest(
    states: list[list[dict[str, Any]]], addresses: list[EngineAddress], bandwidths: dict[str, float | None]
) -> dict[str, float]:
    """Local and link bytes of the worker for which the bandwidths predict most, and that prediction in seconds."""
    best = {"local": 0.0, "link": 0.0, "predicted": 0.0}
    for address, workers in zip(addresses, states, strict=True):
        for number, state in enumerate(workers):
            own = address.slot.start + number if address.slot is not None else -1
            local = sum(count for rank, count in state["bytes_by_rank"].items() if int(rank) == own)
            link = sum(state["bytes_by_rank"].values()) - local
            predicted = local / (bandwidths["local"] or 1.0) + link / (bandwidths["link"] or bandwidths["local"] or 1.0)
            if predicted >= best["predicted"]:
                best = {"local": float(local), "link": float(link), "predicted": predicted}
    return best


def kills(
    options: argparse.Namespace, model: str, engines: Engines, config: Any, spec: ModelSpec, table: Table
) -> None:
    """A worker, an engine's server, and a trainer rank end by SIGKILL while updates run one after the other."""
    import psutil

    for victim, kind in (("trainer rank", "one TP2"), ("worker", "one TP2"), ("engine", "two of one GPU")):
        ranks = Ranks(View(), options.device)
        with engines.awake(kind):
            addresses = engines.addresses(kind)
            before = engines.states(kind)[0][0]["connection"]
            ranks.start(2, sync, config, spec, LAYOUTS["TP2"], addresses, 100000)
            _until_updating(engines, kind, before)
            server = psutil.Process(engines.process(kind).pid or 0)
            if victim == "trainer rank":
                pid = ranks.processes[1].pid or 0
            elif victim == "worker":
                pid = max(server.children(recursive=True), key=lambda child: child.memory_info().rss).pid
            else:
                pid = server.pid
            os.kill(pid, signal.SIGKILL)
            killed = time.perf_counter()
            said = [ranks.result(rank, TIMEOUT + 60) for rank in range(2)]
            seconds = time.perf_counter() - killed
            errors = [part.get("error", "no error") if isinstance(part, dict) else str(part) for part in said]
            table.kills.append({"model": model, "victim": f"{victim} (pid {pid})", "seconds": seconds, "said": errors})
            log.info("%s", table.kills[-1])
        ranks.close()
        table.write()


def _until_updating(engines: Engines, kind: str, before: str | None) -> None:
    """Return when updates of another connection than ``before`` are going on."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        state = engines.states(kind)[0][0]
        if state["connection"] != before and (state.get("version") or 0) >= 3:
            return
        threading.Event().wait(0.02)
    raise TimeoutError("no update was seen")


# ---------------------------------------------------------------------------------------------------- table


class Table:
    def __init__(self, options: argparse.Namespace) -> None:
        self.rows: list[dict[str, Any]] = []
        self.kills: list[dict[str, Any]] = []
        self.bandwidths: dict[str, float | None] = {}
        self._device = (
            "2 x " + torch.cuda.get_device_name() if options.device == "cuda" else "a CPU, models in miniature"
        )
        default = "h200x2" if options.device == "cuda" else "cpu"
        self._path = options.out or Path(__file__).parent / f"weight_sync_layouts_{default}.md"

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        self._path.write_text(self.text())

    def text(self) -> str:
        measured = ", ".join(f"{k} {v / 1e9:.0f} GB/s" for k, v in self.bandwidths.items() if v)
        lines = [
            "# Weight sync between layouts on two devices",
            "",
            f"`python {shlex.join(['benchmarks/weight_sync_layouts.py', *sys.argv[1:]])}` on {datetime.date.today()}, "
            f"{self._device}, torch {torch.__version__}. Full check at every update; every case was first proved "
            "equal, planned path and vLLM's own loading, in every byte of every parameter and buffer.",
            f"Measured in the same run by torch's own copies, one way: {measured}. Predicted: local bytes and link "
            "bytes of the slowest worker at these.",
            "",
            "| model | trainer | engines | processes see | leaders | GB | local | slowest worker: local, link GB "
            "| copy | predicted | with full check | update |",
            "| --- |" + " --- |" * 11,
            *(self._line(row) for row in self.rows),
            "",
        ]
        if self.kills:
            lines += ["Killed in the middle of an update (TP2 trainer, deadline 60 s):", ""]
            for kill in self.kills:
                said = "; ".join(f"rank {rank}: {text[:300]}" for rank, text in enumerate(kill["said"]))
                lines.append(f"- {kill['model']}, {kill['victim']}: after {kill['seconds']:.1f} s; {said}")
        return "\n".join(lines) + "\n"

    def _line(self, row: dict[str, Any]) -> str:
        start = [row["model"], row["trainer"], row["engine"], row["view"]]
        if "error" in row:
            return "| " + " | ".join([*start, row["error"][:300].replace("\n", " "), *[""] * 7]) + " |"
        worker = row["worker"]
        return (
            "| "
            + " | ".join(
                [
                    *start,
                    " and ".join(map(str, row["leaders"])) + ("" if row["starts"] else " (starts counted wrong)"),
                    f"{row['bytes'] / 1e9:.2f}",
                    f"{row['local']:.1%}",
                    f"{worker['local'] / 1e9:.2f}, {worker['link'] / 1e9:.2f}",
                    *(f"{row[key] * 1e3:.2f} ms" for key in ("copy",)),
                    f"{worker['predicted'] * 1e3:.2f} ms ({row['copy'] / worker['predicted']:.2f}x)",
                    f"{row['checked copy'] * 1e3:.2f} ms",
                    f"**{row['update'] * 1e3:.0f} ms**",
                ]
            )
            + " |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.6B", "30B-A3B"])
    parser.add_argument("--layers", type=int, default=0, help="of every model (default: all it has)")
    parser.add_argument("--cases", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-views", action="store_true")
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
