# Shape of the model in Megatron-LM's flags: https://huggingface.co/Qwen/Qwen3-235B-A22B
MODEL_ARGS=(
    --num-layers 94
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --qk-layernorm
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --position-embedding-type rope
    --rotary-base 1000000
    --use-rotary-position-embeddings
    --disable-bias-linear
    --vocab-size 151936
    --untie-embeddings-and-output-weights
    --moe-ffn-hidden-size 1536
    --num-experts 128
    --moe-router-topk 8
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
)
