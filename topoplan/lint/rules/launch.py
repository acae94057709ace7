"""Launch commands that do not start what is intended: faults in the launcher, the program or its arguments.

Facts from torch 2.13 (distributed/run.py) and DeepSpeed 0.18 (launcher/runner.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from topoplan.catalog import key_list
from topoplan.errors import nearest
from topoplan.lint.rules.launch_table import RULES
from topoplan.reading.finding import Finding
from topoplan.reading.launch_facts import certain_count, certain_text, line_of, lines_of, replaced
from topoplan.reading.recognizer import Recognizer
from topoplan.reading.session import Script
from topoplan.reading.setup import Launch, Setup
from topoplan.reading.starters import options_of
from topoplan.reading.words import is_open

_EARLY_OPTION = re.compile(r"\baccelerate\s+(--?[A-Za-z][\w-]*)[^\n]*\slaunch\b")
_ALLOCATOR_OPTIONS = (
    *("backend", "expandable_segments", "garbage_collection_threshold", "graph_capture_record_stream_reuse"),
    *("max_non_split_rounding_mb", "max_split_size_mb", "per_process_memory_fraction", "pinned_num_register_threads"),
    *("pinned_reserve_segment_size_mb", "pinned_use_background_threads", "pinned_use_cuda_host_register"),
    *("release_lock_on_cudamalloc", "roundup_power2_divisions", "use_cuda_host_register"),
)
"""Options that torch 2.13 parses in c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.cpp."""
_NUMBERS = {"int": re.compile(r"[+-]?\d+"), "float": re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")}
_DEEPSPEED_COUNTS, _FILTERS = ("num_gpus", "num_nodes"), ("include", "exclude")


def findings(setup: Setup) -> Iterator[Finding]:
    """Report faults of individual launches."""
    for launch in setup.launches:
        for rule in _RULES:
            yield from rule(setup, launch)
    commands = {name: one for one in setup.recognizers for name in one.names}
    for script in setup.scripts:
        yield from _unknown_methods(script, commands)


def _unknown_methods(script: Script, commands: Mapping[str, Recognizer]) -> Iterator[Finding]:
    """Report an unknown subcommand of a trainer's program: `swift sftt`."""
    for command in script.commands:
        first = command.words[:2]
        program, method = [word.text for word in first] if len(first) > 1 else ("", "")
        if (trainer := commands.get(program.rpartition("/")[2])) is None:
            continue
        methods = trainer.subcommands
        is_of_training = method.isalpha() and any(word.text[2:] in trainer.model_keys for word in command.words)
        close = nearest(method, methods) or (f"it has {', '.join(methods)}" if is_of_training else "")
        if methods and method not in methods and close:
            yield RULES["launch-unknown-method"].found(
                script.part, first[-1].line, program=program, method=method, close=close
            )


# The starter ---------------------------------------------------------------------------------------------------------


def _module(setup: Setup, launch: Launch) -> Iterator[Finding]:
    if launch.starter == "torchrun" and "no_python" in launch.options and "module" in launch.options:
        yield RULES["launch-no-python-module"].on(launch, edits=replaced(launch, re.compile(r"--no[_-]python\s+"), ""))


def _unknown_option(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report options unknown to torchrun; for launchers whose options are not all listed, only near misspellings."""
    if not launch.starter or launch.called == "torch.distributed.launch":
        return
    known = options_of(launch.starter)
    for name, option in launch.options.items():
        is_known = name in known or (launch.starter == "deepspeed" and any(one.startswith(name) for one in known))
        remedy = nearest(name, known)
        if not is_known and not is_open(name) and (remedy or launch.starter == "torchrun"):
            yield RULES["launch-unknown-option"].on(launch, option, name=name, starter=launch.starter, remedy=remedy)


def _option_values(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report values that argparse refuses for a launcher's option."""
    known = key_list("launchers").get(launch.starter, {}) if launch.starter else {}
    for name, takes in known.items():
        option = launch.options.get(name)
        value = certain_text(option)
        if value is None or (value in takes if isinstance(takes, list) else _NUMBERS[takes].fullmatch(value)):
            continue
        wanted = f"one of {', '.join(takes)}" if isinstance(takes, list) else "a number"
        yield RULES["launch-option-value"].on(launch, option, name=name, value=value or "''", wanted=wanted)


def _repeated(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report an option of the trainer given twice with different values, of which argparse takes the last."""
    if launch.configuration is None:
        return
    given: list[tuple[str, list[str]]] = []
    for text in launch.arguments:
        name, equals, value = text.partition("=")
        if text.startswith("--"):
            given.append((name[2:].replace("-", "_"), [value] if equals else []))
        elif given:
            given[-1][1].append(text)
    first: dict[str, list[str]] = {}
    for name, values in given:
        before = first.setdefault(name, values)
        if before != values and not any(map(is_open, (*before, *values))):
            said = {"name": name, "first": " ".join(before), "last": " ".join(values)}
            yield RULES["launch-option-twice"].on(launch, launch.configuration.line(name), **said)


def _deprecated(setup: Setup, launch: Launch) -> Iterator[Finding]:
    if launch.called == "torch.distributed.launch":
        yield RULES["launch-deprecated-module"].on(launch)


def _deepspeed_nodes(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report multi-node variables that the launchers of DeepSpeed and accelerate do not read."""
    if launch.starter not in ("deepspeed", "accelerate"):
        return
    given = [one for one in launch.variables if one.name in ("NNODES", "NODE_RANK", "NPROC_PER_NODE")]
    if given and not re.search(rf"\$\{{?{given[0].name}\b", launch.part.text):
        yield RULES[f"launch-{launch.starter}-variables"].on(launch, given[0], variable=given[0].name)


def _deepspeed_options(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report conflicting DeepSpeed options: `launcher/runner.py`, main.

    Filters and counts exclude each other, and both override CUDA_VISIBLE_DEVICES.
    """
    if launch.starter != "deepspeed":
        return
    counts, filters = ([one for one in names if one in launch.options] for names in (_DEEPSPEED_COUNTS, _FILTERS))
    if counts and filters:
        option = launch.options[counts[0]]
        yield RULES["launch-deepspeed-options"].on(launch, option, count=counts[0], filter=filters[0])
    visible, chosen = launch.variable("CUDA_VISIBLE_DEVICES"), _chosen_by_deepspeed(launch)
    seen = certain_text(visible)
    is_local = visible is not None and seen and chosen is not None and "hostfile" not in launch.options
    if is_local and set(str(seen).replace(" ", "").split(",")) != chosen:
        said = {"devices": seen, "option": [*filters, *counts][0], "chosen": ",".join(sorted(chosen or ()))}
        yield RULES["launch-deepspeed-devices"].on(launch, visible, **said)


def _chosen_by_deepspeed(launch: Launch) -> set[str] | None:
    """Return the GPUs that `--include localhost:0,1` or `--num_gpus 2` selects, as text."""
    named = re.fullmatch(r"(?:localhost|127\.0\.0\.1):([\d,]+)", certain_text(launch.options.get("include")) or "")
    count = certain_count(launch.options.get("num_gpus"))
    if named:
        return set(named[1].split(","))
    return {str(one) for one in range(count)} if count else None


# The trainer's own arguments -----------------------------------------------------------------------------------------


def _file_behind(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report a file that is not the first argument and therefore not read.

    Sources: LLaMA-Factory `parser.py`, read_args; ms-swift `cli/main.py`, parse_yaml_args.
    """
    if not launch.starts_torchrun or launch.config_file:
        return
    for before, word in zip(launch.arguments[1:], launch.arguments[2:], strict=False):
        if word.endswith((".yaml", ".yml")) and not before.startswith("-") and "=" not in word and not is_open(word):
            yield RULES["launch-file-behind"].on(launch, line_of(launch, re.compile(re.escape(word))), file=word)


def _early_option(setup: Setup, launch: Launch) -> Iterator[Finding]:
    for line, text in lines_of(launch) if launch.starter == "accelerate" else ():
        if found := _EARLY_OPTION.search(text):
            yield RULES["launch-early-option"].on(launch, line, option=found[1])


def _relative_path(setup: Setup, launch: Launch) -> Iterator[Finding]:
    if not {"ssh", "pdsh"} & set(launch.wrappers) or not launch.config_file:
        return
    if launch.config_file.startswith(("/", "~", "$")) or is_open(launch.config_file):
        return
    if any(re.search(r"\b(?:cd|pushd)\s", line) for _, line in lines_of(launch)):
        return
    yield RULES["launch-relative-path"].on(launch, file=launch.config_file)


def _fsdp_connections(setup: Setup, launch: Launch) -> Iterator[Finding]:
    variable = launch.variable("CUDA_DEVICE_MAX_CONNECTIONS")
    if launch.starter == "accelerate" and "use_fsdp" in launch.options and certain_text(variable) == "1":
        yield RULES["launch-max-connections.fsdp"].on(launch, variable)


def _allocator_options(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report options that torch's allocator cannot parse: it fails when the first tensor is put on the GPU."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        variable = launch.variable(name)
        value = certain_text(variable)
        if variable is None or not value or (launch.trains and launch.trains.sets_allocator(launch)):
            continue
        for option in re.split(r",(?![^\[]*\])", value):
            key, colon, setting = (part.strip() for part in option.partition(":"))
            said = {"name": name, "option": option.strip()}
            if not colon or (key not in _ALLOCATOR_OPTIONS and nearest(key, _ALLOCATOR_OPTIONS)):
                remedy = nearest(re.split("[=:]", key)[0], _ALLOCATOR_OPTIONS)
                yield RULES["launch-allocator-option"].on(launch, variable, remedy=remedy, **said)
            elif key == "expandable_segments" and setting not in ("True", "False"):
                yield RULES["launch-allocator-option.value"].on(launch, variable, **said)


_RULES: tuple[Callable[[Setup, Launch], Iterator[Finding]], ...] = (
    _module,
    _unknown_option,
    _option_values,
    _repeated,
    _deprecated,
    _file_behind,
    _early_option,
    _deepspeed_nodes,
    _deepspeed_options,
    _relative_path,
    _fsdp_connections,
    _allocator_options,
)
