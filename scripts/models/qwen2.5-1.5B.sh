# Shape of the model in Megatron-LM's flags: https://huggingface.co/Qwen/Qwen2.5-1.5B (Instruct alike)
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 1536
    --ffn-hidden-size 8960
    --num-attention-heads 12
    --group-query-attention
    --num-query-groups 2
    --kv-channels 128
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
