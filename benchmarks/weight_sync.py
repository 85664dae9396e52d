"""Weights from a trainer process into a vLLM engine on the same GPU: vLLM's own ways, vime's, and a plain copy.

    python benchmarks/weight_sync.py                                   # one GPU of 139 GiB, about ten minutes
    python benchmarks/weight_sync.py --models 0.6B --rounds 20
    python benchmarks/weight_sync.py --device cpu                      # the same models in miniature, without a GPU

The trainer is a stand-in: parameters of the real names and shapes with random values, laid out in flat buffers in the
order of Megatron's own (dense and experts', last layer first), one rank. Everything after that is the real thing:
UpdateWeightFromTensor, HTTP, a vLLM engine in processes of its own, our plug-in in it. The first update proves itself:
the planned path and vLLM's own loading (the bucketed path) must leave the same bytes in every parameter and buffer,
quantised or not. Engines start with random weights (``--load-format dummy``), so no checkpoint is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import logging
import os
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.tiny import make_tokenizer
from vime.backends.megatron_utils.update_weight.update_weight_from_tensor import UpdateWeightFromTensor
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.command import EngineCommand, engine_command
from vime.backends.vllm_utils.engine import EngineProcess
from vime.config import CheckpointOptions, ClusterOptions, Config, RolloutOptions
from vime.errors import EngineError
from vime.models.layout import ParallelLayout, checkpoint_tensors, parameter_shapes, pieces
from vime.models.spec import ModelSpec, spec_from_hf
from vime.types import EngineAddress, Slot
from vime.weight_sync.arena import allocate

DENSE = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "0.6B": DENSE
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8},
    "4B": DENSE
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "num_key_value_heads": 8},
    "30B-A3B": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "tie_word_embeddings": False}
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768}
    | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
    | {"decoder_sparse_step": 1, "mlp_only_layers": []},
}
COMMON = {
    "vocab_size": 151936,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "attention_bias": False,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MINIATURE = {"num_hidden_layers": 2, "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512}
PAD = 256  # bytes between parameters' starts
log = logging.getLogger("benchmark")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--fp8", nargs="*", default=None, choices=list(MODELS), help="models to run quantised as well")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--skip-vllm", nargs="*", default=None, choices=("bf16", "fp8"), help="without vLLM's own paths"
    )
    parser.add_argument("--per-tensor-bytes", type=float, default=2e10, help="largest model for vLLM's per-tensor path")
    parser.add_argument("--together", type=float, default=None, help="bytes of engines that start at once")
    parser.add_argument(
        "--out", type=Path, default=None, help="file of the table (default: benchmarks/weight_sync_*.md)"
    )
    parser.add_argument("--logs", type=Path, default=None, help="folder of the engines' logs")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    # Each time that torch shares a view of a storage with another process, the storage's deleter gets one deeper: after
    # vLLM's two updates of 18,867 tensors, freeing the parameters overflows a stack of the usual 8 MiB.
    # So every engine is measured in a thread of its own.
    threading.stack_size(1 << 30)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="vime-benchmark-"))
    table = Table(options)
    tasks = make_tasks(options, folder)
    if options.together is None:
        options.together = 0.7 * torch.cuda.mem_get_info()[1] if options.device == "cuda" else 0
    while tasks:
        run_together(take(tasks, options.together), options, folder, table)
    print(table.text())


@dataclasses.dataclass
class Task:
    """One engine, and what is measured with it."""

    model: str
    quantization: str | None
    backend: str  # "vime", or vLLM's own "ipc"
    config: Config
    spec: ModelSpec
    bytes: int  # that its GPU memory takes, about

    @property
    def name(self) -> str:
        return f"{self.model}-{self.quantization or 'bf16'}-{self.backend}"

    def command(self, device: str) -> EngineCommand:
        ours = self.backend == "vime"
        command = engine_command(
            self.config, self.spec, 0, device=device, gpu_ids=gpu_ids(device), weight_transfer=ours
        )
        if ours:
            return command
        argv = (*command.argv, "--weight-transfer-config", json.dumps({"backend": self.backend}))
        env = command.env | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # vLLM's own path sends pickles
        return dataclasses.replace(command, argv=argv, env=env)


def make_tasks(options: argparse.Namespace, folder: Path) -> list[Task]:
    device = options.device
    fp8 = options.fp8 if options.fp8 is not None else ["30B-A3B"] if device == "cuda" else []
    skipped = ["bf16", "fp8"] if options.skip_vllm == [] or device == "cpu" else options.skip_vllm or []
    tasks = []
    for model in options.models:
        checkpoint = write_checkpoint(model, folder / f"checkpoint-{model}", device)
        spec = spec_from_hf(checkpoint)
        size = 2 * sum(volume(shape) for shape in checkpoint_tensors(spec).values())
        for quantization in [None] + ["fp8"] * (model in fp8):
            for backend in ["vime"] + ["ipc"] * ((quantization or "bf16") not in skipped):
                config = make_config(checkpoint, device, quantization)
                needs = size // (2 if quantization else 1) + (5 << 30)
                tasks.append(Task(model, quantization, backend, config, spec, needs))
    return tasks


def take(tasks: list[Task], most: float) -> list[Task]:
    """The next tasks whose engines fit into memory together: they start at the same time."""
    chosen = [tasks.pop(0)]
    while tasks and sum(task.bytes for task in chosen) + tasks[0].bytes <= most:
        chosen.append(tasks.pop(0))
    return chosen


def run_together(tasks: list[Task], options: argparse.Namespace, folder: Path, table: Table) -> None:
    """Start the engines of these tasks, let all of them sleep, and measure one after the other. Nothing starts or
    generates while something is measured."""
    device = options.device
    engines = [EngineProcess(task.command(device), folder / f"{task.name}.log") for task in tasks]
    ready: list[tuple[Task, EngineProcess]] = []
    try:
        for process in engines:
            process.start()
        for task, process in zip(tasks, engines, strict=True):
            try:
                process.wait_ready(600)
                if device == "cuda":
                    EngineClient(process.url).sleep(2)
                ready.append((task, process))
            except EngineError as error:
                log.exception("%s", task.name)
                table.note(f"{task.name}: {str(error)[-400:]}")
        for task, process in ready:
            try:
                if device == "cuda":
                    EngineClient(process.url).wake_up()
                measure = measure_vime if task.backend == "vime" else measure_vllm
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(measure, task, process.url, options, table).result()
            except Exception as error:  # the other models' figures are still worth having
                log.exception("%s", task.name)
                table.note(f"{task.name}: {type(error).__name__}: {str(error)[:400]}")
            finally:
                process.terminate()
            table.write()
            if device == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
    finally:
        for process in engines:
            process.terminate()


# ---------------------------------------------------------------------------------------------------- measuring


def measure_vime(task: Task, url: str, options: argparse.Namespace, table: Table) -> None:
    layout, config, spec = ParallelLayout(world_size=1), task.config, task.spec
    params = make_parameters(spec, layout, options.device)
    row = table.row(task)
    width = next(iter(params.values())).itemsize
    total = row["bytes"] = width * sum(volume(shape) for shape in checkpoint_tensors(spec).values())
    row["tensors"] = len(checkpoint_tensors(spec))
    row["plain"] = median(plain_copy(params, total), options.rounds)
    address = EngineAddress(0, url, 1, Slot(0, 1))
    for check in ("sampled", "full") if task.quantization is None else ("sampled",):
        config.weight_sync.check_weight_update = check
        update = UpdateWeightFromTensor(config, spec, layout, 0, params, options.device)
        started = time.perf_counter()
        update.connect_rollout_engines([address])
        row.setdefault("connect", time.perf_counter() - started)
        if check == "sampled":
            started = time.perf_counter()
            stats = update.update_weights(1)  # proves itself
            row["proof"] = time.perf_counter() - started
            log.info("%s: planned and bucketed path left the same bytes; %s", task.name, stats)
        else:
            for connected in update._engines.values():
                connected.proven = True  # it is: by the first of the two
        runs, workers = [], []
        for version in range(2, 2 + options.rounds):
            runs.append(update.update_weights(version))
            state: Any = EngineClient(url).collective_rpc("vime_weight_state")[0]
            workers.append(state["seconds"])
        worker = workers[runs.index(middle(runs))]
        log.info("%s %s: %s; worker %s", task.name, check, middle(runs), worker)
        row[f"copy, {check}"] = statistics.median(seconds["copy"] for seconds in workers)
        row[f"compare, {check}"] = statistics.median(seconds["compare"] for seconds in workers)
        row[f"update, {check}"] = statistics.median(run["seconds"] for run in runs)
        if check == "sampled":
            phases = middle(runs) | {f"worker {key}": value for key, value in worker.items()}
            row["phases"] = {
                key: round(value * 1e3, 2) for key, value in phases.items() if "seconds" in key or "worker" in key
            }
        table.write()
    config.weight_sync.update_weight_transport, config.weight_sync.check_weight_update = "bucketed", "off"
    update = UpdateWeightFromTensor(config, spec, layout, 0, params, options.device)
    update.connect_rollout_engines([address])
    row["bucketed"] = update.update_weights(100)["seconds"]


def measure_vllm(task: Task, url: str, options: argparse.Namespace, table: Table) -> None:
    layout = ParallelLayout(world_size=1)
    params = make_parameters(task.spec, layout, options.device)
    weights = checkpoint_views(task.spec, layout, params)
    row = table.row(task)
    with EngineClient(url) as client:
        client.init_weight_transfer({})
        row["vLLM packed"] = min(vllm_update(client, url, weights, packed=True) for _ in range(2))
        table.write()
        if sum(weight.nbytes for _, weight in weights) <= options.per_tensor_bytes:
            row["vLLM per tensor"] = min(vllm_update(client, url, weights, packed=False) for _ in range(2))
            table.write()


def write_checkpoint(model: str, folder: Path, device: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    shape = COMMON | MODELS[model]
    if device == "cpu":
        shape |= MINIATURE | {"torch_dtype": "float32"}
        shape |= {"num_experts": 8, "moe_intermediate_size": 256} if "num_experts" in shape else {}
    (folder / "config.json").write_text(json.dumps(shape))
    make_tokenizer().save_pretrained(str(folder))
    return str(folder)


def make_config(checkpoint: str, device: str, quantization: str | None) -> Config:
    engine: dict[str, Any] = {"vllm_load_format": "dummy", "vllm_enforce_eager": True}
    if device == "cuda":
        engine |= {"vllm_kv_cache_memory_bytes": str(2 << 30), "vllm_gpu_memory_utilization": "0.05"}
        engine |= {"vllm_quantization": quantization} if quantization else {}
    return Config(
        checkpoint=CheckpointOptions(hf_checkpoint=checkpoint),
        rollout=RolloutOptions(rollout_batch_size=8, n_samples_per_prompt=4, rollout_max_context_len=2048, vllm=engine),
        cluster=ClusterOptions(
            rollout_num_gpus=1, rollout_num_gpus_per_engine=1, actor_num_gpus_per_node=1, colocate=True
        ),
    )


def gpu_ids(device: str) -> list[int | str]:
    return [os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]] if device == "cuda" else []


def make_parameters(
    spec: ModelSpec, layout: ParallelLayout, device: str, rank: int = 0
) -> dict[tuple[int, str], torch.Tensor]:
    """Random parameters in flat buffers: one for the dense ones, one for the experts', in Megatron's order."""
    shapes = parameter_shapes(spec, layout, rank)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    params: dict[tuple[int, str], torch.Tensor] = {}
    for is_expert in (False, True):
        keys = [key for key in reversed(shapes) if (".local_experts." in key[1]) == is_expert]
        starts, end = {}, 0
        for key in keys:
            starts[key] = end
            end += -(-volume(shapes[key]) * dtype.itemsize // PAD) * PAD
        if not keys:
            continue
        buffer = torch.empty(end, dtype=torch.uint8, device="cuda") if device == "cuda" else allocate(end)
        flat = buffer[:end].view(dtype)
        for start in range(0, flat.numel(), 1 << 30):
            flat[start : start + (1 << 30)].normal_(0, 0.02)
        for key in keys:
            first = starts[key] // dtype.itemsize
            params[key] = flat[first : first + volume(shapes[key])].view(shapes[key])
    return {key: params[key] for key in shapes}


def volume(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


# ---------------------------------------------------------------------------------------------------- vLLM's own


def checkpoint_views(
    spec: ModelSpec, layout: ParallelLayout, params: dict[tuple[int, str], torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    """Whole checkpoint tensors. Those that Megatron keeps in several pieces (query groups) are put together."""
    found: dict[str, torch.Tensor] = {}
    shapes = checkpoint_tensors(spec)
    for piece in pieces(spec, layout, 0):
        param = params[piece.chunk, piece.param]
        view = piece.view(param)
        if view.shape == torch.Size(shapes[piece.tensor]):
            found[piece.tensor] = view
            continue
        if piece.tensor not in found:
            found[piece.tensor] = torch.empty(shapes[piece.tensor], dtype=param.dtype, device=param.device)
        found[piece.tensor][piece.slices].copy_(view)
    return [(name, found[name]) for name in shapes]


def vllm_update(client: EngineClient, url: str, weights: list[tuple[str, torch.Tensor]], packed: bool) -> float:
    """One update by vLLM's IPC engine, pause to resume. The views exist already; making them is not counted."""
    # 0.26's; 0.32, which is the CPU's, has it under other names.
    from vllm.distributed.weight_transfer import ipc_engine  # pyright: ignore[reportMissingImports]

    ipc: Any = ipc_engine
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    torch.cuda.synchronize()
    started = time.perf_counter()
    client.pause("wait")
    client.start_weight_update()
    size = {"packed_buffer_size_bytes": 1 << 30} if packed else {}
    ipc.IPCWeightTransferEngine.trainer_send_weights(
        iter(weights), ipc.IPCTrainerSendWeightsArgs(send_mode="http", url=url, packed=packed, **size)
    )
    client.finish_weight_update()
    client.reset_prefix_cache()
    client.resume()
    return time.perf_counter() - started


# ---------------------------------------------------------------------------------------------------- figures


def plain_copy(params: dict[tuple[int, str], torch.Tensor], total: int) -> Callable[[], float]:
    """Copies as many bytes as the model has, in pieces of up to 2 GiB, to other memory of the device."""
    storages = {param.untyped_storage().data_ptr(): param.untyped_storage() for param in params.values()}
    blocks: list[torch.Tensor] = []
    left, device = total, next(iter(params.values())).device
    for storage in storages.values():
        flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        for start in range(0, flat.numel(), 2 << 30):
            block = flat[start : start + min(2 << 30, left)]
            blocks.append(block)
            left -= block.numel()
    target = torch.empty(max(block.numel() for block in blocks), dtype=torch.uint8, device=device)

    def run() -> float:
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for block in blocks:
                target[: block.numel()].copy_(block)
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3
        started = time.perf_counter()
        for block in blocks:
            target[: block.numel()].copy_(block)
        return time.perf_counter() - started

    run()
    return run


def median(run: Callable[[], float], rounds: int) -> float:
    return statistics.median(run() for _ in range(rounds))


def middle(runs: list[dict[str, float]]) -> dict[str, float]:
    return sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]


COLUMNS = {
    "GB": lambda row: f"{row['bytes'] / 1e9:.2f}",
    "tensors": lambda row: str(row["tensors"]),
    "vLLM ipc, per tensor": lambda row: seconds(row.get("vLLM per tensor")),
    "vLLM ipc, packed 1 GiB": lambda row: seconds(row.get("vLLM packed")),
    "vime, bucketed": lambda row: seconds(row.get("bucketed")),
    "vime, planned": lambda row: f"**{seconds(row.get('update, sampled'))}**",
    "of it the copy": lambda row: seconds(row.get("copy, sampled")),
    "plain device copy": lambda row: seconds(row.get("plain")),
    "copy / plain": lambda row: ratio(row.get("copy, sampled"), row.get("plain")),
    "sampled check": lambda row: added(row, "sampled"),
    "full check": lambda row: added(row, "full"),
    "once: connect": lambda row: seconds(row.get("connect")),
}


def seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms" if value >= 0.01 else f"{value * 1e3:.2f} ms"


def ratio(a: float | None, b: float | None) -> str:
    return f"{a / b:.2f}" if a is not None and b else ""


def added(row: dict[str, Any], check: str) -> str:
    """What a check takes of the device, after the copy: in milliseconds and parts of the copy."""
    compare, copy = row.get(f"compare, {check}"), row.get(f"copy, {check}")
    return f"{seconds(compare)}, {compare / copy:.1%}" if compare is not None and copy else ""


class Table:
    def __init__(self, options: argparse.Namespace) -> None:
        self._rows: dict[str, dict[str, Any]] = {}
        self._notes: list[str] = []
        self._device = torch.cuda.get_device_name() if options.device == "cuda" else "a CPU, models in miniature, fp32"
        default = "h200" if "H200" in self._device else options.device
        self._path = options.out or Path(__file__).parent / f"weight_sync_{default}.md"

    def row(self, task: Task) -> dict[str, Any]:
        suffix = f", engine {task.quantization}" if task.quantization else ""
        return self._rows.setdefault(f"Qwen3-{task.model}{suffix}", {})

    def note(self, text: str) -> None:
        self._notes.append(text)

    def text(self) -> str:
        rows = {name: row for name, row in self._rows.items() if "bytes" in row}
        lines = [
            "# Weight sync",
            "",
            f"`python benchmarks/{shlex.join(sys.argv)}` on {datetime.date.today()}, {self._device}, torch "
            f"{torch.__version__}. A stand-in trainer process (parameters of the real names and shapes, random values) "
            "and one engine of one worker on the same device; whole updates are timed from pause to resume by the "
            "trainer's clock; bold is what a training step pays. Copies and checks are timed on the device. Before it "
            "is timed, each planned update is proved equal to vLLM's own loading.",
            "",
            "| model | " + " | ".join(COLUMNS) + " |",
            "| --- |" + " --- |" * len(COLUMNS),
            *(f"| {name} | " + " | ".join(show(row) for show in COLUMNS.values()) + " |" for name, row in rows.items()),
            "",
            "Phases of one planned update with the sampled check, in milliseconds:",
            "",
            *(f"- {name}: {json.dumps(row.get('phases', {}))}" for name, row in rows.items()),
            *(["", "Not measured:", *(f"- {note}" for note in self._notes)] if self._notes else []),
        ]
        return "\n".join(lines).replace("benchmarks/benchmarks/", "benchmarks/") + "\n"

    def write(self) -> None:
        self._path.write_text(self.text())


if __name__ == "__main__":
    main()
