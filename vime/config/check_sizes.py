"""Sizes that do not divide or do not fit together."""

from __future__ import annotations

from collections.abc import Iterator

from vime.config import Config
from vime.config.machine import Machine
from vime.errors import ConfigError
from vime.models.layout import ParallelLayout
from vime.models.spec import ModelSpec

_CPU_EXPERT_ALIGNMENT = 32  # of vLLM's cpu_moe.py


def check_sizes(config: Config, spec: ModelSpec | None, machine: Machine | None) -> list[str]:
    """Problems of ranks, engines, batches and lengths; those of the model's shape where ``spec`` is known."""
    problems = [*_layout(config, spec), *_batches(config), *_lengths(config, spec)]
    if config.train.loss_type != "sft_loss":
        problems += [*_engines(config), *_engine_model(config, spec)]
    problems += _dispatcher(config)
    if machine:
        problems += [*_devices(config, machine), *_experts_on_a_cpu(config, spec, machine)]
        problems += _split_prompts_on_a_cpu(config, machine)
    return problems


def _layout(config: Config, spec: ModelSpec | None) -> Iterator[str]:
    parallel = config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    if config.cluster.world_size % (tp * pp * cp):
        yield (
            f"{_ranks(config)} cannot be cut into --tensor-model-parallel-size {tp} x --pipeline-model-parallel-size "
            f"{pp} x --context-parallel-size {cp} = {tp * pp * cp}; the ranks must be a multiple of it"
        )
        return
    if spec is None:
        return
    try:
        yield from ParallelLayout.from_config(config, spec).validate(spec)
    except ConfigError as error:
        yield from error.problems
    stage_layers = spec.num_layers // pp
    recomputed = config.train.recompute_num_layers
    if recomputed and recomputed > stage_layers:
        yield f"--recompute-num-layers {recomputed} is more than the {stage_layers} layers of a pipeline stage"


def _dispatcher(config: Config) -> Iterator[str]:
    parallel, model = config.parallel, config.model
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    if model.moe_token_dispatcher_type == "flex" and parallel.expert_model_parallel_size * etp == 1:
        yield (
            "--moe-token-dispatcher-type flex sends tokens between ranks, but with --expert-model-parallel-size 1 and "
            "--expert-tensor-parallel-size 1 every rank has all experts; use --moe-token-dispatcher-type alltoall"
        )


def _batches(config: Config) -> Iterator[str]:
    train, rollout = config.train, config.rollout
    answers, step = config.answers_per_rollout, config.global_batch_size
    product = f"--rollout-batch-size {rollout.rollout_batch_size}"
    if config.train.loss_type != "sft_loss":
        product += f" x --n-samples-per-prompt {rollout.n_samples_per_prompt}"
    if answers % step:
        near = max(divisor for divisor in range(1, min(step, answers) + 1) if answers % divisor == 0)
        yield (
            f"a rollout has {answers} answers ({product}), which --global-batch-size {step} does not divide; "
            f"the next smaller that does is {near}"
        )
    parallel = config.parallel
    split = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    if config.cluster.world_size % split:
        return
    dp = config.cluster.world_size // split
    batch = f"--global-batch-size {step}" if train.global_batch_size else f"the step of {step} answers ({product})"
    if step % dp:
        yield (
            f"{batch} is not divisible by the {dp} data parallel ranks ({_ranks(config)} / tensor x pipeline x "
            f"context parallel = {split})"
        )


def _lengths(config: Config, spec: ModelSpec | None) -> Iterator[str]:
    rollout, longest = config.rollout, config.rollout.rollout_max_context_len
    answer, prompt = rollout.rollout_max_response_len, config.data.rollout_max_prompt_len
    if longest is not None and answer >= longest:
        yield (
            f"--rollout-max-response-len {answer} leaves no room for a prompt in --rollout-max-context-len {longest}"
        )
    elif longest is not None and prompt is not None and prompt >= longest:
        yield f"--rollout-max-prompt-len {prompt} leaves no room for an answer in --rollout-max-context-len {longest}"
    if spec is None:
        return
    limit = spec.max_position_embeddings
    what = f"the model's max_position_embeddings ({limit})"
    if longest is not None and longest > limit:
        yield f"--rollout-max-context-len {longest} is more than {what}"
    if config.train.loss_type == "sft_loss":
        return
    if answer >= limit:
        yield f"--rollout-max-response-len {answer} leaves no room for a prompt in {what}"
    elif prompt is not None and longest is None and prompt + answer > limit:
        yield f"--rollout-max-prompt-len {prompt} + --rollout-max-response-len {answer} is more than {what}"
    evaluated = config.eval.eval_max_response_len
    if evaluated is not None and evaluated >= (longest or limit):
        bound = f"--rollout-max-context-len {longest}" if longest else what
        yield f"--eval-max-response-len {evaluated} leaves no room for a prompt in {bound}"


def _engines(config: Config) -> Iterator[str]:
    cluster = config.cluster
    gpus, size, ranks = cluster.num_rollout_gpus, cluster.rollout_num_gpus_per_engine, cluster.world_size
    given = "--rollout-num-gpus" if cluster.rollout_num_gpus else "--rollout-num-gpus (by default the trainer's ranks)"
    if gpus % size:
        yield (
            f"{given} {gpus} is not a multiple of --rollout-num-gpus-per-engine {size}: "
            f"{gpus // size} whole engines and {gpus % size} GPUs left over"
        )
    if cluster.colocate and gpus > ranks and gpus % size == 0 and ranks % size:
        yield (
            "--colocate puts the first engines on the trainer's GPUs and the others on GPUs of their own, but an "
            f"engine of --rollout-num-gpus-per-engine {size} would lie half on each: {_ranks(config)}, {given} {gpus}"
        )
    per_node = cluster.actor_num_gpus_per_node
    if cluster.colocate and cluster.actor_num_nodes > 1 and gpus % size == 0 and per_node % size:
        yield (
            f"an engine must lie on one node, but --rollout-num-gpus-per-engine {size} does not divide "
            f"--actor-num-gpus-per-node {per_node}"
        )


def _engine_model(config: Config, spec: ModelSpec | None) -> Iterator[str]:
    size = config.cluster.rollout_num_gpus_per_engine
    if spec is None or size == 1:
        return
    flag = f"--rollout-num-gpus-per-engine {size}"
    if spec.num_attention_heads % size:
        yield f"{flag}: vLLM cuts the {spec.num_attention_heads} attention heads over the GPUs of an engine"
    groups = spec.num_query_groups
    if max(groups, size) % min(groups, size):
        yield f"{flag}: vLLM cuts or repeats the {groups} key/value heads over the GPUs of an engine"
    if not all(spec.moe_layers) and spec.ffn_hidden_size % size:
        yield f"{flag}: vLLM cuts the MLP's width {spec.ffn_hidden_size} over the GPUs of an engine"
    width = spec.moe_ffn_hidden_size
    if spec.num_experts and width and width % size and "enable-expert-parallel" not in config.rollout.vllm:
        yield f"{flag}: vLLM cuts an expert's width {width} over the GPUs of an engine"


def _experts_on_a_cpu(config: Config, spec: ModelSpec | None, machine: Machine) -> Iterator[str]:
    """vLLM 0.32 pads narrower experts after loading, and cannot load weights into them again."""
    if machine.device != "cpu" or config.train.loss_type == "sft_loss" or spec is None or not spec.num_experts:
        return
    size = 1 if "enable-expert-parallel" in config.rollout.vllm else config.cluster.rollout_num_gpus_per_engine
    width = spec.moe_ffn_hidden_size or 0
    if width % size == 0 and width // size % _CPU_EXPERT_ALIGNMENT:
        yield (
            f"an expert's width is {width // size} in each worker (moe_intermediate_size {width}, "
            f"--rollout-num-gpus-per-engine {size}); on a CPU, vLLM takes new weights only for multiples of "
            f"{_CPU_EXPERT_ALIGNMENT}"
        )


def _split_prompts_on_a_cpu(config: Config, machine: Machine) -> Iterator[str]:
    if machine.device == "cpu" and config.rollout.vllm.get("enable-chunked-prefill") is True:
        yield (
            "--vllm-enable-chunked-prefill: on a CPU the engine dies of a split prompt whose request has a seed, and "
            "vime's have one; leave the flag out"
        )


def _devices(config: Config, machine: Machine) -> Iterator[str]:
    cluster = config.cluster
    if machine.device == "cpu" and config.model.moe_enable_deepep:
        yield (
            "--moe-enable-deepep needs GPUs, and this run is on the CPU; use --moe-token-dispatcher-type alltoall "
            "without it"
        )
    if machine.device != "cuda" or machine.joined:
        return  # CPU processes share the cores; what a joined cluster has, Ray says at once
    engines = 0 if config.train.loss_type == "sft_loss" else cluster.num_rollout_gpus
    needed = max(cluster.world_size, engines) if cluster.colocate else cluster.world_size + engines
    if cluster.actor_num_nodes > 1:
        yield (
            f"--actor-num-nodes {cluster.actor_num_nodes} needs a Ray cluster: start it with `ray start` on every "
            "node and name it by --ray-address or RAY_ADDRESS"
        )
    elif needed > machine.gpus:
        how = "shared by trainer and engines" if cluster.colocate else f"{cluster.world_size} for the trainer"
        if not cluster.colocate and engines:
            how += f" and {engines} for the engines; --colocate shares them"
        yield f"the run needs {needed} GPUs ({how}), but this machine shows {machine.gpus}"


def _ranks(config: Config) -> str:
    cluster = config.cluster
    return (
        f"{cluster.world_size} trainer ranks (--actor-num-nodes {cluster.actor_num_nodes} x "
        f"--actor-num-gpus-per-node {cluster.actor_num_gpus_per_node})"
    )
