"""A YAML of LLaMA-Factory from its sections: the user's keys in place of ours, and a name of its own for the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from topoplan.planner.plan import Plan
from topoplan.specs.spec import Spec
from topoplan.trainers.trainer import MAIN_FILE, TrainerFiles
from topoplan.trainers.usual import run_name
from topoplan.trainers.yaml_text import Entry, Section, mapping_text

OUTPUT_TITLE = "Checkpoints and logs"
"""Title of the section that output_dir comes first in."""


def trainer_files(
    spec: Spec,
    plan: Plan,
    sections: Iterable[Section],
    *,
    user: Mapping[str, Any],
    head: Iterable[str],
    warnings: Iterable[str],
    further: Mapping[str, str] | None = None,
) -> TrainerFiles:
    """The files of a plan: the sections, and `further` ones beside them, which are a part of the run's identity too."""
    named = _with_user_keys(list(sections), user)
    values = {entry.key: entry.value for section in named for entry in section.entries}
    identity = [spec.cluster.world_size, values, *([dict(further)] if further else [])]
    name = run_name(spec.model, plan.id, identity)
    named = _with_output_dir(named, user, name)
    return TrainerFiles(
        files={MAIN_FILE: mapping_text(tuple(head), named), **(further or {})},
        values={entry.key: entry.value for section in named for entry in section.entries},
        run_name=name,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _with_output_dir(sections: list[Section], user: Mapping[str, Any], name: str) -> list[Section]:
    if "output_dir" in user:
        return sections
    entry = Entry(
        key="output_dir",
        value=f"saves/{name}",
        comment="of this plan only: a checkpoint found there is resumed unasked; on storage that all nodes share",
    )
    return [
        replace(section, entries=(entry, *section.entries)) if section.title == OUTPUT_TITLE else section
        for section in sections
    ]


def _with_user_keys(sections: list[Section], user: Mapping[str, Any]) -> list[Section]:
    """The user's values in place of ours, and the keys that we do not write in a section of their own."""
    ours = {entry.key for section in sections for entry in section.entries}
    origin = "from job.trainer in the spec"
    merged = [
        replace(
            section,
            entries=tuple(
                replace(entry, value=user[entry.key], comment=origin)
                if entry.key in user and user[entry.key] != entry.value
                else entry
                for entry in section.entries
            ),
        )
        for section in sections
    ]
    further = tuple(Entry(key=key, value=value) for key, value in user.items() if key not in ours)
    return [*merged, Section(title="Further keys of the spec (job.trainer)", entries=further)]
