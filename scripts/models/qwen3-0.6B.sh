# Shape of the model in Megatron-LM's flags: https://huggingface.co/Qwen/Qwen3-0.6B
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 1024
    --ffn-hidden-size 3072
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 8
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
)
