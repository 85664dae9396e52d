"""The command of an engine: what vLLM is started with, for a GPU as well, which this needs none of."""

from __future__ import annotations

import json
import os
import shlex
from typing import Any

import pytest

from vime.backends.vllm_utils.command import (
    CPU_KV_CACHE_MAX,
    EngineCommand,
    engine_command,
    max_model_len,
    needs_scale_out_flag,
)
from vime.backends.vllm_utils.sampling import SamplingParams
from vime.config import (
    CheckpointOptions,
    ClusterOptions,
    Config,
    DataOptions,
    EvalOptions,
    RolloutOptions,
)
from vime.errors import ConfigError
from vime.models.spec import ModelSpec

SPEC = ModelSpec(
    family="qwen3",
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=32,
    vocab_size=512,
    tied=False,
    qk_layernorm=True,
    qkv_bias=False,
    norm_epsilon=1e-6,
    rotary_base=1e4,
    max_position_embeddings=4096,
    dtype="bfloat16",
)


def config(
    cluster: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    eval: dict[str, Any] | None = None,
) -> Config:
    options: dict[str, Any] = {"rollout_batch_size": 4}
    return Config(
        checkpoint=CheckpointOptions(hf_checkpoint="/models/m"),
        rollout=RolloutOptions(**(options | (rollout or {}))),
        cluster=ClusterOptions(**(cluster or {})),
        data=DataOptions(**(data or {})),
        eval=EvalOptions(**(eval or {})),
    )


def gpu(config: Config, index: int = 0, version: str = "0.26.0") -> EngineCommand:
    size = config.cluster.rollout_num_gpus_per_engine
    ids = range(index * size, (index + 1) * size)
    return engine_command(config, SPEC, index, device="cuda", gpu_ids=ids, vllm_version=version)


def cpu(config: Config) -> EngineCommand:
    return engine_command(config, SPEC, 0, device="cpu", vllm_version="0.32.0")


def value(command: EngineCommand, flag: str) -> str:
    assert command.argv.count(flag) == 1, (flag, command.argv)
    return command.argv[command.argv.index(flag) + 1]


@pytest.mark.parametrize("passed", [{}, {"enable_sleep_mode": True}, {"vllm_enable-sleep-mode": True}])
@pytest.mark.parametrize("cluster", [{"colocate": True}, {"offload_rollout": True}, {"offload": True}])
def test_every_engine_can_sleep_exactly_once(cluster: dict, passed: dict) -> None:
    """S7: whatever earlier engines' commands were, each of four engines has the flag, and once."""
    run = config(cluster | {"actor_num_gpus_per_node": 4}, {"vllm": passed})
    before = dict(os.environ)
    commands = [gpu(run, index) for index in range(4)]
    assert [command.argv.count("--enable-sleep-mode") for command in commands] == [1] * 4
    assert len({command.argv for command in commands}) == 1
    assert [command.env["CUDA_VISIBLE_DEVICES"] for command in commands] == ["0", "1", "2", "3"]
    assert dict(os.environ) == before  # S8


def test_engines_of_their_own_gpus_do_not_sleep() -> None:
    assert "--enable-sleep-mode" not in gpu(config()).argv
    assert "--enable-sleep-mode" not in gpu(config({"colocate": False, "offload_rollout": False})).argv


def test_the_cpu_does_without_the_sleep_flag_that_vllm_refuses_there() -> None:
    for passed in ({}, {"enable_sleep_mode": True}):
        assert "--enable-sleep-mode" not in cpu(config({"colocate": True}, {"vllm": passed})).argv


def test_what_a_gpu_engine_is_started_with() -> None:
    command = gpu(config({"colocate": True, "rollout_num_gpus_per_engine": 2, "actor_num_gpus_per_node": 4}), index=1)
    assert command.argv[:2] == ("serve", "/models/m")
    assert value(command, "--tensor-parallel-size") == "2"
    assert command.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert command.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert value(command, "--dtype") == "bfloat16"
    assert value(command, "--logprobs-mode") == "processed_logprobs"
    assert value(command, "--generation-config") == "vllm"
    assert value(command, "--weight-transfer-config") == '{"backend": "vime"}'
    assert value(command, "--worker-extension-cls") == "vime.backends.vllm_utils.plugin.WorkerExtension"
    assert value(command, "--host") == "127.0.0.1"
    assert "--enforce-eager" not in command.argv
    assert value(command, "--gpu-memory-utilization") == "0.6"
    assert value(gpu(config()), "--gpu-memory-utilization") == "0.9"


def test_what_a_cpu_engine_is_started_with() -> None:
    command = cpu(config())
    assert value(command, "--dtype") == "float32"
    assert "--enforce-eager" in command.argv
    assert "--no-enable-chunked-prefill" in command.argv  # test_generate.py shows why
    assert command.env["OMP_NUM_THREADS"] == "1"
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert command.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    two = cpu(config({"rollout_num_gpus_per_engine": 2, "actor_num_gpus_per_node": 2}))
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in two.env  # several workers need it


def test_the_kv_cache_on_a_cpu_holds_the_answers_of_a_rollout_within_bounds() -> None:
    block = 128 * 2 * 2 * 2 * 32 * 4  # tokens, K and V, layers, heads, size, fp32

    def blocks(**rollout: int) -> float:
        command = cpu(
            config(rollout={"rollout_max_response_len": 100, **rollout}, data={"rollout_max_prompt_len": 100})
        )
        return int(value(command, "--kv-cache-memory-bytes")) / block

    assert blocks() == 4 * 2 + 1
    assert blocks(n_samples_per_prompt=8) == 32 * 2 + 1
    assert blocks(n_samples_per_prompt=8, server_concurrency=5) == 5 * 2 + 1
    assert blocks(rollout_batch_size=10**6, server_concurrency=10**6) * block == CPU_KV_CACHE_MAX


def test_context_length_comes_from_the_runs_own_limits() -> None:
    lengths: dict[str, Any] = {"rollout": {"rollout_max_response_len": 300}, "data": {"rollout_max_prompt_len": 200}}
    assert max_model_len(config(**lengths), SPEC) == 500
    assert max_model_len(config(**lengths, eval={"eval_max_response_len": 1000}), SPEC) == 1200
    assert max_model_len(config(**lengths, eval={"eval_max_response_len": 9000}), SPEC) == 4096
    assert max_model_len(config(rollout={"rollout_max_response_len": 300}), SPEC) == 4096
    assert max_model_len(config(rollout={"rollout_max_context_len": 777}), SPEC) == 777


def test_the_token_route_is_asked_for_where_it_must_be() -> None:
    assert not needs_scale_out_flag("0.26.0")
    assert needs_scale_out_flag("0.32.0+cpu")
    assert needs_scale_out_flag("1.0.0")
    assert "--enable-scale-out" not in gpu(config(), version="0.26.0").argv
    assert "--enable-scale-out" in gpu(config(), version="0.32.0").argv


def test_the_users_vllm_flags_go_first_and_appear_once() -> None:
    passed = {
        "gpu_memory_utilization": "0.3",
        "vllm_max_model_len": "99",
        "enable_prefix_caching": False,
        "lora-modules": ["a", "b"],
        "enforce_eager": True,
    }
    command = gpu(config(rollout={"vllm": passed}))
    assert value(command, "--gpu-memory-utilization") == "0.3"
    assert value(command, "--max-model-len") == "99"
    assert "--no-enable-prefix-caching" in command.argv
    assert value(command, "--lora-modules") == "a"
    assert command.argv[command.argv.index("--lora-modules") + 2] == "b"
    assert command.argv.count("--enforce-eager") == 1


def test_flags_that_vime_decides_are_refused_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        gpu(config(rollout={"vllm": {"port": "1", "tensor_parallel_size": "2", "max_num_seqs": "3"}}))
    assert len(caught.value.problems) == 2
    assert "--vllm-tensor-parallel-size cannot be set; use --rollout-num-gpus-per-engine" in str(caught.value)


def test_gpus_must_match_the_size_of_the_engine() -> None:
    run = config({"rollout_num_gpus_per_engine": 2, "actor_num_gpus_per_node": 2})
    with pytest.raises(ConfigError, match=r"engine 0 has GPUs \[5\], but --rollout-num-gpus-per-engine is 2"):
        engine_command(run, SPEC, 0, device="cuda", gpu_ids=[5], vllm_version="0.26.0")


def test_environment_of_the_trainer_stays_out() -> None:
    parent = {
        "PATH": "/bin",
        "RANK": "3",
        "MASTER_ADDR": "x",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "CUDA_VISIBLE_DEVICES": "7",
        "VLLM_PLUGINS": "other",
    }
    env = gpu(config()).environment(parent)
    assert env["PATH"] == "/bin"
    assert env["CUDA_VISIBLE_DEVICES"] == "0"
    assert env["VLLM_PLUGINS"] == "other,vime"
    assert not {"RANK", "MASTER_ADDR", "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_CPU_KVCACHE_SPACE"} & env.keys()
    assert parent["RANK"] == "3"


def test_what_an_engine_compiles_outlives_its_temporary_folder() -> None:
    command = gpu(config())
    assert command.environment({})["TORCHINDUCTOR_CACHE_DIR"] == command.environment({})["TORCHINDUCTOR_CACHE_DIR"]
    assert "vime-engine" not in command.environment({})["TORCHINDUCTOR_CACHE_DIR"]
    assert command.environment({"TORCHINDUCTOR_CACHE_DIR": "/mine"})["TORCHINDUCTOR_CACHE_DIR"] == "/mine"


def test_secrets_do_not_reach_logs() -> None:
    options = {"hf_token": "hf_secret", "model_loader_extra_config": '{"token":"hf_secret","threads":2}'}
    command = gpu(config(rollout={"vllm": options}))
    assert str(command.argv).count("hf_secret") == 2
    assert "hf_secret" not in str(command)
    assert "hf_secret" not in repr(command)
    shown = shlex.split(str(command))
    assert shown[-4:-1] == ["--hf-token", "***", "--model-loader-extra-config"]
    assert json.loads(shown[-1]) == {"token": "***", "threads": 2}


def test_engines_do_not_see_the_token_of_the_runs_ray() -> None:
    assert "RAY_AUTH_TOKEN" not in gpu(config()).environment({"RAY_AUTH_TOKEN": "hunter2"})


def test_port_is_added_when_it_is_known() -> None:
    with pytest.raises(ValueError, match="no port"):
        gpu(config()).full_argv()
    assert gpu(config()).with_port(81).full_argv()[-2:] == ["--port", "81"]


def test_sampling_of_rollout_and_evaluation() -> None:
    run = config(
        rollout={
            "rollout_max_response_len": 9,
            "rollout_temperature": 0.7,
            "rollout_stop": ["END"],
            "rollout_stop_token_ids": [4],
        },
        eval={"eval_max_response_len": 20, "eval_temperature": 0},
    )
    rollout = SamplingParams.from_config(run, eos_token_ids=(2, 4))
    assert rollout.body() == {
        "max_tokens": 9,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "logprobs": 0,
        "detokenize": True,
        "stop": ["END"],
        "include_stop_str_in_output": True,
        "stop_token_ids": [4, 2],
    }
    evaluation = SamplingParams.from_config(run, evaluation=True)
    assert (evaluation.temperature, evaluation.max_tokens, evaluation.top_p) == (0, 20, 1.0)
