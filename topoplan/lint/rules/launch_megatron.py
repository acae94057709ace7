"""What a launch of LLaMA-Factory's Megatron trainers needs in its environment."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from topoplan.lint.rules.environment import goes_on
from topoplan.lint.rules.launch_facts import (
    RULES,
    certain_text,
    configurations_of,
    from_outside,
    has_exports,
    is_enabled,
    megatron_keys,
    size_of,
)
from topoplan.reading.finding import Edit, Finding
from topoplan.reading.setup import Configuration, Launch, Setup
from topoplan.reading.values import value_of
from topoplan.trainers.llamafactory.key_list import TrainerPath


def findings(setup: Setup) -> Iterator[Finding]:
    """Report what the environment of LLaMA-Factory's Megatron trainers lacks."""
    for launch in setup.launches:
        for rule in _RULES:
            yield from rule(setup, launch)


def _switch(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report Megatron keys without their switch (USE_MCA or USE_MEGATRON_BRIDGE), and USE_MCA without Megatron keys."""
    if not launch.program.startswith("llamafactory") and not _is_own_script(launch):
        return
    configurations = configurations_of(setup, launch)
    path: TrainerPath = "bridge" if {setup.training_path(one) for one in configurations} == {"bridge"} else "mca"
    name = "USE_MCA" if path == "mca" else "USE_MEGATRON_BRIDGE"
    keys = [key for one in configurations for key in megatron_keys(one, path)]
    all_need_it = all(megatron_keys(one, path) for one in configurations)
    if keys and launch.variable(name) is None and not from_outside(launch) and all_need_it:
        edits = _exported(setup, launch, name) if path == "bridge" or all(map(_trains_all, configurations)) else ()
        rule = RULES["launch-missing-use-mca" if path == "mca" else "launch-missing-use-megatron-bridge"]
        yield rule.on(launch, key=keys[0], edits=edits)
    elif (
        path == "mca"
        and configurations
        and not keys
        and is_enabled(launch, name)
        and launch.file_configuration is not None
    ):
        yield RULES["launch-unused-use-mca"].on(launch)


def _trains_all(configuration: Configuration) -> bool:
    """Whether a configuration asks for full fine-tuning; the Megatron trainer does that whatever method is named."""
    return bool(value_of(configuration, "finetuning_type") == "full")


def _exported(setup: Setup, launch: Launch, name: str) -> tuple[Edit, ...]:
    """Return an edit that exports the switch above the only command that would see it."""
    others = [one for one in setup.launches if one.part is launch.part and one is not launch]
    if others or not has_exports(launch) or goes_on(launch.part, launch.first_line):
        return ()
    line = launch.part.text.split("\n")[launch.first_line - 1]
    text = f"{line[: len(line) - len(line.lstrip())]}export {name}=1"
    return (Edit(first_line=launch.first_line, last_line=launch.first_line - 1, text=text),)


def _is_own_script(launch: Launch) -> bool:
    """Whether a launch runs LLaMA-Factory's src/train.py; the adapter's run_train.py has the switch as an argument."""
    return re.fullmatch(r"(?:.*/)?src/train(?:_bash)?\.py", launch.program) is not None


def _fsdp_connections(setup: Setup, launch: Launch) -> Iterator[Finding]:
    variable = launch.variable("CUDA_DEVICE_MAX_CONNECTIONS")
    if launch.starter == "accelerate" and "use_fsdp" in launch.options and certain_text(variable) == "1":
        yield RULES["launch-max-connections.fsdp"].on(launch, variable)


def _max_connections(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report CUDA_DEVICE_MAX_CONNECTIONS other than 1: before Blackwell, Megatron's communication overlap needs it."""
    if not launch.program.startswith("llamafactory") or not is_enabled(launch, "USE_MCA") or from_outside(launch):
        return
    if Path(launch.part.name).parent in setup.bundles:
        return  # topoplan chose the value for the GPU that it planned for
    variable = launch.variable("CUDA_DEVICE_MAX_CONNECTIONS")
    splits = [
        max(size_of(one, "tensor_model_parallel_size"), size_of(one, "context_parallel_size"))
        for one in configurations_of(setup, launch)
    ]
    if not splits or min(splits) < 2 or (variable is not None and certain_text(variable) in (None, "1")):
        return
    state = "is not set" if variable is None else f"is {variable.value}"
    yield RULES["launch-max-connections"].on(launch, state=state)


_RULES: tuple[Callable[[Setup, Launch], Iterator[Finding]], ...] = (_switch, _fsdp_connections, _max_connections)
