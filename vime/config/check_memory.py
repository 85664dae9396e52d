"""Does it fit? An estimate of what trainer and engines take, said in numbers.

Weights, gradients and optimizer states are counted exactly. Activations are estimated: per token and layer the tensors
that autograd keeps; logits exist only in pieces of a bounded size. On GPUs only what misses by more than a tenth is
refused. On a CPU, where Ray ends the worker instead of an allocation failing, whatever is above Ray's share is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vime.backends.vllm_utils.command import cpu_kv_cache_bytes, max_model_len
from vime.config import Config
from vime.config.machine import GIB, Machine, size
from vime.models import FAMILIES
from vime.models.layout import ParallelLayout
from vime.models.spec import ModelSpec

TOLERANCE = 1.1
HEAP_SHARE = 0.05  # of activations: what the C library's heap keeps between micro-batches of unlike lengths
RAY_SHARE = 0.95  # Ray ends a worker when the machine's memory is fuller than this
LOGITS_BYTES = 2 * GIB  # a piece of log_probs.CHUNK_BYTES, four times: logits, their exponentials, gradients
PROCESS_BYTES = 1 * GIB  # Python, torch, vLLM or Megatron: code and buffers of one process on a CPU
CONTEXT_BYTES = 1 * GIB  # CUDA context and NCCL buffers of one process on a GPU
COLOCATED_SHARE, ALONE_SHARE = 0.6, 0.9  # what an engine takes of its GPU unless --vllm-gpu-memory-utilization says


@dataclass(frozen=True)
class Estimate:
    """Bytes, of the rank (or engine worker) that needs most."""

    parameters: int  # of one rank
    weights: int
    gradients: int
    optimizer: int
    activations: int
    reference: int  # in host memory: the reference model's weights, and a place for the policy's while those are in use
    tokens: int  # of one forward pass
    engine_weights: int  # of one engine worker
    engine_context: int  # KV cache of one answer of full length, of one engine worker

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def training(self) -> int:
        return self.states + self.activations

    def __str__(self) -> str:
        return (
            f"{size(self.training)} (weights {size(self.weights)}, gradients {size(self.gradients)}, optimizer "
            f"{size(self.optimizer)}, activations of {self.tokens} tokens {size(self.activations)})"
        )


def estimate(config: Config, spec: ModelSpec, device: str) -> Estimate:
    """What the run takes. The layout must be valid (check_sizes)."""
    layout = ParallelLayout.from_config(config, spec)
    bf16 = config.train.dtype == "bf16" or (config.train.dtype == "auto" and device == "cuda")
    width = 2 if bf16 else 4
    dense, experts = count_parameters(spec, layout)
    parameters = dense + experts
    state = 12 if bf16 else 8  # two moments, and the fp32 copy of bf16 weights
    if config.parallel.use_distributed_optimizer:
        optimizer = state * dense // (layout.dp * layout.cp) + state * experts // layout.edp
    else:
        optimizer = state * parameters
    gradient = 4 if config.parallel.accumulate_allreduce_grads_in_fp32 else width
    reference = config.algorithm.use_kl_loss or config.algorithm.kl_coef > 0
    tokens = tokens_per_pass(config, spec) // layout.cp
    workers = config.cluster.rollout_num_gpus_per_engine
    groups = max(1, spec.num_query_groups // workers)
    return Estimate(
        parameters=parameters,
        weights=width * parameters,
        gradients=gradient * parameters,
        optimizer=optimizer,
        activations=_activations(config, spec, layout, tokens, width),
        reference=2 * width * parameters if reference else 0,
        tokens=tokens,
        engine_weights=width * sum(count_parameters(spec, ParallelLayout(world_size=1))) // workers,
        engine_context=2 * spec.num_layers * groups * spec.kv_channels * width * max_model_len(config, spec),
    )


def tokens_per_pass(config: Config, spec: ModelSpec) -> int:
    """Tokens of the largest forward pass: a micro-batch, or the longest sequence where that is more."""
    if config.train.loss_type == "sft_loss":
        longest = config.rollout.rollout_max_context_len or 0
    else:
        longest = min(config.rollout.rollout_max_response_len, max_model_len(config, spec))
    if config.train.use_dynamic_batch_size:
        return max((config.train.max_tokens_per_gpu or 0) * config.parallel.context_parallel_size, longest)
    return longest * config.train.micro_batch_size


def check_memory(config: Config, spec: ModelSpec, machine: Machine) -> list[str]:
    """What does not fit, each with the numbers and what would help."""
    needs = estimate(config, spec, machine.device)
    if machine.device == "cpu":
        return [] if machine.joined else _on_cpu(config, spec, needs, machine)
    return [*(_on_gpu(config, needs, machine.gpu_bytes) if machine.gpu_bytes else []), *_host(config, needs, machine)]


def _on_gpu(config: Config, needs: Estimate, memory: int) -> list[str]:
    problems = []
    room = memory - config.train.train_memory_margin_bytes - CONTEXT_BYTES
    if needs.training > room * TOLERANCE:
        problems.append(
            f"a trainer rank needs about {needs}, but a GPU has {size(memory)}, of which --train-memory-margin-bytes "
            f"and the CUDA context leave {size(room)}; {_advice(config, needs, room)}"
        )
    if config.train.loss_type == "sft_loss":
        return problems
    share = engine_share(config)
    engine = needs.engine_weights + needs.engine_context
    if engine > memory * share:
        problems.append(
            f"an engine worker needs {size(needs.engine_weights)} for weights and {size(needs.engine_context)} "
            f"for the KV cache of one answer of full length, but has {share:.0%} of {size(memory)}; raise "
            "--vllm-gpu-memory-utilization or --rollout-num-gpus-per-engine, or lower --rollout-max-context-len"
        )
    if config.cluster.colocate and config.cluster.offload_rollout is False:
        left = room - memory * share
        if needs.training > left + memory * (TOLERANCE - 1):
            problems.append(
                f"a trainer rank needs about {needs}, but with --no-offload-rollout an engine keeps {share:.0%} of "
                f"{size(memory)} while the trainer works, which leaves {size(max(left, 0))}; let engines sleep, or "
                f"lower --vllm-gpu-memory-utilization"
            )
    elif config.cluster.colocate:
        stays = needs.states if config.cluster.offload_train is False else needs.weights
        if stays + memory * share > memory * TOLERANCE:
            what = "weights, gradients and optimizer" if config.cluster.offload_train is False else "weights"
            problems.append(
                f"the trainer's {what} ({size(stays)}) and an engine's {share:.0%} of {size(memory)} do not fit "
                f"one GPU together; lower --vllm-gpu-memory-utilization (now {share}) or cut the trainer over more GPUs"
            )
    return problems


def _advice(config: Config, needs: Estimate, room: int) -> str:
    if needs.states > room:
        first = "" if config.parallel.use_distributed_optimizer else "--use-distributed-optimizer, "
        return f"{first}more GPUs, or a larger tensor, pipeline or expert parallel size would help"
    if config.train.recompute_granularity != "full":
        return "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 would help"
    return "a lower --max-tokens-per-gpu or --rollout-max-response-len, or a larger context parallel size would help"


def engine_share(config: Config) -> float:
    """Part of a GPU's memory that an engine takes."""
    said = config.rollout.vllm.get("gpu-memory-utilization")
    try:
        return float(said)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return COLOCATED_SHARE if config.cluster.colocate else ALONE_SHARE


def _host(config: Config, needs: Estimate, machine: Machine) -> list[str]:
    cluster = config.cluster
    moved = needs.optimizer if cluster.colocate and cluster.offload_train is not False else 0
    total = (moved + needs.reference) * cluster.actor_num_gpus_per_node
    if total <= machine.host_bytes:
        return []
    return [
        f"the {cluster.actor_num_gpus_per_node} ranks of a node keep {size(moved)} of optimizer (while engines "
        f"generate) and {size(needs.reference)} for the reference model each in host memory, {size(total)} in all, "
        f"but the host has {size(machine.host_bytes)}; --use-distributed-optimizer or more nodes would help"
    ]


def rank_on_cpu(needs: Estimate) -> int:
    """Bytes of one trainer process. Measured peaks (fp32, 2,048 or 4,096 tokens, 6 to 16 layers): 0.90 to 0.95."""
    return needs.training + int(HEAP_SHARE * needs.activations) + needs.reference + PROCESS_BYTES


def _on_cpu(config: Config, spec: ModelSpec, needs: Estimate, machine: Machine) -> list[str]:
    ranks = config.cluster.world_size
    engines = 0 if config.train.loss_type == "sft_loss" else config.cluster.num_rollout_gpus
    trainer = rank_on_cpu(needs)
    cache = cpu_kv_cache_bytes(config, spec) if engines else 0
    engine = needs.engine_weights + cache + PROCESS_BYTES
    total = ranks * trainer + engines * engine
    if total <= machine.host_bytes * RAY_SHARE:
        return []
    return [
        f"the run needs about {size(total)}, but this machine has {size(machine.host_bytes)}, of which Ray lets "
        f"{RAY_SHARE:.0%} be used before it ends workers: "
        f"{ranks} trainer ranks, each {needs} (and {size(PROCESS_BYTES)} of program); {engines} engine workers, "
        f"each {size(engine)}, of which {size(cache)} are KV cache"
    ]


def count_parameters(spec: ModelSpec, layout: ParallelLayout) -> tuple[int, int]:
    """Parameters on the fullest rank: those of attention, dense layers and embeddings, and those of experts."""
    family = FAMILIES[spec.family]
    dense = experts = 0
    for has_experts in spec.moe_layers:
        for rule in family.layer_rules(spec, has_experts):
            count = sum(math.prod(shape) for _, shape in rule.tensors)
            if rule.is_expert:
                experts += count * (spec.num_experts or 0)
            elif rule.kind == "replicated":
                dense += count * layout.tp
            else:
                dense += count
    embedding = spec.padded_vocab_size(layout.tp, layout.vocab_divisible_by) * spec.hidden_size // layout.tp
    ends = spec.hidden_size + (embedding if spec.tied or layout.pp > 1 else 2 * embedding)
    return dense // (layout.tp * layout.pp) + ends, experts // (layout.etp * layout.ep * layout.pp)


def _activations(config: Config, spec: ModelSpec, layout: ParallelLayout, tokens: int, width: int) -> int:
    hidden, heads = spec.hidden_size, spec.num_attention_heads * spec.kv_channels
    groups = spec.num_query_groups * spec.kv_channels
    ffn = spec.ffn_hidden_size
    if spec.num_experts and spec.moe_ffn_hidden_size and spec.moe_router_topk:
        ffn = spec.moe_router_topk * (spec.moe_ffn_hidden_size + hidden // 2)  # tokens travel once per chosen expert
    if config.parallel.cuts_sequences(spec.num_experts is not None):
        hidden //= layout.tp  # between the matrices
    per_layer = (4 * hidden + (3 * heads + 4 * groups + 4 * ffn) // layout.tp) * width
    layers = -(-spec.num_layers // layout.pp)
    number = config.train.recompute_num_layers or 1
    if config.train.recompute_granularity != "full":
        kept = layers * per_layer
    elif config.train.recompute_method == "block":  # the first so many layers of each chunk, one at a time
        again = min(number * layout.vpp, layers)
        kept = again * hidden * width + max(layers - again, 1) * per_layer
    else:
        piece = min(number, -(-layers // layout.vpp))
        kept = -(-layers // piece) * hidden * width + piece * per_layer
    in_flight = layout.pp  # micro-batches that the first stage holds at once (1F1B)
    rows = spec.padded_vocab_size(layout.tp, layout.vocab_divisible_by) // layout.tp
    logits = min(LOGITS_BYTES, 16 * tokens * rows)
    logits += 4 * rows * spec.hidden_size  # the output weight's gradient in fp32
    if layout.pp > 1:  # the first stage holds most micro-batches, the last one the logits
        return max(tokens * kept * in_flight, tokens * kept + logits)
    return tokens * kept + logits
