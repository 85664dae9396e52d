"""vime: reinforcement learning for language models with a Megatron-Core trainer and vLLM engines on the same GPUs."""

__version__ = "0.1.0"
