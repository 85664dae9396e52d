"""UpdateWeightFromDistributed: for engines that share no memory with the trainer, whatever node they are on."""

from __future__ import annotations

from vime.backends.megatron_utils.update_weight.update_weight_from_tensor import UpdateWeightFromTensor


class UpdateWeightFromDistributed(UpdateWeightFromTensor):
    """Every rank sends what each worker's plan wants of it, point to point (Gloo on a CPU, NCCL on a GPU).

    UpdateWeightFromTensor does so by itself with what lies on another node. This one never opens another process's
    memory: for a trainer and engines in containers that may not look into each other. All weights are sent without
    being gathered first, each element once per worker that wants it, through buffers of bounded size.
    """

    maps = False
