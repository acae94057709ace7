"""The cases of a spec: the backends under which a search considers it, and what is known for each."""

from __future__ import annotations

from typing import Any

from topoplan.engines.registry import ENGINES, engine_of
from topoplan.errors import listed
from topoplan.layout.layout import DEFAULTS, pinned_keys_of
from topoplan.specs.case import Case
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of
from topoplan.trainers.refusal import Refusal, refuse
from topoplan.trainers.registry import backends_of, has_backend, job_refusals, training_path_of


def usual_backends(spec: Spec) -> tuple[str, ...]:
    """Return the backends that a search considers by default.

    These are the pinned backend, or Megatron for what it can train, or else the others. For adapters they are all
    backends, because it is not known in advance which is fastest. Pinned keys that only other backends have select
    those backends.
    """
    if "backend" in spec.job.pin:
        return (spec.job.pin["backend"],)
    megatron, *_ = every = backends_of(spec.trainer, spec.job.finetuning)
    usual = training_path_of(megatron, spec.trainer)
    others = [backend for backend in every if training_path_of(backend, spec.trainer) is not usual]
    if not others:
        return every
    if foreign := _foreign_pins(spec, megatron):
        return tuple(other for other in others if foreign.keys() <= {*pinned_keys_of(other)}) or tuple(others)
    is_theirs = spec.job.finetuning != "full" or spec.job.pure_bf16 or spec.job.optimizer != "adamw"
    if is_theirs and any(job_refusals(spec, megatron)):
        return tuple(others)
    return (*others, megatron) if spec.job.finetuning == "lora" else (megatron,)


def cases_of(spec: Spec) -> tuple[dict[str, Case], dict[str, Refusal]]:
    """Return a case for each requested backend that can run the job, and the obstacle for each that cannot.

    Requested are the backends that the spec names, or `usual_backends`. Raises the first obstacle if no backend can.
    """
    asked = spec.backends or usual_backends(spec)
    unable = {backend: refusal for backend in asked if (refusal := _hindrance(spec, backend))}
    able = {backend: case_of(spec, backend) for backend in asked if backend not in unable}
    if not able:
        refuse(unable.values())
    return able, unable


def left_out(spec: Spec) -> dict[str, Refusal]:
    """Return the usual Megatron backend with its obstacle, if a default search leaves it out for that reason."""
    megatron, *_ = backends_of(spec.trainer, spec.job.finetuning)
    if spec.backends or megatron in usual_backends(spec):
        return {}
    refusal = _hindrance(spec, megatron)
    return {megatron: refusal} if refusal else {}


def another_backend(spec: Spec) -> str | None:
    """Return a backend outside the default search that can run the job, preferably FSDP2, or None."""
    every = dict.fromkeys(("fsdp2", *backends_of(spec.trainer, spec.job.finetuning)))
    asked = spec.backends or usual_backends(spec)
    return next((one for one in every if one not in asked and _hindrance(spec, one) is None), None)


def _hindrance(spec: Spec, backend: str) -> Refusal | None:
    """Return why no layout of a backend can run a job, or None."""
    if not has_backend(backend, spec.trainer):
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
    """Return the pinned keys that layouts of the backend's engine lack; rules check what distinguishes its backends."""
    if not spec.job.pin:
        return {}
    known = {key for one in engine_of(backend).backends for key in pinned_keys_of(one)}
    return {key: value for key, value in spec.job.pin.items() if key not in known and value != DEFAULTS.get(key)}
