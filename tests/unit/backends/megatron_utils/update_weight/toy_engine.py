"""An engine in a process of its own that answers vLLM's weight update routes, on the toy model: real HTTP, real shared
memory, real sessions; only the model is small and vLLM is not there. And the trainer's ranks that it is updated by.

An engine can be told to fail (:func:`fail_at`). Kinds of failure, of its next answer to one call:

* ``no``: refuse it, as a server that raises;
* ``slow N``: be busy for N seconds first, with everything else waiting, as vLLM's engine core does;
* ``die``: end by SIGKILL instead;
* ``worker``: have the last worker raise in its step;
* ``twice``: do it a second time as well;
* ``flip``: change one bit of what the first copy has brought;
* ``flip unseen``: the same, after the check;
* ``lost``, ``doubled``, ``altered``: of a bucket, that nothing comes of it, that it comes twice, or changed.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any
from urllib.parse import urlparse

import torch

from tests.unit.weight_sync.toy import ToyModel, flip_bit, loaded, random_tensors
from vime.backends.megatron_utils.update_weight.update_weight_from_tensor import UpdateWeightFromTensor
from vime.config import CheckpointOptions, Config, RolloutOptions, WeightSyncOptions
from vime.models.layout import ParallelLayout, checkpoint_tensors, parameter_shapes, pieces
from vime.models.spec import ModelSpec
from vime.types import EngineAddress, Slot
from vime.weight_sync import copy_cpu
from vime.weight_sync.arena import allocate
from vime.weight_sync.session import ChannelInfo, InitInfo, Session, UpdateInfo

SPEC = ModelSpec(
    family="qwen3_moe",
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=16,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=8,
    vocab_size=50,
    tied=False,
    qk_layernorm=True,
    qkv_bias=False,
    norm_epsilon=1e-6,
    rotary_base=1e4,
    max_position_embeddings=64,
    dtype="float32",
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=16,
    norm_topk_prob=True,
    moe_layers=(True, True),
    eos_token_ids=(2,),
)
SHAPES = checkpoint_tensors(SPEC)


def weights(seed: int) -> dict[str, torch.Tensor]:
    """A whole checkpoint."""
    return random_tensors(SHAPES, seed)


def expected_digests(seed: int, workers: int) -> list[dict[str, str]]:
    """Of an engine that has loaded that checkpoint by its own loader."""
    found = [loaded(SHAPES, weights(seed), rank, workers).digests() for rank in range(workers)]
    return [{name: str(value) for name, value in digests.items()} for digests in found]


# ---------------------------------------------------------------------------------------------- the engine


class _Server:
    """The state of one engine. As in vLLM, a second start is refused."""

    def __init__(self, workers: int) -> None:
        self.models = [ToyModel(SHAPES, rank, workers) for rank in range(workers)]
        self.sessions = [Session(model, rank, torch.device("cpu")) for rank, model in enumerate(self.models)]
        self.active = [False] * workers
        self.calls: list[str] = []
        self.devices: list[list[str]] = []  # of each bucket's payload
        self.arenas: dict[str, list[Any]] = {}  # rank -> kind, pid, inode of the memory it was told to read
        self.faults: dict[str, list[str]] = {}  # path -> what its next calls do
        self.paused = False
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/test/faults":
            self.faults = body
            return {}
        if path == "/test/calls":
            calls, self.calls, devices, self.devices = self.calls, [], self.devices, []
            return {"calls": calls, "devices": devices, "arenas": self.arenas}
        name = path if path != "/collective_rpc" else body["method"]
        with self.lock:
            self.calls.append(name)
            fault = self.faults.get(name, [])
            kind = fault.pop(0) if fault else "pass"
            if kind == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif kind == "worker":
                _raise_once(self.sessions[-1], _STEPS[name])
            elif kind == "flip":
                _flip_once(0)
            elif kind == "flip unseen":
                _flip(self.models[0].direct()["model.norm.weight"])
            elif kind == "lost":
                return {"results": [{"failure": None, "token": body["args"][0]} for _ in self.sessions]}
            elif kind == "doubled":
                self._do(path, body)
            elif kind == "altered":
                for handle in body["args"][1]["bucket"]["handles"].values():
                    flip_bit(handle, 5)
            elif kind.startswith("slow"):
                time.sleep(float(kind.split()[1]))
            elif kind != "pass":
                raise RuntimeError(kind)
            return self._do(path, body)

    def _do(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/is_paused":
            return {"is_paused": self.paused}
        if path == "/vime/paused":
            return {"for_update": self.paused}  # nobody else pauses it
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        elif path == "/reset_prefix_cache":
            return {"success": True}
        elif path == "/collective_rpc":
            if body["method"] == "vime_update_weights" and (bucket := body["args"][1].get("bucket")):
                self.devices.append(sorted(bucket.get("handles", ())))
            with ThreadPoolExecutor(len(self.sessions)) as workers:  # they meet in a channel
                calls = [
                    workers.submit(self._rpc, rank, body["method"], *body["args"][1:])
                    for rank in range(len(self.sessions))
                ]
                answers = [call.result() for call in calls]
            token = {"token": body["args"][0] if body["args"] else ""}
            return {"results": [{"failure": None, **answer, **token} for answer in answers]}
        elif path == "/init_weight_transfer_engine":
            for info in body["init_info"]["shards"]["ranks"]:
                found = [[arena[key] for key in ("kind", "pid", "inode")] for arena in info["arenas"]]
                self.arenas[str(info["rank"])] = found
            for session in self.sessions:
                session.attempt("connect", InitInfo(**body["init_info"]))
        elif path == "/start_weight_update":
            for rank in range(len(self.sessions)):
                self._start(rank)
        elif path == "/finish_weight_update":
            for rank, session in enumerate(self.sessions):
                if not self.active[rank]:
                    raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
                session.attempt("finish")
                self.active[rank] = False
        else:
            raise KeyError(path)
        return {}

    def _start(self, rank: int) -> None:
        if self.active[rank]:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.sessions[rank].attempt("start")
        self.active[rank] = True

    def _rpc(self, rank: int, method: str, *args: Any) -> dict[str, Any]:
        session = self.sessions[rank]
        if method == "vime_weight_state":
            return session.state()
        if method == "vime_weight_digests":
            return {"digests": {name: str(value) for name, value in session.model.digests().items()}}
        if method == "vime_poison_weights":
            session.model.poison()
        elif method == "vime_start_weight_update":
            session.abort()
            self.active[rank] = False
            self._start(rank)
            if args[0] is not None:
                session.attempt("make_ready", args[0])
            return {"failure": session.failure}
        elif method == "vime_update_weights":
            if not self.active[rank]:
                raise RuntimeError("start_weight_update must be called before update_weights.")
            session.attempt("receive", UpdateInfo(**args[0]))
            return {"failure": session.failure}
        elif method == "vime_open_channel":
            session.attempt("open_channel", ChannelInfo(**args[0]))
        elif method == "vime_disconnect":
            session.abort(True)
            self.active[rank] = False
            session.close()
        elif method == "vime_abort_weight_update":
            session.abort(*args)
            self.active[rank] = False
        else:
            raise KeyError(method)
        return {}


_STEPS = {
    "/init_weight_transfer_engine": "connect",
    "vime_start_weight_update": "start",
    "vime_update_weights": "receive",
    "/finish_weight_update": "finish",
}


def _raise_once(session: Session, step: str) -> None:
    def fail(*_: Any) -> None:
        delattr(session, step)
        raise RuntimeError("out of memory")

    setattr(session, step, fail)


def _flip(tensor: torch.Tensor) -> None:
    tensor.view(torch.int32)[(0,) * tensor.dim()] ^= 1 << 13


def _flip_once(number: int) -> None:
    run = copy_cpu.CpuCopier.run

    def run_and_flip(self: copy_cpu.CpuCopier) -> None:
        copy_cpu.CpuCopier.run = run
        run(self)
        _flip(self._targets[number])

    copy_cpu.CpuCopier.run = run_and_flip


def _serve(workers: int, ready: Connection) -> None:
    torch.set_num_threads(1)
    state = _Server(workers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}"))

        def _reply(self, body: dict[str, Any]) -> None:
            try:
                status, reply = 200, state.answer(urlparse(self.path).path, body)
            except Exception as error:  # noqa: BLE001 - as vLLM's server does
                message = f"Call to collective_rpc method failed: {error}"
                status, reply = 500, {"error": {"message": message, "code": 500}}
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    ready.send(server.server_address[1])
    server.serve_forever()


def processes() -> ForkServerContext:
    """Where engines and ranks come from: forks of a process that has imported torch, 0.1 s each instead of 4."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__, __name__.replace("toy_engine", "scenarios")])
    return context


class ToyEngine:
    """A running engine, from the test's side."""

    def __init__(self, index: int, slot: Slot | None, workers: int | None = None) -> None:
        self.workers = workers if workers is not None else (slot.end - slot.start if slot else 1)
        self._slot, self._index = slot, index
        context = processes()
        self._ready, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_serve, args=(self.workers, theirs), daemon=True)
        self.process.start()

    @property
    def address(self) -> EngineAddress:
        if not hasattr(self, "_url"):
            assert self._ready.poll(90), "the toy engine did not start"
            self._url = f"http://127.0.0.1:{self._ready.recv()}"
        return EngineAddress(self._index, self._url, self.workers, self._slot)

    def stop(self) -> None:
        self.process.kill()
        self.process.join(10)


def ask(address: EngineAddress, path: str, body: dict[str, Any] | None = None) -> Any:
    import requests

    reply = requests.post(address.url + path, json=body or {}, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply.json()


def calls(address: EngineAddress) -> list[str]:
    """What the engine was asked since the last time, in order."""
    return ask(address, "/test/calls")["calls"]


def fail_at(address: EngineAddress, call: str, *kinds: str) -> None:
    """Let the engine's next answers to a route, or to a worker's method, fail in these ways, one after the other."""
    ask(address, "/test/faults", {call: list(kinds)})


def digests(address: EngineAddress) -> list[dict[str, str]]:
    found = ask(address, "/collective_rpc", {"method": "vime_weight_digests", "args": []})["results"]
    calls(address)
    return [answer["digests"] for answer in found]


# ---------------------------------------------------------------------------------------------- the trainer


def make_config(**weight_sync: Any) -> Config:
    return Config(
        checkpoint=CheckpointOptions(hf_checkpoint="none"),
        rollout=RolloutOptions(rollout_batch_size=1),
        weight_sync=WeightSyncOptions(**({"check_weight_update": "full", "weight_update_timeout": 60.0} | weight_sync)),
    )


class Rank:
    """One trainer rank: parameters in an arena, cut as the layout says, without Megatron."""

    def __init__(self, rank: int, layout: ParallelLayout, **weight_sync: Any) -> None:
        self.rank, self.layout = rank, layout
        sizes = parameter_shapes(SPEC, layout, rank)
        flat, end = allocate(4 * sum(torch.Size(shape).numel() for shape in sizes.values())), 0
        self.params: dict[tuple[int, str], torch.Tensor] = {}
        for key, shape in sizes.items():
            count = 4 * torch.Size(shape).numel()
            self.params[key] = flat[end : end + count].view(torch.float32).view(shape)
            end += count
        self.update = UpdateWeightFromTensor(make_config(**weight_sync), SPEC, layout, rank, self.params, "cpu")

    def train(self, seed: int) -> None:
        """Replace the weights."""
        whole = weights(seed)
        for piece in pieces(SPEC, self.layout, self.rank):
            piece.view(self.params[piece.chunk, piece.param]).copy_(whole[piece.tensor][piece.slices])
