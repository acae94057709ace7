"""Why a trainer cannot run a job or a layout, as data for the search, `generate` and `check` alike.

Refusals that several trainers share, wording included, are here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass

from topoplan.errors import InputError, LayoutError, SpecError
from topoplan.layout.layout import Layout
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a trainer would refuse, ignore, or train differently from the plan; texts are those of an `InputError`."""

    rule: str
    """Identifier for programs."""
    what: str
    _: KW_ONLY
    where: str = ""
    expected: str = ""
    remedy: str = ""
    kind: type[InputError] | None = None
    """Class of the error to raise; if None, LayoutError if `where` is a key of the layout, else SpecError."""
    is_predicted: bool = False
    """True if memory and time of a refused job are predicted all the same."""

    @property
    def error(self) -> InputError:
        """The error to raise if the user explicitly asked for what is refused."""
        kind = self.kind or (LayoutError if self.where.startswith("layout.") else SpecError)
        return kind(self.what, where=self.where, expected=self.expected, remedy=self.remedy)


def refuse(refusals: Iterable[Refusal]) -> None:
    """Raise the first refusal as an error, if there is one."""
    for refusal in refusals:
        raise refusal.error


FP8_RECIPES = {"hopper": "blockwise", "blackwell": "mxfp8"}
"""GPU architecture -> recipe. mcore_adapter `training_args.py`, fp8_recipe: "Other recipes are not tested yet"."""


def missing_precision(spec: Spec) -> Iterator[Refusal]:
    """Refuse a precision that the card lacks, whatever the trainer."""
    gpu, precision = spec.cluster.gpu, spec.job.precision
    if precision == "bf16" and gpu.bf16_flops < gpu.fp16_flops / 2:
        lacks, remedy = "bf16 tensor cores", "set precision: fp16 in the job"
    elif precision in ("fp8", "mxfp8") and not gpu.fp8_flops:
        lacks, remedy = "fp8 tensor cores", "set precision: bf16"
    elif precision == "mxfp8" and gpu.architecture != "blackwell":
        lacks, remedy = "mxfp8; Blackwell does", "set precision: fp8"
    elif precision == "nvfp4" and not gpu.fp4_flops:
        lacks, remedy = "fp4 tensor cores", "set precision: bf16 or fp8"
    else:
        return
    yield Refusal("card-precision", f"{gpu.name} has no {lacks}", where=spec.path or "", remedy=remedy)


def mca_finetuning(job: Job, where: str = "") -> Iterator[Refusal]:
    """Refuse anything but full fine-tuning on mcore_adapter, which supports neither adapters nor frozen layers."""
    if job.finetuning == "full":
        return
    swift = "megatron (ms-swift's), " if job.finetuning == "lora" else ""
    yield Refusal(
        "finetuning",
        f"finetuning {job.finetuning!r} with backend mca: LLaMA-Factory's trainer for Megatron parses it and"
        " trains all weights all the same",
        where=where,
        expected="expected full",
        remedy=f"take backend {swift}ddp, deepspeed or fsdp2",
    )


def megatron_optimizer(job: Job, where: str = "") -> Iterator[Refusal]:
    """Refuse optimizers that Megatron-based trainers do not support."""
    if job.pure_bf16 or job.optimizer != "adamw":
        what = "pure_bf16" if job.pure_bf16 else f"optimizer {job.optimizer}"
        what = f"{what}: Megatron's optimizer has no such mode"
        yield Refusal("optimizer", what, where=where, remedy="leave it out")


def pure_fp16(job: Job) -> Iterator[Refusal]:
    """Refuse pure_bf16 combined with another precision."""
    if job.pure_bf16 and job.precision != "bf16":
        what = "pure_bf16 with precision fp16"
        yield Refusal("pure-bf16", what, where="job.pure_bf16", remedy="leave one of them out")


def quantized_weights(job: Job) -> Iterator[Refusal]:
    """Refuse quantized weights without adapters, since quantized weights cannot be trained."""
    if job.quantization_bit is not None and job.finetuning != "qlora":
        yield Refusal(
            "quantized-weights",
            f"quantization_bit {job.quantization_bit} with finetuning {job.finetuning}: only LoRA trains beside"
            " quantized weights",
            where="job.quantization_bit",
            remedy="set finetuning: qlora, or leave it out",
        )


def offload(spec: Spec, layout: Layout) -> Iterator[Refusal]:
    """Refuse offloading if the spec does not state the host memory."""
    if (layout.offload_optimizer or layout.offload_param or layout.offload) and spec.cluster.host_memory_bytes is None:
        yield Refusal(
            "host-memory",
            "offload needs host memory, and the spec does not say how much a node has",
            where="host_memory",
            expected="expected a size such as 1TiB",
        )
