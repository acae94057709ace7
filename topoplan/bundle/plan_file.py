"""Read plan.json back: the spec and plan of a bundle, from which `generate` can write the bundle again.

Inputs and layout come from the file, while memory and time are predicted again. Since prediction is pure, the same
version of topoplan gives the same bytes. Another version, or inputs edited by a person, give other predictions: the
recorded numbers would not match the new scripts. `RecordedPlan.notes` reports the differences.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import topoplan
from topoplan.bundle.bundle import PLAN_SCHEMA, files_of
from topoplan.bundle.draft import NO_SCHEDULER, Draft, Scheduler, draft_of
from topoplan.errors import InputError, SpecError, nearest
from topoplan.layout.forms import layout_from_dict
from topoplan.planner.inputs import spec_from_dict
from topoplan.planner.plan import Plan
from topoplan.planner.predict import plan_under, predict
from topoplan.planner.view import plan_to_dict
from topoplan.specs.json_source import parse_json
from topoplan.specs.source import KeyPath, Source, read_text, shown_path
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import trainer_names, written_by
from topoplan.trainers.trainer import PLAN_FILE
from topoplan.units import GIB, quote, shown

SCHEDULERS = get_args(Scheduler)
"""Allowed values of `scheduler` besides null."""

_MOST_BYTES = 100_000_000
"""10,000 hosts with eight adapters each take 5 MB; the lengths of a large data set a little less."""
_KEYS = ("schema", "version", "id", "run", "inputs", "layout", "prediction", "trainer_versions", "trainer", "scheduler")
_REMEDY = "give the plan.json of a bundle, or its directory"
_NOT_COMPARED = ("id", "layout", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
"""Keys of a plan's view that are not compared, because they are inputs or follow from the step time."""
_OTHER_FILES = {"hosts": "hosts.json of a bundle", "manifest": "list of a bundle's files"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPlan:
    """The content of a plan.json."""

    spec: Spec
    """The recorded inputs, exactly as they were; `path` is None."""
    plan: Plan
    """The recorded layout, with memory and time as predicted by this version of topoplan."""
    version: str
    """The version of topoplan that wrote the file."""
    scheduler: Scheduler | None = None
    """What starts the node scripts; None if a person or topoplan over SSH does."""
    trainer: str | None = None
    """The trainer; None means the default of the layout's backend."""
    notes: tuple[str, ...] = ()
    """Sentences on the differences between this version's predictions and the file."""
    source: Source = field(repr=False, compare=False)
    """The document, for the locations of mistakes."""


def read_plan_file(path: str | Path) -> RecordedPlan:
    """Read the plan in a plan.json, or in the directory of a bundle. Raises SpecError with file, line and key for what
    cannot be read, and LayoutError or ModelError for a layout or model that is not possible."""
    return recorded_plan(plan_document(path))


def bundle_of(path: str | Path) -> Path | None:
    """Return the directory of a bundle, given itself or by its plan.json; None for any other path."""
    path = Path(path)
    if path.is_dir():
        return path
    return path.parent if path.name == PLAN_FILE else None


def plan_document(path: str | Path) -> Source:
    """Return the content of a plan.json, given itself or by its bundle's directory. Raises SpecError."""
    path = Path(path)
    if path.is_dir():
        if not (path / PLAN_FILE).exists():
            raise SpecError(f"is not a bundle: no {PLAN_FILE}", where=shown_path(path), remedy=_REMEDY)
        path = path / PLAN_FILE
    text = read_text(path, most_bytes=_MOST_BYTES, wanted=_REMEDY)
    return parse_json(text, name=shown_path(path), remedy=_REMEDY)


def recorded_plan(source: Source) -> RecordedPlan:
    """Return the plan in a document. Raises what `read_plan_file` raises."""
    data = source.data
    _check_head(source)
    spec = spec_from_dict(source, ("inputs",))
    with _placed(source):
        layout = layout_from_dict(data["layout"], spec.cluster, spec.model, spec.job)
        stages = _at(data, "prediction", "memory", "by_stage")
        plan = predict(spec, layout, all_stages=isinstance(stages, list) and len(stages) >= layout.pp)
        writer, _ = written_by(layout.backend, data.get("trainer"))
        plan = plan_under(spec, plan, writer.name)
    return RecordedPlan(
        spec=spec,
        plan=plan,
        version=data["version"],
        scheduler=data.get("scheduler"),
        trainer=data.get("trainer"),
        notes=tuple(_notes(data, plan)),
        source=source,
    )


def draft_again(recorded: RecordedPlan, scheduler: str | None = None, trainer: str | None = None) -> Draft:
    """Return the draft of a recorded plan's bundle, unchanged or for another scheduler or trainer. Raises what
    `draft_of` raises, with the location in the file."""
    spec, plan = recorded.spec, recorded.plan
    with _placed(recorded.source):
        if trainer not in (None, recorded.trainer):
            plan = plan_under(spec, plan, trainer)
        return draft_of(spec, plan, scheduler or recorded.scheduler or NO_SCHEDULER, trainer or recorded.trainer)


def written_again(recorded: RecordedPlan) -> dict[str, str]:
    """Return a recorded plan's bundle. Raises what `generate` raises, with the location in the file."""
    draft = draft_again(recorded)
    with _placed(recorded.source):
        return files_of(draft)


def _check_head(source: Source) -> None:
    """Check the schema first, then the other top-level keys, so that a version mismatch is reported as such."""
    data, name = source.data, source.name
    schema = data.get("schema")
    match = re.fullmatch(r"topoplan\.([a-z-]+)/([0-9]{1,9})", schema) if isinstance(schema, str) else None
    if match is None:
        raise SpecError("is not a plan.json: no `schema` of topoplan", where=name, remedy=_REMEDY)
    kind, number = match.groups()
    if kind != "plan":
        what = _OTHER_FILES.get(kind, f"output of `topoplan {kind}`")
        raise SpecError(f"is not a plan.json but the {what}", where=source.place(("schema",)), remedy=_REMEDY)
    version = data.get("version")
    if schema != PLAN_SCHEMA:
        newer = f"was written by a newer topoplan{f' ({quote(version)})' if isinstance(version, str) else ''}"
        raise SpecError(
            f"{newer}: its schema is {schema}" if int(number) > 1 else f"has an unknown schema, {schema}",
            where=source.place(("schema",)),
            expected=f"topoplan {topoplan.__version__} reads {PLAN_SCHEMA}",
            remedy="update topoplan" if int(number) > 1 else "",
        )
    for key in data:
        if key not in _KEYS:
            remedy = nearest(key, _KEYS)
            if not remedy and version != topoplan.__version__:
                remedy = f"topoplan {shown(version)} wrote it, this is {topoplan.__version__}"
            raise SpecError(f"unknown key {shown(key)}", where=source.place((key,)), remedy=remedy)
    for key, of, words in (("version", str, "text"), ("inputs", dict, "a block"), ("layout", dict, "a block")):
        if not isinstance(data.get(key), of):
            what = f"{key}: {shown(data[key])} is not {words}" if key in data else f"`{key}` is missing"
            raise SpecError(what, where=source.place((key,)))
    for key, names in (("scheduler", SCHEDULERS), ("trainer", trainer_names())):
        if (value := data.get(key)) is not None and value not in names:
            expected = f"expected {', '.join((*names, 'null'))}"
            raise SpecError(f"{key}: {shown(value)}", where=source.place((key,)), expected=expected)


@contextmanager
def _placed(source: Source) -> Iterator[None]:
    """Add the line in the file to errors about a spec or a layout."""
    try:
        yield
    except InputError as error:
        where = ": ".join(filter(None, (_line_of(error.where, source), error.where)))
        raise type(error)(error.what, where=where, expected=error.expected, remedy=error.remedy) from None
    except ArithmeticError as error:
        # Each figure is within its range, but together they describe no real machine or model.
        raise SpecError(f"its figures are inconsistent ({error})", where=source.place(("inputs",))) from None


def _line_of(where: str, source: Source) -> str:
    """Return the `file:line` of a location such as `layout.tp` or `hosts[0].workdir`; only the file if unknown."""
    match = re.match(r"[a-z_]\w*(?:\.\w+|\[\d+\])*", where)
    names = re.findall(r"\w+", match.group()) if match else []
    path: KeyPath = tuple(int(name) if name.isdecimal() else name for name in names)
    for block in ((), ("inputs",), ("inputs", "cluster")):
        if path and (*block, path[0]) in source.lines:
            return source.place((*block, *path))
    return source.name


def _at(data: Any, *path: str) -> Any:
    """Return a recorded value for a note; None if a person removed it or changed its type."""
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _notes(data: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    view = plan_to_dict(plan)
    if (version := data["version"]) != topoplan.__version__:
        yield f"the plan is from topoplan {quote(version)}; {topoplan.__version__} may write its files differently"
    if (plan_id := data.get("id")) != plan.id:
        yield f"the layout is that of {plan.id}, but `id` is {quote(plan_id)}"
    changed = [key for key in view if key not in _NOT_COMPARED and _at(data, "prediction", key) != view[key]]
    for part, key, unit in (("memory", "device_gib", "GiB"), ("time", "step_s", "s per step")):
        then, now = _at(data, "prediction", part, key), view[part][key]
        if then != now:
            changed.remove(part)
            yield f"{part}: {_short(now)} {unit}, but the plan has {_short(then)}"
    if changed:
        yield f"a new prediction differs from the plan in {', '.join(changed)}"
    if not plan.fits:
        memory = plan.memory
        yield (
            f"does not fit: {memory.device_bytes / GIB:.1f} GiB and a margin of {memory.margin_bytes / GIB:.1f} GiB"
            f" on a card of {memory.capacity_bytes / GIB:.1f} GiB"
        )


def _short(value: Any) -> str:
    is_number = isinstance(value, float) and math.isfinite(value)
    return f"{value:.3g}" if is_number else quote(value)
