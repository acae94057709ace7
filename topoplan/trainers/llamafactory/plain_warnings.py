"""Valid settings for LLaMA-Factory with DeepSpeed, FSDP2 or plain data parallelism that may surprise the user."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.layout.layout import Layout
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.common import usual_warnings


def support_warnings(spec: Spec, layout: Layout) -> Iterator[str]:
    """Warn about valid settings that may surprise the user."""
    job = spec.job
    yield from usual_warnings(spec)
    if layout.backend == "fsdp2" and job.finetuning == "lora" and not job.pure_bf16:
        yield "accelerate keeps FSDP2's shards in fp32, also those of frozen weights; pure_bf16 keeps them in bf16"
    if layout.offload_optimizer and spec.cluster.nodes > 1:
        yield "offload compiles DeepSpeed's CPU Adam at start-up: every node needs a compiler and a CUDA toolkit"
