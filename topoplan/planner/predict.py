"""Prediction of a single layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from topoplan.engines.registry import engine_of
from topoplan.errors import LayoutError
from topoplan.layout.forms import layout_from_dict, layout_to_dict
from topoplan.layout.layout import Layout
from topoplan.layout.stages import balanced_pipeline_layout
from topoplan.operators.flops import model_flops_per_step
from topoplan.operators.machine import peak_flops
from topoplan.operators.padding import keeps_samples_apart, padding_share, tokens_per_step
from topoplan.planner.oddities import oddities
from topoplan.planner.plan import Memory, Plan
from topoplan.specs.case import Case
from topoplan.specs.gpu_profile import notes_on_bands
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of
from topoplan.trainers.loading import loading_note
from topoplan.trainers.refusal import missing_precision, refuse
from topoplan.trainers.registry import TrainerChoice, caveats_of, choose_trainer, training_path_of, unpredicted
from topoplan.trainers.requirements import environment_warnings
from topoplan.trainers.trainer import Trainer
from topoplan.units import GIB, shown


def memory_of(case: Case, layout: Layout, *, all_stages: bool = False) -> Memory:
    """Return the memory of a legal layout; `all_stages` lists every stage with its peak candidates."""
    return engine_of(layout.backend).memory(case, layout, all_stages=all_stages)


def plan_of(spec: Spec, case: Case, layout: Layout, memory: Memory, choice: TrainerChoice | None = None) -> Plan:
    """Return the plan of a legal layout whose memory is known; `choice` is that of the trainer, if known."""
    choice = choice or choose_trainer(spec, layout, spec.trainer)
    time = engine_of(layout.backend).time(case, layout)
    gpus = case.cluster.world_size
    flops = model_flops_per_step(case.model, case.job, keeps_samples_apart=keeps_samples_apart(case))
    rate = flops / time.step_s / gpus
    return Plan(
        layout=layout,
        memory=memory,
        time=time,
        tokens_per_s_per_gpu=tokens_per_step(case.job) / time.step_s / gpus,
        model_flops_per_s_per_gpu=rate,
        mfu=rate / peak_flops(case.cluster.gpu, case.job.precision),
        trainer=choice.name,
        warnings=_warnings(spec, case, layout, memory, choice.trainer),
        caveats=caveats_of(spec, layout, choice.trainer),
        padding_share=padding_share(case, layout) if case.job.lengths else None,
    )


def plan_under(spec: Spec, plan: Plan, trainer: str | None) -> Plan:
    """Return the plan as a given trainer computes it; a spec that names none may have used other traits."""
    if trainer is None:
        return plan
    backend = plan.layout.backend
    case = case_of(replace(spec, trainer=trainer), backend)
    if case.traits is not case_of(spec, backend).traits:
        plan = plan_of(spec, case, plan.layout, memory_of(case, plan.layout))
    return replace(plan, trainer=trainer)


def predict(
    spec: Spec, layout: Layout | Mapping[str, Any], *, all_stages: bool = True, is_of_file: bool = False
) -> Plan:
    """Return memory and time of one layout, whether it fits or not.

    - `all_stages`: list every pipeline stage, instead of only the stages that can need the most, as in a search.
    - `is_of_file`: job and layout come from a file of a trainer, which therefore runs them.

    Layers that are not divisible by pp * vpp are spread evenly, which the plan's warnings state.

    Raises LayoutError for a layout that breaks a rule, SpecError for a job that cannot be predicted.
    """
    if not isinstance(layout, Layout | Mapping):
        raise LayoutError(
            f"{shown(layout)} is not a layout",
            where="layout",
            expected="expected the layout of a plan, or its keys, as in {'tp': 4, 'pp': 1}",
        )
    refuse(missing_precision(spec))
    form = layout_to_dict(layout) if isinstance(layout, Layout) else _with_stages(layout, spec)
    layout = layout_from_dict(form, spec.cluster, spec.model, spec.job)
    refuse(unpredicted(spec, layout.backend, is_of_file=is_of_file))
    case = case_of(spec, layout.backend)
    if broken := engine_of(layout.backend).verdict(case, layout):
        raise LayoutError(broken.equation, where=f"layout breaks rule {broken.rule}", remedy=broken.fix)
    return plan_of(spec, case, layout, memory_of(case, layout, all_stages=all_stages))


def _with_stages(form: Mapping[str, Any], spec: Spec) -> Mapping[str, Any]:
    """Return the form, with the explicit pipeline layout that trainers need if the layers are not divisible."""
    pp, vpp = form.get("pp", 1), form.get("vpp", 1)
    if form.get("pipeline_layout") or not (isinstance(pp, int) and isinstance(vpp, int)) or pp < 1 or vpp < 1:
        return form
    layers, mtp_layers = spec.model.num_layers, spec.job.mtp_num_layers
    if layers % (pp * vpp) and (even := balanced_pipeline_layout(layers, pp, vpp, mtp_layers)):
        return {**form, "pipeline_layout": even}
    return form


def _warnings(spec: Spec, case: Case, layout: Layout, memory: Memory, trainer: Trainer | None) -> tuple[str, ...]:
    """Return what a user should know before choosing the plan."""
    engine, model, job = engine_of(layout.backend), case.model, case.job
    found = [*notes_on_bands(case.profile, case.cluster.gpu.name, engine.bands(case))]
    found += training_path_of(layout.backend).model_warnings(model)
    host = memory.host_capacity_bytes
    if host is not None and memory.host_bytes > host:
        found.append(f"offload needs {memory.host_bytes / GIB:.0f} GiB of a node's {host / GIB:.0f} GiB host memory")
    if trainer and (loading := loading_note(spec, layout, memory.device_bytes)):
        found.append(loading)
    found += engine.warnings(case, layout)
    found += environment_warnings(spec, layout, trainer.versions if trainer else None)
    found += engine.assumptions(case, layout)
    if model.vision and job.images_per_sequence:
        images = "1 image" if job.images_per_sequence == 1 else f"{job.images_per_sequence:g} images"
        found.append(f"assumes {images} of {job.image_max_pixels:,} pixels per sequence")
    if 0 < model.max_position_embeddings < job.seq_len:
        found.append(f"seq_len {job.seq_len} exceeds the model's {model.max_position_embeddings} positions")
    return (*found, *oddities(spec, layout))
