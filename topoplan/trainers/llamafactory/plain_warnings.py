"""What is right to write for LLaMA-Factory with DeepSpeed, FSDP2 or plain data parallel training, and may surprise."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.layout.layout import Layout
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.key_list import missing_template


def support_warnings(spec: Spec, layout: Layout) -> Iterator[str]:
    """What is right to write and may still surprise."""
    job = spec.job
    if job.dataset is not None and any(name.strip().endswith((".json", ".jsonl")) for name in job.dataset.split(",")):
        yield (
            f"the trainer takes no files as data sets: enter {job.dataset} in dataset_info.json and set job.dataset to"
            " the name there"
        )
    if job.template is not None and (missing := missing_template(job.template)):
        yield missing
    if spec.cluster.gpu.architecture == "volta" and job.precision == "bf16":
        yield f"{spec.cluster.gpu.name} has no bf16 units: precision fp16 is the faster one"
    if layout.backend == "fsdp2" and job.finetuning == "lora" and not job.pure_bf16:
        yield "accelerate keeps FSDP2's shards in fp32, those of the frozen weights too; pure_bf16 keeps them in bf16"
    if layout.offload_optimizer and spec.cluster.nodes > 1:
        yield "offload builds DeepSpeed's CPU Adam with a compiler when it starts: have a CUDA toolkit on every node"
