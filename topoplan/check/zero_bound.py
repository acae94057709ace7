"""What DeepSpeed, FSDP and plain data parallelism need at the very least: parameters, gradients, optimizer states.

Their activations and their speed are not predicted yet. What a GPU must hold whatever the sequences is known all the
same, and settles many a configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from topoplan.catalog import gpu
from topoplan.check.job.models import MODEL_KEYS, model_of
from topoplan.check.job.processes import Processes, processes_for
from topoplan.check.job.sharding import Sharding, sharding_of
from topoplan.check.job.values import Keys
from topoplan.check.read.setup import Configuration, Setup
from topoplan.check.rules.finding import Finding
from topoplan.check.rules.layout_keys import key_line
from topoplan.cost.activations import FP32
from topoplan.cost.params import parameter_count
from topoplan.cost.states import ADAM_BYTES
from topoplan.cost.zero import HALF_BYTES, ZeroStates, zero_states
from topoplan.specs.cluster import Cluster
from topoplan.specs.model import Model
from topoplan.units import GIB

_ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla")
_OTHER_OPTIMIZERS = ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon", "loraplus_lr_ratio")
_MOST_GPUS_NAMED = 4096
_UNLESS_FSDP = "; not so where `accelerate launch` starts it with FSDP: give its command or file too"
_USUAL_CARD = "a100-sxm-80gb"
"""What is meant where no cluster is given: the largest card that most people have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """At least so much is on each GPU, and in the host memory of a node."""

    model: Model
    sharding: Sharding
    gpus: int
    gpus_per_node: int
    parameters: int
    trained: int
    """Parameters that surely have gradients: not an adapter's few, nor a vision tower that may be frozen."""
    weight_bytes: float
    optimizer_bytes: float
    assumption: str
    """On the model; empty where nothing was assumed."""

    @property
    def host_bytes(self) -> float:
        """Host memory of a node, without what goes to NVMe."""
        return self.states.host_bytes * self.gpus_per_node

    def under(self, sharding: Sharding, gpus: int | None = None) -> ZeroStates:
        """The states of the same training under another sharding, or on other GPUs."""
        return zero_states(
            self.parameters,
            trained=self.trained,
            stage=sharding.stage,
            gpus=gpus or self.gpus,
            weight_bytes=self.weight_bytes,
            gradient_bytes=self.weight_bytes,
            optimizer_bytes=self.optimizer_bytes,
            offload_optimizer=bool(sharding.offload_optimizer),
            offload_param=bool(sharding.offload_param),
        )

    @property
    def states(self) -> ZeroStates:
        """The states as they are configured."""
        return self.under(self.sharding)


def bound_of(
    configuration: Configuration, setup: Setup, cluster: Cluster | None, *, model: str | None = None
) -> Bound | None:
    """The lower bound of a whole configuration; None where sharding or GPUs are not known.

    Raises ModelError or SpecError for a model or a key that cannot be read.
    """
    keys = Keys(configuration, {})
    processes = processes_for(setup, configuration)
    gpus, per_node = _gpus(processes, cluster)
    sharding = sharding_of(keys, setup)
    if sharding is None or gpus is None or per_node is None:
        return None
    built, assumption = model_of(configuration, model)
    is_full, weight_bytes, optimizer_bytes = _training(keys)
    parameters = parameter_count(built)
    frozen = keys.given("freeze_language_model") or keys.given("freeze_llm")
    return Bound(
        model=built,
        sharding=sharding,
        gpus=gpus,
        gpus_per_node=per_node,
        parameters=parameters,
        trained=parameters - (built.vision.parameters if built.vision else 0) if is_full and not frozen else 0,
        weight_bytes=weight_bytes,
        optimizer_bytes=optimizer_bytes,
        assumption=assumption,
    )


def _gpus(processes: Processes | None, cluster: Cluster | None) -> tuple[int | None, int | None]:
    nodes = processes.nodes if processes else None
    per_node = processes.gpus_per_node if processes else None
    if cluster is not None:
        nodes, per_node = nodes or cluster.nodes, per_node or cluster.gpus_per_node
    return (nodes * per_node, per_node) if nodes and per_node else (None, None)


# How it is trained ---------------------------------------------------------------------------------------------------


def _training(keys: Keys) -> tuple[bool, float, float]:
    """Whether all weights are trained, and bytes a parameter of weights and of Adam's states that are sure."""
    kind = keys.given("finetuning_type") or keys.given("tuner_type") or keys.given("train_type") or "lora"
    bits = keys.given("quantization_bit") or keys.given("quant_bits")
    weight_bytes = bits / 8 if bits in (2, 3, 4, 5, 6, 8) else float(HALF_BYTES)
    if kind != "full":
        return False, weight_bytes, 0.0
    optimizer = keys.given("optim")
    if optimizer not in (None, *_ADAM) or any(keys.given(key) for key in _OTHER_OPTIMIZERS):
        return True, weight_bytes, 0.0
    if keys.given("deepspeed"):
        return True, float(HALF_BYTES), float(ADAM_BYTES)
    # LF model/adapter.py::init_adapter keeps weights that are trained in fp32. Adam's two moments are as wide as they.
    is_wide = keys.configuration.trainer == "llamafactory" and not (keys.given("pure_bf16") or keys.given("fsdp"))
    width = float(FP32 if is_wide else HALF_BYTES)
    return True, width, 2 * width


# What is said of it --------------------------------------------------------------------------------------------------


def bound_findings(bound: Bound, configuration: Configuration, cluster: Cluster | None) -> Iterator[Finding]:
    """That the configuration is not predicted, or that it cannot fit.

    Without a cluster only what is too much for a card of 80 GB is told.
    """
    sharding, need = bound.sharding, bound.states.gpu_bytes
    card = cluster.gpu if cluster else gpu(_USUAL_CARD)
    line = key_line(configuration, (*sharding.keys, MODEL_KEYS[configuration.trainer]))
    where = f"each of {bound.gpus} GPUs" if bound.gpus > 1 else "the one GPU"
    words = f"its states alone take {need / GIB:.1f} GiB ({need / 1e9:.1f} GB) on {where}"
    why = f"{_arithmetic(bound)}; activations and buffers, not predicted yet for this trainer, come on top"
    if need > card.memory_bytes:
        yield Finding(
            rule="zero-cannot-fit",
            severity="error" if cluster and sharding.is_sure else "warning",
            part=configuration.part,
            line=line,
            what=f"{sharding.name} of {bound.model.name} cannot fit: {words}, and {card.name} has"
            f" {card.memory_bytes / GIB:.1f}",
            why=f"{why} (Rajbhandari et al. 2020, ZeRO, figure 1)" + ("" if sharding.is_sure else _UNLESS_FSDP),
            remedy=_what_would_hold(bound, card.memory_bytes, cluster.host_memory_bytes if cluster else None),
        )
    elif cluster:
        yield Finding(
            rule="zero-not-predicted",
            severity="note",
            part=configuration.part,
            line=line,
            what=f"{sharding.name} of {bound.model.name} is not predicted yet; {words}, and {card.name} has"
            f" {card.memory_bytes / GIB:.1f}",
            why=why,
        )
    host = cluster.host_memory_bytes if cluster else None
    if host is not None and bound.host_bytes > host and not sharding.uses_nvme:
        yield Finding(
            rule="zero-host-memory",
            severity="error",
            part=configuration.part,
            line=line,
            what=f"what is offloaded takes {bound.host_bytes / GIB:.0f} GiB of a node's host memory, which has"
            f" {host / GIB:.0f}",
            why=f"{bound.optimizer_bytes:g} bytes of optimizer states and {bound.weight_bytes:g} of gradient for each"
            " parameter that is trained, and the parameters where they are offloaded too",
            remedy="offload less, or use more nodes",
        )


def _arithmetic(bound: Bound) -> str:
    """`61.1 GB weights (2 bytes * 30.53B) + ...`."""
    states, stage = bound.states, bound.sharding.stage
    rows = (
        ("weights", states.weights_bytes, bound.weight_bytes, bound.parameters, 3),
        ("gradients", states.gradients_bytes, bound.weight_bytes, bound.trained, 2),
        ("optimizer states", states.optimizer_bytes, bound.optimizer_bytes, bound.trained, 1),
    )
    words = []
    for name, size, each, count, shared_from in rows:
        if size:
            shared = f" / {bound.gpus} GPUs" if stage >= shared_from and bound.gpus > 1 else ""
            words.append(f"{size / 1e9:.1f} GB {name} ({each:g} bytes * {count / 1e9:.2f}B{shared})")
    return " + ".join(words) or "everything is offloaded"


def _what_would_hold(bound: Bound, card_bytes: int, host_bytes: int | None) -> str:
    """The nearest shardings whose states are within the card, with the host memory that they need."""
    choices = [Sharding(name="stage 3", stage=3)]
    if bound.trained:
        choices += [
            Sharding(name="stage 2 with its optimizer offloaded", stage=2, offload_optimizer="cpu"),
            Sharding(name="stage 3 with its optimizer offloaded", stage=3, offload_optimizer="cpu"),
        ]
    choices.append(Sharding(name="stage 3 with all offloaded", stage=3, offload_optimizer="cpu", offload_param="cpu"))
    words = []
    for choice in choices:
        states = bound.under(choice)
        in_host = states.host_bytes * bound.gpus_per_node
        if states.gpu_bytes <= card_bytes and (host_bytes is None or in_host <= host_bytes):
            beside = f" and {in_host / GIB:.0f} GiB of host memory a node" if in_host else ""
            words.append(f"{choice.name} ({states.gpu_bytes / GIB:.1f} GiB{beside})")
    least = ceil(bound.under(choices[0], 1).gpu_bytes / card_bytes)
    if bound.gpus < least <= _MOST_GPUS_NAMED:
        words.insert(0, f"stage 3 on {least} GPUs or more")
    return (
        f"its states would fit with {', or '.join(words[:3])}" if words else "train a smaller model, or adapters (LoRA)"
    )
