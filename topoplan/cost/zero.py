"""What data parallelism keeps of a model on each GPU, by ZeRO stage: parameters, gradients and optimizer states.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv 1910.02054),
section 3.1 and figure 1: 2 bytes of parameter and 2 of gradient in 16 bits, and K = 12 bytes of Adam's states (fp32
parameter, momentum, variance), of which stage 1 divides the states among the GPUs, stage 2 the gradients too and
stage 3 the parameters as well. Activations, buffers and fragmentation come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.cost.states import ADAM_BYTES

HALF_BYTES = 2
"""A parameter or a gradient in bf16 or fp16."""
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroStates:
    """Bytes of one GPU by part, and of its process's host memory."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    host_bytes: float = 0.0
    """What is offloaded: of one process, of which a node has as many as GPUs."""

    @property
    def gpu_bytes(self) -> float:
        """All of it on one GPU."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def zero_states(
    parameters: float,
    *,
    stage: int,
    gpus: int,
    trained: float | None = None,
    weight_bytes: float = HALF_BYTES,
    gradient_bytes: float = HALF_BYTES,
    optimizer_bytes: float = ADAM_BYTES,
    offload_optimizer: bool = False,
    offload_param: bool = False,
) -> ZeroStates:
    """States of `parameters` elements, of which `trained` (default: all) have gradients and optimizer states.

    `stage` 0 is plain data parallelism, and full sharding (FSDP) is stage 3. The `_bytes` are of one element. An
    offloaded optimizer takes its gradients with it (Ren et al. 2021, "ZeRO-Offload", arXiv 2101.06840, section 3);
    offloaded parameters are stage 3's (Rajbhandari et al. 2021, "ZeRO-Infinity", arXiv 2104.07857), and ignored below.

    Raises ValueError for another stage, or less than one GPU.
    """
    if stage not in STAGES or gpus < 1:
        raise ValueError(f"stage {stage} on {gpus} GPUs")
    trained = parameters if trained is None else trained
    weights = weight_bytes * parameters / (gpus if stage >= 3 else 1)
    gradients = gradient_bytes * trained / (gpus if stage >= 2 else 1)
    optimizer = optimizer_bytes * trained / (gpus if stage >= 1 else 1)
    host = 0.0
    if offload_optimizer:
        # What the host holds is this process's share, in every stage that divides the states.
        host += optimizer + gradient_bytes * trained / (gpus if stage >= 1 else 1)
        gradients = optimizer = 0.0
    if offload_param and stage == 3:
        host += weights
        weights = 0.0
    return ZeroStates(weights_bytes=weights, gradients_bytes=gradients, optimizer_bytes=optimizer, host_bytes=host)
