# Shape of the model in Megatron-LM's flags: https://huggingface.co/Qwen/Qwen2.5-0.5B (Instruct alike)
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 896
    --ffn-hidden-size 4864
    --num-attention-heads 14
    --group-query-attention
    --num-query-groups 2
    --kv-channels 64
    --add-qkv-bias
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --position-embedding-type rope
    --rotary-base 1000000
    --use-rotary-position-embeddings
    --disable-bias-linear
    --vocab-size 151936
)
