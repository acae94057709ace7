"""Known faults of the packages that trainers run on: affected versions and layouts, and the consequences.

Each fault is recorded once, here. The environment that a bundle requires avoids the faults that some version is free of
(`topoplan/trainers/requirements.py`); the others become warnings of a plan. Faults triggered by trainer keys are
refused when files are written. `check` finds all of them in users' files.

Omitted are faults that no layout or file written here triggers. Of Megatron-LM issue 7452 (silent faults of
parallelism, as of September 2026): the findings on gathered logits, padding masks passed to the model, Megatron-FSDP,
and losses normalized on each context-parallel rank alone, which mcore_adapter sums over the ranks
(`trainer/trainer.py`, _post_compute_loss). PR 5047 (auxiliary losses with per-token losses and tp > 1): trainers leave
those losses at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from topoplan.catalog.packages import in_words
from topoplan.errors import LayoutError
from topoplan.layout.layout import Layout
from topoplan.specs.facts import facts_of
from topoplan.specs.model import LinearAttention
from topoplan.specs.spec import Spec
from topoplan.trainers.refusal import Refusal

Level = Literal["stops", "warns"]
"""stops: another version is required or, if keys trigger the fault, the keys are refused. warns: the run continues, but
does less than is configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a package."""

    name: str
    """Identifier, and part of the name of `check`'s rule."""
    package: str
    """Name of the package in pip."""
    versions: str = ""
    """Affected versions in pip's syntax; empty for all known versions."""
    cure: str = ""
    """Unaffected versions; empty if none are known."""
    level: Level = "warns"
    backends: tuple[str, ...] = ("mca", "megatron")
    """Backends that use the package in the affected way."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Values of trainer keys that trigger it in a layout that it `affects`; empty if the layout alone does."""
    layout_key: str
    """The key of a layout that decides whether the fault occurs."""
    affects: Callable[[Spec, Layout], bool]
    spared_by: tuple[str, ...] = ()
    """Path of a key in DeepSpeed's file that avoids the fault."""
    when: str
    """The condition, in words."""
    what: str
    """The consequence, with {package} for the package's name and versions."""
    remedy: str
    """What helps besides other versions."""
    source: str

    @property
    def text(self) -> str:
        """The consequence, with the package filled in."""
        package = f"{self.package} {in_words(self.versions)}" if self.versions else self.package
        return self.what.format(package=package)

    def is_triggered(self, spec: Spec, layout: Layout, keys: Mapping[str, Any]) -> bool:
        """Whether a layout with these trainer keys triggers the fault."""
        if layout.backend not in self.backends:
            return False
        asked = not self.keys or all(name in keys and keys[name] == value for name, value in self.keys.items())
        return asked and self.affects(spec, layout)


def faults_of_keys(spec: Spec, layout: Layout, keys: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the faults that trainer keys trigger, whether at the top of the file or in Megatron-core's own settings."""
    own = keys.get("additional_configs")
    keys = {**own, **keys} if isinstance(own, Mapping) else keys
    yield from (fault for fault in FAULTS if fault.keys and fault.is_triggered(spec, layout, keys))


def refused_keys(spec: Spec, layout: Layout) -> Iterator[Refusal]:
    """Refuse trainer keys in the spec that would make training differ from what is configured."""
    for fault in faults_of_keys(spec, layout, spec.job.trainer):
        key = next(iter(fault.keys))
        yield Refusal(
            fault.name,
            f"{fault.when}: {fault.text}",
            where=f"job.trainer.{key if key in spec.job.trainer else f'additional_configs.{key}'}",
            remedy=fault.remedy,
            kind=LayoutError,
        )


def can_export(spec: Spec, layout: Layout) -> bool:
    """Whether LLaMA-Factory's Megatron path can save Hugging Face weights in addition to its own."""
    return not any(faults_of_keys(spec, layout, {"save_hf_model": True}))


def _experts(spec: Spec) -> bool:
    return facts_of(spec.model).is_moe


def _gathers_experts(spec: Spec, layout: Layout) -> bool:
    """Whether the adapter gathers this model's experts for export (models/converter/model_converter.py)."""
    return spec.model.model_type in ("qwen3_vl_moe", "qwen3_5_moe") and layout.ep > 1


def _few_kv_heads(spec: Spec, layout: Layout) -> bool:
    return any(layout.tp > attention.kv_heads for attention in facts_of(spec.model).grouped)


def _partial_norms(spec: Spec, layout: Layout) -> bool:
    """Whether the heads that tp splits share one norm while every rank has whole sequences."""
    linear = any(isinstance(layer.attention, LinearAttention) for layer in spec.model.layers)
    return linear and layout.tp > 1 and not layout.sequence_parallel


_GATHERED_TOGETHER = {
    # model/model_utils/moe.py::add_z3_leaf_module, LLaMA-Factory 0.9.5
    "llamafactory": frozenset(
        [
            *("dbrx", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "glm4v_moe"),
            *("gpt_oss", "granitemoe", "hy_v3", "jamba", "jetmoe", "kimi_vl", "llama4", "mixtral", "olmoe", "phimoe"),
            *("qwen2_moe", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_vl_moe"),
        ]
    ),
    # model/register.py::_deepspeed_set_z3_leaf_modules, ms-swift 4.6
    "swift": frozenset(
        [
            *("gemma4", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "gpt_oss", "llama4", "mimo_v2"),
            *("olmoe", "qwen2_moe", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_vl_moe"),
        ]
    ),
}
"""Trainer -> model types for which it makes DeepSpeed gather the experts of a layer together."""
_BY_DEEPSPEED = frozenset(["mixtral", "qwen2_moe", "qwen3_moe"])
"""Model types for which DeepSpeed does so by default from 0.18 on (runtime/zero/leaf_module_config.py)."""


def _gathers_experts_one_by_one(spec: Spec, layout: Layout) -> bool:
    together = _GATHERED_TOGETHER.get(spec.trainer or "llamafactory", frozenset()) | _BY_DEEPSPEED
    is_split = layout.zero_stage == 3 and layout.world_size > 1
    return is_split and _experts(spec) and spec.model.model_type not in together


FAULTS = (
    Fault(
        name="experts-gathered-apart",
        package="transformers",
        versions="<5",
        cure=">=5",
        backends=("deepspeed",),
        layout_key="zero_stage",
        affects=_gathers_experts_one_by_one,
        spared_by=("zero_optimization", "leaf_module"),
        when="ZeRO-3 on experts that the trainer does not set as leaf modules",
        what="{package} runs experts one by one, each of which is gathered when tokens reach it: where they reach it on"
        " some ranks alone, the run hangs",
        remedy="name the class of a layer's experts in zero_optimization.leaf_module of DeepSpeed's file, or take zero2"
        " or FSDP",
        source="DeepSpeed docs/code-docs/source/training.rst, Configuring ZeRO Leaf Modules",
    ),
    Fault(
        name="checkpoint-plan",
        package="torch",
        versions=">=2.12",
        cure="<2.12",
        level="stops",
        backends=("mca",),
        layout_key="distributed_optimizer",
        affects=lambda spec, layout: layout.distributed_optimizer,
        when="a distributed optimizer",
        what="with {package} the first checkpoint ends in 'TypeError: can only join an iterable', as mcore_adapter"
        " returns True where torch now expects a list",
        remedy="",
        source="mcore_adapter 8eb27cc, patcher.py; PyTorch issue 187432",
    ),
    Fault(
        name="interleaving-frees-early",
        package="megatron-core",
        versions="<0.18",
        cure=">=0.18",
        level="stops",
        layout_key="vpp",
        # With as many micro-batches as stages, all are in the warm-up phase, whose sends are waited for.
        affects=lambda spec, layout: layout.vpp > 1 and layout.gradient_accumulation_steps > layout.pp,
        when="vpp > 1",
        what="{package} frees the output of a stage while it is being sent, which gives NaN or a wrong loss"
        " unless PyTorch happens to keep it",
        remedy="take a layout with vpp 1, or overlap_p2p_comm: false with pp above 2",
        source="Megatron-LM PR 4047, issue 1586",
    ),
    Fault(
        name="interleaving-batched-sends",
        package="megatron-core",
        level="stops",
        keys={"overlap_p2p_comm": False},
        layout_key="vpp",
        affects=lambda spec, layout: layout.vpp > 1 and layout.pp == 2,
        when="overlap_p2p_comm false with pp 2 and vpp > 1",
        what="stages train on wrong data from the first step on, which Megatron-LM's own arguments refuse and this"
        " trainer does not",
        remedy="leave overlap_p2p_comm out, which is then on",
        source="Megatron-LM training/arguments.py, validate_args; seen with megatron-core 0.16.1 and 0.18.2",
    ),
    Fault(
        name="stale-final-weights",
        package="mcore_adapter",
        level="stops",
        backends=("mca",),
        keys={"save_strategy": "no"},
        layout_key="overlap_param_gather",
        affects=lambda spec, layout: layout.overlap_param_gather,
        when="save_strategy 'no' with overlap_param_gather",
        what="the model that is saved at the end is in part that of the step before, as parameters are gathered in the"
        " next forward pass",
        remedy="set overlap_param_gather: false, or save checkpoints",
        source="mcore_adapter 8eb27cc, trainer/trainer.py; 33 of 67 tensors differed in a run with dp 2",
    ),
    Fault(
        name="expert-export",
        package="mcore_adapter",
        level="stops",
        backends=("mca",),
        keys={"save_hf_model": True},
        layout_key="etp",
        affects=lambda spec, layout: _experts(spec) and layout.etp != layout.tp and not _gathers_experts(spec, layout),
        when="save_hf_model with experts and etp other than tp",
        what="the first checkpoint ends in 'TypeError: gather_tensor_parallel() got an unexpected keyword argument'",
        remedy="set save_hf_model: false and convert a checkpoint afterwards, or take a layout with etp equal to tp",
        source="mcore_adapter 8eb27cc, models/converter/model_converter.py, _save_moe_hf_state_dict",
    ),
    Fault(
        name="no-combined-passes",
        package="mcore_adapter",
        level="stops",
        backends=("mca",),
        keys={"overlap_moe_expert_parallel_comm": True},
        layout_key="ep",
        affects=lambda spec, layout: True,
        when="overlap_moe_expert_parallel_comm",
        what="the first step ends in a TypeError about return_schedule_plan, as megatron-core asks for a plan of the"
        " forward pass, which mcore_adapter does not make",
        remedy="leave it out",
        source="megatron-core pipeline_parallel/combined_1f1b.py, combined_forward_backward_step; mcore_adapter"
        " 8eb27cc, trainer/trainer.py, _inner_forward_step",
    ),
    Fault(
        name="expert-gradient-norm",
        package="megatron-core",
        versions="<0.19",
        cure=">=0.19",
        layout_key="ep",
        affects=lambda spec, layout: _experts(spec) and layout.ep > 1 and layout.tp > 1,
        when="ep > 1 with tp > 1",
        what="{package} leaves experts out of the gradient norm, so that the norm is too low and gradients are clipped"
        " less",
        remedy="take a layout with tp 1 or ep 1",
        source="Megatron-LM PR 5916",
    ),
    Fault(
        name="expert-gradients-mixed",
        package="megatron-core",
        versions="<0.19",
        cure=">=0.19",
        layout_key="etp",
        affects=lambda spec, layout: _experts(spec) and layout.ep == 1 and layout.etp != layout.tp,
        when="ep 1 with etp other than tp",
        what="{package} sums the gradients of experts over the wrong ranks, and lets their copies drift apart",
        remedy="take a layout with etp equal to tp",
        source="Megatron-LM PR 5916",
    ),
    Fault(
        name="few-kv-heads",
        package="megatron-core",
        versions="<0.16",
        cure=">=0.16",
        layout_key="tp",
        affects=_few_kv_heads,
        when="tp above the number of KV heads",
        what="{package} refuses it",
        remedy="lower tp",
        source="megatron-core 0.16 core/transformer/attention.py",
    ),
    Fault(
        name="output-gate-not-split",
        package="megatron-core",
        versions="<0.17",
        cure=">=0.17",
        layout_key="tp",
        affects=lambda spec, layout: (
            any(one.output_gate for one in facts_of(spec.model).grouped) and _few_kv_heads(spec, layout)
        ),
        when="tp above the number of KV heads, with an output gate",
        what="{package} does not split the gate as it splits the heads, and their shapes do not fit",
        remedy="lower tp",
        source="Megatron-LM PR 3575",
    ),
    Fault(
        name="linear-attention-norm",
        package="megatron-core",
        layout_key="sequence_parallel",
        affects=_partial_norms,
        when="linear attention with tp > 1 and no sequence parallelism",
        what="{package} does not sum the gradient of its output norm over the heads of other ranks, and lets the copies"
        " drift apart",
        remedy="turn sequence_parallel on",
        source="Megatron-LM issue 7452, finding 11",
    ),
    Fault(
        name="sink-gradient-norm",
        package="megatron-core",
        layout_key="tp",
        affects=lambda spec, layout: layout.tp > 1 and any(one.sinks for one in facts_of(spec.model).grouped),
        when="attention sinks with tp > 1",
        what="{package} counts those of one rank alone in the gradient norm",
        remedy="take a layout with tp 1",
        source="Megatron-LM issue 7452, finding 8",
    ),
    Fault(
        name="token-prediction-loss",
        package="megatron-core",
        layout_key="cp",
        affects=lambda spec, layout: spec.job.mtp_num_layers > 0 and layout.cp > 1,
        when="mtp_num_layers with cp > 1",
        what="{package} normalises that loss on each rank alone, so that its weight depends on where the trained tokens"
        " lie",
        remedy="take a layout with cp 1, or leave mtp_num_layers out",
        source="Megatron-LM PR 7498, open in September 2026",
    ),
)
"""All known faults."""
