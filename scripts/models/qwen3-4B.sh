# Shape of the model in Megatron-LM's flags: https://huggingface.co/Qwen/Qwen3-4B
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 2560
    --ffn-hidden-size 9728
    --num-attention-heads 32
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
