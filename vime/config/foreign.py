"""Flags of slime, Megatron-LM and SGLang that people bring along, and what says the same thing here."""

from __future__ import annotations

_BY_CHECKPOINT = "leave it out, --hf-checkpoint says it"
_NO_TE = "leave it out; it belongs to TransformerEngine or apex, which vime does not use"

ADVICE: dict[str, str] = {
    # Megatron-LM
    "bf16": "write --dtype bf16 (the default on a GPU)",
    "fp16": "vime trains in bf16 or fp32: --dtype bf16",
    "fp8-format": "vime trains in bf16 or fp32: --dtype bf16",
    "params-dtype": "write --dtype bf16 or --dtype fp32",
    "max-position-embeddings": _BY_CHECKPOINT,
    "seq-length": "leave it out; sequences are packed, --max-tokens-per-gpu bounds a forward pass",
    "tokenizer-type": _BY_CHECKPOINT,
    "tokenizer-model": _BY_CHECKPOINT,
    "padded-vocab-size": "write --make-vocab-size-divisible-by",
    "init-method-std": "leave it out, weights come from --hf-checkpoint",
    "rope-scaling-factor": "RoPE scaling is not supported",
    "use-rope-scaling": "RoPE scaling is not supported",
    "train-iters": "write --num-rollout; one is rollout-batch-size * n-samples-per-prompt / global-batch-size steps",
    "train-samples": "write --num-rollout",
    "eval-iters": "evaluation runs over the whole of --eval-prompt-data",
    "lr-decay-samples": "write --lr-decay-iters",
    "lr-warmup-samples": "write --lr-warmup-iters",
    "data-parallel-size": "leave it out, it follows: ranks / (tensor * pipeline * context parallel sizes)",
    "transformer-impl": "leave it out; vime has its own layers",
    "use-mcore-models": "leave it out, it is always so",
    "use-flash-attn": "write --attention-backend flash",
    "use-cpu-initialization": "leave it out, weights come from --hf-checkpoint",
    "virtual-pipeline-model-parallel-size": "write --num-layers-per-virtual-pipeline-stage",
    "ckpt-format": "leave it out, it is always torch_dist",
    "finetune": "leave it out; without --load a run starts at rollout 0 from --hf-checkpoint",
    "distributed-backend": "leave it out: nccl on GPUs, gloo on CPUs",
    "distributed-timeout-minutes": "write --train-timeout SECONDS",
    "tensorboard-dir": "set the environment variable TENSORBOARD_DIR, beside --use-tensorboard",
    "tp-comm-overlap": _NO_TE,
    "no-gradient-accumulation-fusion": "leave it out, it is always so",
    "no-masked-softmax-fusion": _NO_TE,
    "no-rope-fusion": _NO_TE,
    "no-bias-swiglu-fusion": "leave it out",
    "moe-permute-fusion": _NO_TE,
    "moe-flex-dispatcher-backend": "write --moe-enable-deepep",
    "multi-latent-attention": "this attention is not supported",
    "optimizer-cpu-offload": "write --colocate: the optimizer leaves the GPU while engines generate (--offload-train)",
    "no-load-rng": "write --no-load-optim to keep only the weights, or start without --load",
    "no-save-rng": "leave it out; random states are small and always saved",
    "log-interval": "leave it out, every step is logged",
    "position-embedding": "write --position-embedding-type rope",
    # slime
    "debug-rollout-only": "`vime check` starts nothing; --num-rollout 0 with --eval-interval 1 only evaluates",
    "debug-train-only": "write --loss-type sft_loss to train on the answers in the prompt file",
    "loss-mask-type": "leave it out; the loss mask follows from the chat template",
    "qkv-format": "leave it out, sequences are always packed",
    "eval-top-k": "write --rollout-top-k, which holds for evaluation as well",
    "rollout-skip-special-tokens": "leave it out; training works on token ids",
    "skip-eval-before-train": "evaluation before the first rollout is the baseline; leave out --eval-interval for none",
    "num-gpus-per-node": "write --actor-num-gpus-per-node",
    "num-steps-per-rollout": "write --global-batch-size (rollout-batch-size * n-samples-per-prompt / steps)",
    "rollout-num-nodes": "write --rollout-num-gpus",
    "rollout-function-path": "write --custom-generate-function-path for one answer at a time",
    "reward-model-type": "write --rm-type",
    "rm-path": "write --custom-rm-path module.function",
    "custom-reward-path": "write --custom-rm-path module.function",
    "partial-rollout": "answers are not carried over from one rollout to the next",
    "update-weights-interval": "weights are updated after every rollout",
    "kl-loss-coeff": "write --kl-loss-coef",
    "ref-update-interval": "the reference model stays what --ref-load says",
    "megatron-to-hf-mode": "leave it out, Hugging Face directories are read and written directly",
    "use-slime-router": "leave it out, engines are asked directly",
    "use-fault-tolerance": "leave it out; a dead engine is replaced, --engine-restarts times at most",
    "eval-config": "write --eval-prompt-data NAME PATH [NAME PATH ...]",
    "save-debug-rollout-data": "write --save-samples N; they are in the run's directory",
    "update-weight-mode": "write --update-weight-transport",
    "wandb-key": "log in with `wandb login`, or set WANDB_API_KEY; a secret does not belong on a command line",
    "wandb-group": "write --wandb-project, and --run-dir to name the run",
    "hf-model": "write --hf-checkpoint",
    "model": "write --hf-checkpoint",
    "model-name": "write --hf-checkpoint",
    "dataset": "write --prompt-data",
    "data-path": "write --prompt-data",
    "learning-rate": "write --lr",
    "epochs": "write --num-epoch",
    "num-epochs": "write --num-epoch",
    "temperature": "write --rollout-temperature",
    "batch-size": "write --rollout-batch-size (prompts per rollout), --global-batch-size (answers per optimizer step) "
    "or --micro-batch-size",
    "group-size": "write --n-samples-per-prompt",
    "num-generations": "write --n-samples-per-prompt",
    "gpu-memory-utilization": "write --vllm-gpu-memory-utilization",
    "max-model-len": "write --rollout-max-context-len",
    "tp": "write --tensor-model-parallel-size",
    "pp": "write --pipeline-model-parallel-size",
    "cp": "write --context-parallel-size",
    "ep": "write --expert-model-parallel-size",
    "etp": "write --expert-tensor-parallel-size",
}

_SGLANG = {
    "mem-fraction-static": "write --vllm-gpu-memory-utilization",
    "context-length": "write --rollout-max-context-len",
    "max-running-requests": "write --vllm-max-num-seqs",
    "tp-size": "write --rollout-num-gpus-per-engine",
    "server-concurrency": "write --server-concurrency",
    "log-level": "write --vllm-uvicorn-log-level",
}


def advice(word: str) -> str | None:
    """What to write instead of the flag ``--word``, if it is known from elsewhere."""
    word = word.removeprefix("--").replace("_", "-")
    if word.startswith("sglang-"):
        return "engines are vLLM here: " + _SGLANG.get(
            word.removeprefix("sglang-"), "vLLM's own options go as --vllm-X"
        )
    return ADVICE.get(word)
