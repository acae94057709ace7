"""The cases of a spec: under which backends a search looks at it, and what is known of each."""

from __future__ import annotations

from typing import Any

from topoplan.engines.registry import ENGINES, engine_of
from topoplan.errors import listed
from topoplan.layout.layout import USUAL, pinned_keys_of
from topoplan.specs.case import Case
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of
from topoplan.trainers.refusal import Refusal, refuse
from topoplan.trainers.registry import backends_of, has_way, job_refusals, way_of


def usual_backends(spec: Spec) -> tuple[str, ...]:
    """What a search looks at when nobody says: the pinned one, or Megatron for what it trains, else the others.

    For adapters all of them: which is faster is not known before. Keys that only others have are pinned for these.
    """
    if "backend" in spec.job.pin:
        return (spec.job.pin["backend"],)
    megatron, *_ = every = backends_of(spec.trainer, spec.job.finetuning)
    usual = way_of(megatron, spec.trainer)
    others = [backend for backend in every if way_of(backend, spec.trainer) is not usual]
    if not others:
        return every
    if foreign := _foreign_pins(spec, megatron):
        return tuple(other for other in others if foreign.keys() <= {*pinned_keys_of(other)}) or tuple(others)
    is_theirs = spec.job.finetuning != "full" or spec.job.pure_bf16 or spec.job.optimizer != "adamw"
    if is_theirs and any(job_refusals(spec, megatron)):
        return tuple(others)
    return (*others, megatron) if spec.job.finetuning == "lora" else (megatron,)


def cases_of(spec: Spec) -> tuple[dict[str, Case], dict[str, Refusal]]:
    """A case for each backend that is asked for and can run the job, and what is in the way of the others.

    Asked for are those that the spec names, or `usual_backends`. Raises what the first one says if none can.
    """
    asked = spec.backends or usual_backends(spec)
    unable = {backend: refusal for backend in asked if (refusal := _hindrance(spec, backend))}
    able = {backend: case_of(spec, backend) for backend in asked if backend not in unable}
    if not able:
        refuse(unable.values())
    return able, unable


def left_out(spec: Spec) -> dict[str, Refusal]:
    """The usual Megatron backend with what is in its way, where a search that nobody says more of leaves it out."""
    megatron, *_ = backends_of(spec.trainer, spec.job.finetuning)
    if spec.backends or megatron in usual_backends(spec):
        return {}
    refusal = _hindrance(spec, megatron)
    return {megatron: refusal} if refusal else {}


def another_backend(spec: Spec) -> str | None:
    """A backend that runs a job which none does that a search would look at, FSDP2 before others; None without one."""
    every = dict.fromkeys(("fsdp2", *backends_of(spec.trainer, spec.job.finetuning)))
    asked = spec.backends or usual_backends(spec)
    return next((one for one in every if one not in asked and _hindrance(spec, one) is None), None)


def _hindrance(spec: Spec, backend: str) -> Refusal | None:
    """Why no layout of a backend would help a job."""
    if not has_way(backend, spec.trainer):
        expected = f"expected {' or '.join(backends_of(spec.trainer))}"
        return Refusal("backend", f"{spec.trainer} has no backend {backend}", expected=expected)
    for key, value in _foreign_pins(spec, backend).items():
        owners = [one for engine in ENGINES for one in engine.backends if key in pinned_keys_of(one)]
        return Refusal(
            "pin",
            f"pin {key} {str(value).lower()} with backend {backend}",
            where=spec.path or "",
            remedy=f"take backend {listed(owners, 'or')}",
        )
    return next(job_refusals(spec, backend), None)


def _foreign_pins(spec: Spec, backend: str) -> dict[str, Any]:
    """Pins of what layouts of an engine do not have; rules look at what tells its backends apart."""
    if not spec.job.pin:
        return {}
    known = {key for one in engine_of(backend).backends for key in pinned_keys_of(one)}
    return {key: value for key, value in spec.job.pin.items() if key not in known and value != USUAL.get(key)}
