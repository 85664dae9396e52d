"""How the model is cut over the trainer ranks."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.option import option


@dataclass(kw_only=True)
class ParallelOptions:
    """Parallelism of the trainer"""

    tensor_model_parallel_size: int = option(1, "ranks that share each layer's matrices", minimum=1)
    pipeline_model_parallel_size: int = option(1, "stages of layers", minimum=1)
    num_layers_per_virtual_pipeline_stage: int | None = option(None, "layers per interleaved stage", minimum=1)
    context_parallel_size: int = option(1, "ranks that share each sequence", minimum=1)
    expert_model_parallel_size: int = option(1, "ranks that share each layer's experts", minimum=1)
    expert_tensor_parallel_size: int | None = option(
        None, "ranks that share each expert's matrices (default: the tensor parallel size)", minimum=1
    )
    sequence_parallel: bool = option(False, "cut activations along the sequence between tensor parallel ranks")
    use_distributed_optimizer: bool = option(False, "optimizer state cut over data parallel ranks")
    overlap_grad_reduce: bool = option(False, "reduce gradients while the backward pass runs")
    overlap_param_gather: bool = option(False, "gather parameters while the forward pass runs")
    accumulate_allreduce_grads_in_fp32: bool = option(False, "gradients summed and reduced in fp32")

    def cuts_sequences(self, experts: bool) -> bool:
        """Whether tensor parallel ranks cut activations along the sequence, in a model with ``experts`` or without.

        Megatron refuses to train experts with tensor parallelism unless they do.
        """
        return self.tensor_model_parallel_size > 1 and (self.sequence_parallel or experts)
