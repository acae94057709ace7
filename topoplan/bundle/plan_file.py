"""plan.json read back: the spec and the plan of a bundle, from which `generate` writes the same bundle again.

Inputs and layout are taken from the file; memory and time are predicted again. Prediction is a pure function of the
two, so the same version of the program gives the same bytes. Another version writes the layout of the file as it knows
best, with numbers of its own: old numbers beside new scripts would be nobody's prediction, and neither would the
file's be after somebody has changed its inputs. What differs is told in `RecordedPlan.notes`.
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
"""What may stand under `scheduler`, beside null."""

_MOST_BYTES = 100_000_000
"""10,000 hosts with eight adapters each take 5 MB; the lengths of a large data set a little less."""
_KEYS = ("schema", "version", "id", "run", "inputs", "layout", "prediction", "trainer_versions", "trainer", "scheduler")
_REMEDY = "give the plan.json of a bundle, or its directory"
_NOT_COMPARED = ("id", "layout", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
"""Of a plan's view: what is an input, and what follows from the time."""
_OTHER_FILES = {"hosts": "hosts.json of a bundle", "manifest": "list of a bundle's files"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPlan:
    """What a plan.json holds."""

    spec: Spec
    """Its inputs, exactly as they were; `path` is None."""
    plan: Plan
    """Its layout, with memory and time as this version of the program predicts them."""
    version: str
    """The version of topoplan that wrote the file."""
    scheduler: Scheduler | None = None
    """What starts the scripts on the nodes; None where a person or SSH does."""
    trainer: str | None = None
    """What trains; None is the default of the layout's backend."""
    notes: tuple[str, ...] = ()
    """Sentences on what this version says otherwise than the file."""
    source: Source = field(repr=False, compare=False)
    """The document, for the place of a mistake."""


def read_plan_file(path: str | Path) -> RecordedPlan:
    """The plan in a plan.json, or in the directory of a bundle.

    Raises SpecError with file, line and key for what cannot be read; LayoutError and ModelError for what can be, and is
    not possible.
    """
    path = Path(path)
    if path.is_dir():
        if not (path / PLAN_FILE).exists():
            raise SpecError(f"is not a bundle: no {PLAN_FILE}", where=shown_path(path), remedy=_REMEDY)
        path = path / PLAN_FILE
    text = read_text(path, most_bytes=_MOST_BYTES, wanted=_REMEDY)
    return recorded_plan(parse_json(text, name=shown_path(path), remedy=_REMEDY))


def recorded_plan(source: Source) -> RecordedPlan:
    """The plan in a document. Raises what `read_plan_file` raises."""
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
    """The draft of a plan.json's bundle, as it was written, or for another scheduler or trainer.

    Raises what `draft_of` raises, with the place in the file.
    """
    spec, plan = recorded.spec, recorded.plan
    with _placed(recorded.source):
        if trainer not in (None, recorded.trainer):
            plan = plan_under(spec, plan, trainer)
        return draft_of(spec, plan, scheduler or recorded.scheduler or NO_SCHEDULER, trainer or recorded.trainer)


def written_again(recorded: RecordedPlan) -> dict[str, str]:
    """The bundle of a plan.json, as `generate` gives it. Raises what `generate` raises, with the place in the file."""
    draft = draft_again(recorded)
    with _placed(recorded.source):
        return files_of(draft)


def _check_head(source: Source) -> None:
    """The schema, then the other keys at the top: what a program of another age wrote says so first."""
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
    """Errors about a spec and a layout, with the line in the file that they are from."""
    try:
        yield
    except InputError as error:
        where = ": ".join(filter(None, (_line_of(error.where, source), error.where)))
        raise type(error)(error.what, where=where, expected=error.expected, remedy=error.remedy) from None
    except ArithmeticError as error:
        # Each figure is in its range, and together they are those of no machine or model.
        raise SpecError(f"its figures do not go together ({error})", where=source.place(("inputs",))) from None


def _line_of(where: str, source: Source) -> str:
    """`file:line` of a place such as `layout.tp` or `hosts[0].workdir`; the file alone for other words."""
    match = re.match(r"[a-z_]\w*(?:\.\w+|\[\d+\])*", where)
    names = re.findall(r"\w+", match.group()) if match else []
    path: KeyPath = tuple(int(name) if name.isdecimal() else name for name in names)
    for block in ((), ("inputs",), ("inputs", "cluster")):
        if path and (*block, path[0]) in source.lines:
            return source.place((*block, *path))
    return source.name


def _at(data: Any, *path: str) -> Any:
    """A value that is told, not used: None where a person has taken it out or changed its type."""
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _notes(data: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    view = plan_to_dict(plan)
    if (version := data["version"]) != topoplan.__version__:
        yield f"the plan is of topoplan {quote(version)}; {topoplan.__version__} may write its files otherwise"
    if (plan_id := data.get("id")) != plan.id:
        yield f"the layout is that of {plan.id}, and `id` says {quote(plan_id)}"
    changed = [key for key in view if key not in _NOT_COMPARED and _at(data, "prediction", key) != view[key]]
    for part, key, unit in (("memory", "device_gib", "GiB"), ("time", "step_s", "s a step")):
        then, now = _at(data, "prediction", part, key), view[part][key]
        if then != now:
            changed.remove(part)
            yield f"{part}: {_short(now)} {unit}, and the plan says {_short(then)}"
    if changed:
        yield f"predicted again, the plan says otherwise in {', '.join(changed)}"
    if not plan.fits:
        memory = plan.memory
        yield (
            f"does not fit: {memory.device_bytes / GIB:.1f} GiB and a margin of {memory.margin_bytes / GIB:.1f} GiB"
            f" on a card of {memory.capacity_bytes / GIB:.1f} GiB"
        )


def _short(value: Any) -> str:
    is_number = isinstance(value, float) and math.isfinite(value)
    return f"{value:.3g}" if is_number else quote(value)
