# Shape of the model in Megatron-LM's flags: https://huggingface.co/Qwen/Qwen2.5-7B (Instruct alike)
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --add-qkv-bias
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --position-embedding-type rope
    --rotary-base 1000000
    --use-rotary-position-embeddings
    --disable-bias-linear
    --vocab-size 152064
    --untie-embeddings-and-output-weights
)
