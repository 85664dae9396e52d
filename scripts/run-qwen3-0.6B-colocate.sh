#!/usr/bin/env bash
# GRPO with Qwen3-0.6B on DAPO-Math-17k: four GPUs of one node, shared by trainer and engines. Flags given to this script
# come after those below it; `scripts/run-qwen3-0.6B-colocate.sh check` only says what would run, or what is wrong.
#
#   hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B
#   hf download --repo-type dataset zhuzilin/dapo-math-17k --local-dir data/dapo-math-17k
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL=${MODEL:-models/Qwen3-0.6B}
DATA=${DATA:-data/dapo-math-17k/dapo-math-17k.jsonl}
export TENSORBOARD_DIR=${TENSORBOARD_DIR:-runs/qwen_0.6b_colocate}

source scripts/models/qwen3-0.6B.sh

CLUSTER_ARGS=(
    --train-backend megatron
    --actor-num-nodes 1
    --actor-num-gpus-per-node 4
    --rollout-num-gpus 4
    --rollout-num-gpus-per-engine 1
    --colocate
)
CHECKPOINT_ARGS=(
    --hf-checkpoint "$MODEL"
    --ref-load "$MODEL"
)
DATA_ARGS=(
    --prompt-data "$DATA"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type deepscaler
)
ROLLOUT_ARGS=(
    --num-rollout 200
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 8192
    --rollout-temperature 1.0
    --global-batch-size 256
    --balance-data
)
ALGORITHM_ARGS=(
    --advantage-estimator grpo
    --use-kl-loss
    --kl-loss-coef 0.0
    --kl-loss-type low_var_kl
    --entropy-coef 0.0
    --eps-clip 0.2
    --eps-clip-high 0.28
)
OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
)
TRAIN_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --expert-model-parallel-size 1
    --expert-tensor-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 8192
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
    --train-memory-margin-bytes 2147483648
)
FLAGS=(
    "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}"
    "${ALGORITHM_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${TRAIN_ARGS[@]}" --use-tensorboard
)

if [[ ${1:-} == check ]]; then
    shift
    exec python -m vime.cli check "${FLAGS[@]}" "$@"
fi
exec python train.py "${FLAGS[@]}" "$@"
