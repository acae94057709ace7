"""What a spec says that has no effect or is inconsistent, though valid, and what a ranking assumes beyond it."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan import catalog
from topoplan.catalog.packages import PYTHON, PYTHONS, allows, in_words
from topoplan.layout.layout import Layout
from topoplan.specs import known
from topoplan.specs.cluster import Cluster
from topoplan.specs.facts import facts_of
from topoplan.specs.job import ADAPTERS, Job
from topoplan.specs.model import Model
from topoplan.specs.passed_on import unknown_option
from topoplan.specs.spec import Spec
from topoplan.units import GIB, format_bit_rate, format_byte_rate

_OF_ADAPTERS = ("lora_rank", "lora_dropout", "lora_target")
_OF_IMAGES = ("image_max_pixels", "images_per_sequence", "freeze_vision_tower", "freeze_multi_modal_projector")
_NEAR = 0.1
"""Fraction by which a figure may differ from the card's own: vendors round."""
_FASTEST = 0.01
_EACH_ITSELF = ("localhost", "127.0.0.1", "::1")
_OFF = ("0", "", "false")


def oddities(spec: Spec, layout: Layout) -> Iterator[str]:
    """Yield a sentence for each oddity."""
    for key, where in without_effect(spec.job, spec.model):
        yield f"{key} {_written(getattr(spec.job, key))} has no effect {where}"
    yield from _pinned_without_effect(spec, layout)
    yield from _samples(spec.job)
    if spec.job.learning_rate > _FASTEST:
        yield f"learning_rate {spec.job.learning_rate:g} is far above what fine-tuning takes, 1e-6 to 1e-3"
    if method := spec.model.quantization:
        yield f"the weights of {spec.model.name} are quantized ({method}), and counted in full: convert them"
    yield from _links(spec.cluster)
    yield from _card(spec.cluster)
    yield from _variables(spec.cluster)
    yield from _hosts(spec.cluster)


def without_effect(job: Job, model: Model) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for keys of the job that differ from their defaults and are not used."""
    usual = Job.__dataclass_fields__
    groups: list[tuple[bool, tuple[str, ...], str]] = [
        (job.finetuning in ADAPTERS, _OF_ADAPTERS, f"with finetuning {job.finetuning}"),
        (job.finetuning == "qlora", ("quantization_bit",), f"with finetuning {job.finetuning}"),
        (job.finetuning == "freeze", ("freeze_trainable_layers",), f"with finetuning {job.finetuning}"),
        (model.vision is not None, _OF_IMAGES, f"on {model.name}, which takes no images"),
        (facts_of(model).is_moe, ("token_imbalance",), f"on {model.name}, which has no experts"),
        (job.stage != "dpo" or job.packs_pairs, ("packing",), "in stage dpo, which takes its pairs one by one"),
    ]
    for is_read, keys, where in groups:
        for key in keys:
            if not is_read and getattr(job, key) != usual[key].default:
                yield key, where


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _pinned_without_effect(spec: Spec, layout: Layout) -> Iterator[str]:
    pin, precision = spec.job.pin, spec.job.precision
    if layout.fp8_param and precision in ("bf16", "fp16"):
        yield f"fp8_param has no effect with precision {precision}"
    if "cross_entropy_fusion_impl" in pin and not layout.cross_entropy_fusion:
        yield "cross_entropy_fusion_impl has no effect without cross_entropy_fusion"
    if pin.get("moe_token_dispatcher_type") and not facts_of(spec.model).is_moe:
        yield f"moe_token_dispatcher_type has no effect on {spec.model.name}, which has no experts"


def _samples(job: Job) -> Iterator[str]:
    if job.samples is not None and job.samples < job.global_batch_size:
        yield f"samples {job.samples} are fewer than the global batch of {job.global_batch_size}"


def _links(cluster: Cluster) -> Iterator[str]:
    """Yield sentences on links that differ from the card's, and on links that nothing crosses."""
    gpu, nvlink = cluster.gpu, cluster.nvlink_bytes_per_s
    usual = format_byte_rate(2 * gpu.nvlink_bytes_per_s)
    if not nvlink and gpu.nvlink_bytes_per_s and cluster.gpus_per_node > 1:
        yield f"nvlink_bandwidth none, and a machine of {gpu.name} usually has {usual} per GPU"
    elif nvlink and abs(nvlink / gpu.nvlink_bytes_per_s - 1.0) > _NEAR:
        said = format_byte_rate(2 * nvlink)
        yield f"nvlink_bandwidth {said}, and {gpu.name} has {usual}, both directions together"
    if cluster.pcie_bytes_per_s > gpu.pcie_bytes_per_s * (1.0 + _NEAR):
        said, own = format_byte_rate(cluster.pcie_bytes_per_s), format_byte_rate(gpu.pcie_bytes_per_s)
        yield f"pcie_bandwidth {said}, and {gpu.name} has {own} each way"
    for key in cluster.unused:
        yield f"{key} has no effect: {'one GPU' if key == 'nvlink_bandwidth' else 'one node'} has nothing to link"


def _card(cluster: Cluster) -> Iterator[str]:
    """Yield sentences on figures of a catalog card that differ from the card's own."""
    gpu = cluster.gpu
    if gpu.name not in catalog.gpu_names():
        if gpu.fp8_flops is not None and gpu.fp8_flops < gpu.bf16_flops:
            yield f"{gpu.name} is said to be slower in fp8 than in bf16"
        return
    own = known.gpu(gpu.name)
    figures = {
        "memory": (gpu.memory_bytes, own.memory_bytes, GIB, "GiB"),
        "memory_bandwidth": (gpu.memory_bytes_per_s, own.memory_bytes_per_s, 1e12, "TB/s"),
        "bf16_tflops": (gpu.bf16_flops, own.bf16_flops, 1e12, "TFLOPS"),
    }
    for key, (said, usual, unit, name) in figures.items():
        if abs(said / usual - 1.0) > _NEAR:
            yield f"{key} {said / unit:.3g} {name}, and {gpu.name} has {usual / unit:.3g}"


def _variables(cluster: Cluster) -> Iterator[str]:
    """Yield sentences on variables that disable links of the plan (NCCL user guide, Environment Variables)."""
    fabric = cluster.fabric
    if cluster.nodes > 1 and fabric.uses_verbs and cluster.env.get("NCCL_IB_DISABLE", "0") not in _OFF:
        yield f"NCCL_IB_DISABLE turns off the {fabric.kind} that is planned with: set fabric.kind to ethernet"
    if cluster.nvlink_bytes_per_s and cluster.env.get("NCCL_P2P_DISABLE", "0") not in _OFF:
        yield "NCCL_P2P_DISABLE turns off the NVLink that is planned with"


def _hosts(cluster: Cluster) -> Iterator[str]:
    for index, host in enumerate(cluster.hosts if cluster.nodes > 1 else ()):
        if host.address in _EACH_ITSELF:
            yield f"hosts[{index}] {host.address} is for every node itself: give an address that the others reach it by"
    python = cluster.software.get(PYTHON)
    if python is not None and not allows(PYTHONS, python):
        yield f"software.python {python}, and trainers run on {in_words(PYTHONS)} alone"
    yield from filter(None, map(unknown_option, cluster.slurm))


def machine_note(cluster: Cluster) -> str:
    """Return a sentence on values taken from the GPU's usual machine; empty if the spec states all that matter."""
    if not cluster.assumed:
        return ""
    nvlink, nics = cluster.nvlink_bytes_per_s, cluster.nics_per_node
    is_usual = cluster.pcie_bytes_per_s == cluster.gpu.pcie_bytes_per_s
    pcie = f" (PCIe of {format_byte_rate(cluster.pcie_bytes_per_s)} each way)" if is_usual else ""
    words = {
        "gpus_per_node": f"{cluster.gpus_per_node} GPUs per node",
        "nvlink_bandwidth": f"NVLink of {format_byte_rate(2 * nvlink)} per GPU" if nvlink else f"no NVLink{pcie}",
        "ib_bandwidth": f"NICs of {format_bit_rate(cluster.nic_bytes_per_s)}",
        "nics_per_node": f"{nics} NIC{'s' if nics > 1 else ''} per node",
    }
    said = ", ".join(words[key] for key in cluster.assumed if key != "gpu")
    if not said:
        return f"assumed: the GPU is {cluster.gpu.name}"
    has_nvlink = nvlink and "nvlink_bandwidth" in cluster.assumed
    none = "; if the GPUs communicate over PCIe, set nvlink_bandwidth: none" if has_nvlink else ""
    return f"assumed, as usual for machines with {cluster.gpu.name}: {said}{none}"
