"""The cases of a spec: under which backends a search looks at it, and what is known of each."""

from __future__ import annotations

from typing import Any

from topoplan.engines.registry import ENGINES, engine_of
from topoplan.errors import InputError, ModelError, SpecError, listed
from topoplan.layout.layout import USUAL, keys_of
from topoplan.specs.case import Case
from topoplan.specs.gpu_profile import profile_of
from topoplan.specs.spec import Spec
from topoplan.trainers.jobs import check_search
from topoplan.trainers.registry import backends_of, trainers_of
from topoplan.trainers.traits import traits_of


def case_of(spec: Spec, backend: str) -> Case:
    """What is asked of a backend: the spec, the constants of its GPU, and how the backend's trainer computes."""
    traits = traits_of(backend, spec.trainer)
    return Case(
        model=spec.model,
        cluster=spec.cluster,
        job=spec.job,
        profile=profile_of(spec.cluster.gpu, spec.profile),
        traits=traits,
        is_past=spec.path is None,
    )


def usual_backends(spec: Spec) -> tuple[str, ...]:
    """What a search looks at when nobody says: the pinned one, or Megatron for what it trains, else the others.

    Keys that only others have are pinned for these.
    """
    if "backend" in spec.job.pin:
        return (spec.job.pin["backend"],)
    megatron, *others = backends_of(spec.trainer, spec.job.finetuning)
    if not others:
        return (megatron,)
    if foreign := _foreign_pins(spec, megatron):
        return tuple(other for other in others if foreign.keys() <= {*keys_of(other)}) or tuple(others)
    if spec.job.finetuning == "lora":
        # Adapters leave little for a pipeline to split; Megatron is for models that nothing else has room for.
        return tuple(others)
    try:
        _check(spec, megatron)
    except (ModelError, SpecError):
        is_theirs = spec.job.finetuning != "full" or spec.job.pure_bf16 or spec.job.optimizer != "adamw"
        return tuple(others) if is_theirs else (megatron,)
    return (megatron,)


def cases_of(spec: Spec) -> tuple[dict[str, Case], dict[str, InputError]]:
    """A case for each backend that is asked for and can run the job, and what is in the way of the others.

    Asked for are those that the spec names, or `usual_backends`. Raises what the first one says if none can.
    """
    able: dict[str, Case] = {}
    unable: dict[str, InputError] = {}
    for backend in spec.backends or usual_backends(spec):
        try:
            _check(spec, backend)
            able[backend] = case_of(spec, backend)
        except (ModelError, SpecError) as error:
            unable[backend] = error
    if not able:
        raise next(iter(unable.values()))
    return able, unable


def _check(spec: Spec, backend: str) -> None:
    """Raise ModelError or SpecError for a job that no layout of a backend would help."""
    if not trainers_of(backend, spec.trainer):
        raise SpecError(
            f"{spec.trainer} has no backend {backend}", expected=f"expected {' or '.join(backends_of(spec.trainer))}"
        )
    for key, value in _foreign_pins(spec, backend).items():
        owners = [one for engine in ENGINES for one in engine.backends if key in keys_of(one)]
        raise SpecError(
            f"pin {key} {str(value).lower()} with backend {backend}",
            where=spec.path or "",
            remedy=f"take backend {listed(owners, 'or')}",
        )
    check_search(spec, backend)


def _foreign_pins(spec: Spec, backend: str) -> dict[str, Any]:
    """Pins of what layouts of an engine do not have; rules look at what tells its backends apart."""
    if not spec.job.pin:
        return {}
    known = {key for one in engine_of(backend).backends for key in keys_of(one)}
    return {key: value for key, value in spec.job.pin.items() if key not in known and value != USUAL[key]}
