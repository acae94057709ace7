"""Launches of LLaMA-Factory that do not start what is intended.

Sources, at LLaMA-Factory 0.9.5: `launcher.py`, `cli.py`, `hparams/parser.py`, `v1/launcher.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from topoplan.reading.edits import goes_on, rewritten
from topoplan.reading.finding import Edit, Finding, Severity
from topoplan.reading.launch_facts import (
    assignment,
    certain_count,
    certain_text,
    configurations_of,
    from_outside,
    has_exports,
    line_of,
    lines_of,
    nodes_of,
    replaced,
    size_of,
)
from topoplan.reading.processes import visible_gpus
from topoplan.reading.setup import Configuration, Launch, Setup
from topoplan.reading.values import value_of
from topoplan.reading.words import is_open
from topoplan.trainers.llamafactory.key_list import TrainerPath, keys_for, plain_keys
from topoplan.trainers.llamafactory.reading import LLAMAFACTORY, V1_SUBCOMMANDS, is_enabled, sets_allocator
from topoplan.trainers.llamafactory.rules.table import RULES

_CLI_WORDS = re.compile(
    r"(?:\$\((?:which|command -v) (?:llamafactory-cli|lmf)\)|`which (?:llamafactory-cli|lmf)`"
    r"|(?:[^\s'\"`$()]*/)?(?:llamafactory-cli|lmf))\s+train(?!\S)"
)
_DECLARED_CHOICES = {
    "recompute_method": ("uniform", "recompute"),
    "moe_token_dispatcher_type": ("allgather", "alltoall"),
}
"""Choices that mcore_adapter's `training_args.py` declares where Megatron accepts further values."""
_FORM_A_VARIABLES = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")


def findings(setup: Setup) -> Iterator[Finding]:
    """Report faults of individual launches."""
    for launch in setup.launches:
        for rule in _RULES:
            yield from rule(setup, launch)


def _is_cli(launch: Launch) -> bool:
    """Whether a launch is `llamafactory-cli train`, which starts torchrun itself and reads NNODES and the like."""
    return launch.program == LLAMAFACTORY.command and not launch.starter


def _trains_with_megatron(launch: Launch) -> bool:
    """Whether a switch selects a Megatron trainer, for which torchrun is started even on one GPU."""
    return is_enabled(launch, "USE_MCA") or is_enabled(launch, "USE_MEGATRON_BRIDGE")


def _family(setup: Setup, launch: Launch) -> str:
    """Return the trainer whose configuration a launch uses."""
    used = launch.file_configuration or launch.configuration
    return used.trainer if used else ""


# The starter ---------------------------------------------------------------------------------------------------------


def _nested(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report a launcher around the command, which starts a launcher itself."""
    if not launch.starter or launch.program != LLAMAFACTORY.command:
        return
    processes = certain_count(launch.options.get("nproc_per_node")) or certain_count(launch.options.get("num_gpus"))
    each = f"each of the {processes} processes" if processes else "each process"
    edits: tuple[Edit, ...] = ()
    if launch.starter == "torchrun" and "no_python" not in launch.options:  # torchrun refuses `--no_python -m`
        edits = replaced(launch, _CLI_WORDS, "-m llamafactory.launcher")
    remedy = "write FORCE_TORCHRUN=1 llamafactory-cli train FILE: `deepspeed:` in FILE turns DeepSpeed on"
    yield RULES["launch-nested-torchrun"].on(
        launch,
        line_of(launch, _CLI_WORDS),
        called=launch.called,
        each=each,
        remedy=remedy if launch.starter == "deepspeed" else "",
        edits=edits,
    )


def _deepspeed_file(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report DeepSpeed's `--local_rank` in front of a file: `parser.py`, read_args."""
    is_read = launch.config_file and _family(setup, launch).startswith("llamafactory")
    if launch.starter == "deepspeed" and is_read and "no_local_rank" not in launch.options:
        yield RULES["launch-deepspeed-file"].on(launch, file=launch.config_file)


def _one_process(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report LLaMA-Factory run as a plain script with several GPUs visible: `parser.py`, get_train_args."""
    is_script = not launch.starter and launch.program.endswith(".py") and _family(setup, launch) == "llamafactory"
    gpus = visible_gpus(launch) or 1
    outside = from_outside(launch) or launch.variable("WORLD_SIZE") is not None
    if is_script and gpus > 1 and not outside and not launch.wrappers:
        yield RULES["launch-one-process"].on(launch, program=launch.program, gpus=gpus)


def _single_process(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report llamafactory.launcher run as a module without torchrun, which is a single process."""
    if launch.starter or launch.program != "llamafactory.launcher":
        return
    given = [name for name in _FORM_A_VARIABLES if launch.variable(name) is not None]
    if given:
        yield RULES["launch-single-process"].on(launch, variable=given[0])


def _deepspeed_alone(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report DeepSpeed in a process that was not started by a distributed launcher: `parser.py`, get_train_args."""
    used = [
        one
        for one in (launch.file_configuration, launch.configuration)
        if one is not None and one.trainer == "llamafactory"
    ]
    if launch.starter or not any(one.get("deepspeed") for one in used) or _trains_with_megatron(launch):
        return
    is_cli = _is_cli(launch)
    starts = is_cli and (is_enabled(launch, "FORCE_TORCHRUN") or visible_gpus(launch) != 1)
    if starts or from_outside(launch) or (not is_cli and "WORLD_SIZE" in {one.name for one in launch.variables}):
        return
    rule = RULES["launch-deepspeed-alone" if is_cli else "launch-deepspeed-alone.script"]
    yield rule.on(launch, program=launch.program)


def _port(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report several nodes without MASTER_PORT: `launcher.py` then draws a free one on each of them."""
    nodes = nodes_of(launch)
    if not _is_cli(launch) or nodes is None or nodes < 2 or from_outside(launch):
        return
    if launch.variable("MASTER_PORT") is not None:
        return
    beside = launch.variable("NNODES")
    edits: tuple[Edit, ...] = ()
    if beside is not None and beside.part is launch.part:
        edits = rewritten(beside, assignment(beside), f"MASTER_PORT=29500 {beside.name}=")
    has_rank = launch.variable("NODE_RANK") is not None or launch.variable("RANK") is not None
    level: Severity = "error" if has_rank and launch.variable("MASTER_ADDR") is not None else "warning"
    yield RULES["launch-missing-master-port"].on(
        launch, beside if edits else None, level=level, nodes=nodes, edits=edits
    )


def _run_id(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report NODE_RANK beside RDZV_ID, with which `launcher.py` takes c10d's rendezvous."""
    identity = launch.variable("RDZV_ID")
    if _is_cli(launch) and identity is not None and launch.variable("NODE_RANK") is not None:
        yield RULES["launch-node-rank-ignored.variable"].on(launch, identity)


# Arguments -----------------------------------------------------------------------------------------------------------


def _train_word(setup: Setup, launch: Launch) -> Iterator[Finding]:
    first = launch.arguments[0] if launch.arguments else ""
    if launch.program == "llamafactory.launcher" and first == "train":
        pattern = re.compile(r"(llamafactory[./]launcher(?:\.py)?[\"']?\s+)train\s+")
        yield RULES["launch-train-word"].on(launch, line_of(launch, pattern), edits=replaced(launch, pattern, r"\1"))
    elif launch.program == "llamafactory-cli" and first.endswith((".yaml", ".yml", ".json")):
        yield RULES["launch-train-word.file"].on(launch, first=first)


def _other_launcher(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report subcommands of `v1/launcher.py` given without USE_V1=1 to LLaMA-Factory's `launcher.py`."""
    word, is_new = next(iter(launch.arguments), ""), is_enabled(launch, "USE_V1")
    if _is_cli(launch) and word in V1_SUBCOMMANDS and not is_new and not from_outside(launch):
        yield RULES["launch-other-launcher"].on(launch, word=word)


def _overrides(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report arguments after a LLaMA-Factory configuration file that are not `key=value`."""
    if launch.program.startswith("llamafactory") and launch.config_file and (word := _no_override(launch)):
        yield RULES["launch-spaced-override"].on(launch, file=launch.config_file, word=word)
    if not launch.program.startswith("llamafactory") or not launch.config_file or launch.configuration is None:
        return
    dashed = [word for word in launch.arguments if re.match(r"--[A-Za-z]", word)]
    if dashed:
        key = dashed[0].lstrip("-").partition("=")[0]
        value = launch.configuration.get(key.replace("-", "_"))
        yield RULES["launch-dashed-override"].on(
            launch,
            launch.configuration.line(key.replace("-", "_")),
            option=dashed[0].partition("=")[0],
            file=launch.config_file,
            key=key,
            value=str(value).lower() if isinstance(value, bool) else value,
            edits=_undashed(launch),
        )


def _no_override(launch: Launch) -> str:
    """Return the first word after the file that is not `key=value`; another rule reports options and their values."""
    behind = launch.arguments[launch.arguments.index(launch.config_file) + 1 :]
    for before, word in zip(("", *behind), behind, strict=False):
        if "=" not in word.strip("=") and not word.startswith("-") and not before.startswith("-") and not is_open(word):
            return word
    return ""


def _undashed(launch: Launch) -> tuple[Edit, ...]:
    edits = []
    keys = {word.lstrip("-").partition("=")[0] for word in launch.arguments if re.match(r"--[A-Za-z]", word)}
    pattern = re.compile(r"(?<!\S)--([A-Za-z][\w.-]*)(?:=|\s+)(?!--)([^\s\\]+)")
    for number, line in lines_of(launch):
        changed = pattern.sub(lambda match: f"{match[1]}={match[2]}" if match[1] in keys else match[0], line)
        if changed != line:
            edits.append(Edit(first_line=number, last_line=number, text=changed))
    return tuple(edits)


def _declared_choices(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report values that argparse rejects on a command line, although they are not checked in a file."""
    configuration = launch.configuration
    if launch.config_file or configuration is None or configuration.trainer != "llamafactory":
        return
    for key, choices in _DECLARED_CHOICES.items():
        value = configuration.get(key)
        if isinstance(value, str) and value not in choices and not is_open(value):
            said = {"key": key, "value": value, "choices": " and ".join(choices)}
            yield RULES["launch-declared-choices"].on(launch, configuration.line(key), **said)


def _spaces(setup: Setup, launch: Launch) -> Iterator[Finding]:
    if not _is_cli(launch):
        return
    broken = next((word for word in launch.arguments if re.search(r"\s", word) and not is_open(word)), None)
    if broken is not None:
        yield RULES["launch-spaces-in-argument"].on(launch, broken=broken)


# The environment -----------------------------------------------------------------------------------------------------


def _sudo(setup: Setup, launch: Launch) -> Iterator[Finding]:
    if "sudo" in launch.wrappers and _is_cli(launch):
        yield RULES["launch-sudo"].on(launch)


def _allocator_overwritten(setup: Setup, launch: Launch) -> Iterator[Finding]:
    variable = launch.variable("PYTORCH_CUDA_ALLOC_CONF")
    value = certain_text(variable)
    if variable is None or value is None or not _is_cli(launch) or value == "expandable_segments:True":
        return
    if not sets_allocator(launch):
        return
    yield RULES["launch-allocator-overwritten"].on(launch, variable, value=value)


def _switch(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report Megatron keys without their switch (USE_MCA or USE_MEGATRON_BRIDGE), and USE_MCA without Megatron keys."""
    if not launch.program.startswith("llamafactory") and not _is_own_script(launch):
        return
    configurations = configurations_of(setup, launch)
    path: TrainerPath = "bridge" if {setup.training_path(one) for one in configurations} == {"bridge"} else "mca"
    name = "USE_MCA" if path == "mca" else "USE_MEGATRON_BRIDGE"
    keys = [key for one in configurations for key in _megatron_keys(one, path)]
    all_need_it = all(_megatron_keys(one, path) for one in configurations)
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


def _megatron_keys(configuration: Configuration, path: TrainerPath) -> list[str]:
    """Return the keys that only one training path knows; without its variable, LLaMA-Factory's parser refuses them."""
    own = keys_for(path).keys() - plain_keys().keys()
    return [key for key in configuration.source.data if key in own]


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


_RULES: tuple[Callable[[Setup, Launch], Iterator[Finding]], ...] = (
    _nested,
    _train_word,
    _other_launcher,
    _single_process,
    _deepspeed_alone,
    _deepspeed_file,
    _one_process,
    _overrides,
    _declared_choices,
    _spaces,
    _sudo,
    _allocator_overwritten,
    _port,
    _run_id,
    _switch,
    _max_connections,
)
