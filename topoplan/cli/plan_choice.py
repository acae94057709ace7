"""Resolve the plan of `--plan N|ID`, for a spec or a run document."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from topoplan.cli.completion import plans
from topoplan.cli.options import option
from topoplan.errors import InputError, LayoutError, SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from topoplan.cli.options import SpecOptions
    from topoplan.planner.plan import Plan, Ranking
    from topoplan.specs.spec import Spec

PlanChoice = Annotated[str, option("--plan N|ID", "Which plan: its rank, or its id such as tp4-pp1-dp8-mbs1.", plans)]
RunPath = Annotated[
    str | None, option("--run FILE", "A run document as `topoplan predict` reads it, in place of SPEC and --plan.")
]


def wanted_id(wanted: str) -> str:
    """Normalize an id: tables show ids with spaces and colons, and users may paste them."""
    return wanted.strip().lower().replace(" ", "-").replace(":", "-")


def place_in_ranking(ranking: Ranking, wanted: str, *, option: str = "--plan") -> int | None:
    """Return the index (from 0) of the plan with a rank or id; None for an id that is not in the ranking."""
    wanted = wanted_id(wanted)
    if wanted.isdecimal():
        if 1 <= int(wanted) <= len(ranking.plans):
            return int(wanted) - 1
        raise LayoutError(f"there is no plan {wanted}", where=option, expected=f"expected 1 to {len(ranking.plans)}")
    return next((place for place, layout in enumerate(ranking.plans.layouts) if layout.id == wanted), None)


def plan_of_id(spec: Spec, wanted: str, *, option: str = "--plan") -> Plan:
    """Return the plan of an id, whether it fits or not; keys not in the id come from the spec's pins or the search."""
    from topoplan.layout.ids import layout_of_id
    from topoplan.planner.predict import predict

    wanted = wanted_id(wanted)
    keys = layout_of_id(wanted, spec.model.num_layers, spec.job.mtp_num_layers, option=option)
    plan = predict(spec, {**_searched_keys(spec, keys), **spec.job.pin, **keys})
    if plan.id != wanted:
        raise LayoutError(f"{wanted!r} is not the id of a layout of this job", where=option, remedy=f"it is {plan.id}")
    return plan


def _searched_keys(spec: Spec, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a search of the spec would choose for keys that ids leave out."""
    from topoplan.engines.registry import engine_of
    from topoplan.trainers.case import case_of
    from topoplan.trainers.registry import backends_of

    if backend := keys.get("backend"):
        return engine_of(backend).defaults_not_in_ids(case_of(spec, backend), keys)
    searched = (*spec.backends, *backends_of(spec.trainer, spec.job.finetuning))
    unnamed = [backend for backend in searched if not engine_of(backend).ids_name_backend]
    return {"backend": unnamed[0]} if unnamed else {}


def plans_of_spec(spec: Spec, wanted: Mapping[str, str], *, fresh: bool) -> list[Plan]:
    """Return the plans that options name: by rank, which needs a search, or by id, which needs one if `uneven`."""
    from topoplan.cli.search import search
    from topoplan.planner.predict import predict

    names = {option: wanted_id(text) for option, text in wanted.items()}
    ranking = None
    if any(name.isdecimal() or "uneven" in name.split("-") for name in names.values()):
        ranking = search(spec, fresh=fresh)
        if not ranking.plans:
            from topoplan.report.ways_out import nothing_fits

            raise nothing_fits(ranking)
    plans = []
    for said, name in names.items():
        place = None if ranking is None else place_in_ranking(ranking, name, option=said)
        if ranking is None or place is None:
            plans.append(plan_of_id(spec, name, option=said))
        else:
            # Predicted again, because plans of a search do not list all stages.
            plans.append(predict(spec, ranking.plans.layouts[place]))
    return plans


def plans_of_command(
    spec: str | None, run: str | None, wanted: Mapping[str, str], options: SpecOptions, *, fresh: bool
) -> tuple[Spec, list[Plan]]:
    """Return the spec and the plans named by a command line: by SPEC and options such as --plan, or by --run."""
    from topoplan.cli.options import EXAMPLE

    if run is None:
        if spec is None and options.gpu is None:
            raise InputError("expected a SPEC, --gpu or --run FILE", remedy=f"such as {EXAMPLE}")
        read = options.read(spec)
        return read, plans_of_spec(read, wanted, fresh=fresh)
    if spec is not None:
        raise InputError("SPEC and --run are both given", remedy="leave one out")
    if replace(options, profile=None) or dict(wanted) != {"--plan": "1"}:
        raise InputError("--run has model, job and layout in its file", remedy="leave the other options out")
    return plan_of_run(run, options.profile)


def plan_of_run(source: str, profile: str | None) -> tuple[Spec, list[Plan]]:
    """Return the spec of a run document, and the plan of its layout."""
    from topoplan.cli.run_documents import read_run_documents
    from topoplan.planner.predict import predict
    from topoplan.specs.load import spec_from_document
    from topoplan.specs.profile import read_profile

    own = None if profile is None else read_profile(profile)
    documents = list(read_run_documents(source))
    if len(documents) != 1:
        raise SpecError(f"{len(documents)} run documents", where=source, expected="expected one")
    (document,) = documents
    if document.error:
        raise SpecError(document.error)
    base = Path.cwd() if source == "-" else Path(source).parent
    spec = spec_from_document(document.spec, where=document.where, base=base, profile=own)
    return spec, [predict(spec, document.layout)]
