"""Launch commands that do not start what is intended: faults in the launcher, the program or its arguments.

Facts from LLaMA-Factory 0.9.5 (launcher.py, hparams/parser.py), ms-swift 4 (swift/cli/main.py), torch 2.13
(distributed/run.py) and DeepSpeed 0.18 (launcher/runner.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from topoplan.catalog import key_list
from topoplan.errors import nearest
from topoplan.lint.rules.launch_facts import (
    RULES,
    certain_count,
    certain_text,
    from_outside,
    is_enabled,
    is_llamafactory_cli,
    line_of,
    lines_of,
    replaced,
    starts_torchrun_anyway,
)
from topoplan.reading.finding import Edit, Finding
from topoplan.reading.processes import visible_gpus
from topoplan.reading.session import Script
from topoplan.reading.setup import Launch, Setup
from topoplan.reading.starters import options_of
from topoplan.reading.words import is_open

_CLI_WORDS = re.compile(
    r"(?:\$\((?:which|command -v) (?:llamafactory-cli|lmf)\)|`which (?:llamafactory-cli|lmf)`"
    r"|(?:[^\s'\"`$()]*/)?(?:llamafactory-cli|lmf))\s+train(?!\S)"
)
_EARLY_OPTION = re.compile(r"\baccelerate\s+(--?[A-Za-z][\w-]*)[^\n]*\slaunch\b")
_BARE_SWIFT = re.compile(r"(?<!\S)(swift|megatron)\s+(sft|pt|rlhf)(?!\S)")
_DECLARED_CHOICES = {
    "recompute_method": ("uniform", "recompute"),
    "moe_token_dispatcher_type": ("allgather", "alltoall"),
}
"""Choices that mcore_adapter's `training_args.py` declares where Megatron accepts further values."""
_ALLOCATOR_OPTIONS = (
    *("backend", "expandable_segments", "garbage_collection_threshold", "graph_capture_record_stream_reuse"),
    *("max_non_split_rounding_mb", "max_split_size_mb", "per_process_memory_fraction", "pinned_num_register_threads"),
    *("pinned_reserve_segment_size_mb", "pinned_use_background_threads", "pinned_use_cuda_host_register"),
    *("release_lock_on_cudamalloc", "roundup_power2_divisions", "use_cuda_host_register"),
)
"""Options that torch 2.13 parses in c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.cpp."""
_NUMBERS = {"int": re.compile(r"[+-]?\d+"), "float": re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")}
_OF_V1 = ("sft", "dpo", "rm", "merge")
_OF_LLAMAFACTORY = ("api", "chat", "env", "eval", "export", "help", "train", "version", "webchat", "webui", *_OF_V1)
_METHODS = {
    "llamafactory-cli": _OF_LLAMAFACTORY,
    "lmf": _OF_LLAMAFACTORY,
    "swift": (
        *("pt", "sft", "infer", "merge-lora", "web-ui", "deploy", "rollout", "rlhf", "sample", "export", "eval"),
        *("app", "merge_lora", "web_ui"),
    ),
    "megatron": ("pt", "sft", "rlhf", "export"),
}
"""The subcommands of the trainers' programs."""
_DEEPSPEED_COUNTS, _FILTERS = ("num_gpus", "num_nodes"), ("include", "exclude")
_FORM_A_VARIABLES = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")


def findings(setup: Setup) -> Iterator[Finding]:
    """Report faults of individual launches."""
    for launch in setup.launches:
        for rule in _RULES:
            yield from rule(setup, launch)
    for script in setup.scripts:
        yield from _unknown_methods(script)


def _unknown_methods(script: Script) -> Iterator[Finding]:
    """Report an unknown subcommand of a trainer's program: `swift sftt`."""
    for command in script.commands:
        first = command.words[:2]
        program, method = [word.text for word in first] if len(first) > 1 else ("", "")
        methods = _METHODS.get(program.rpartition("/")[2], ())
        is_of_swift = program in ("swift", "megatron") and any(word.text == "--model" for word in command.words)
        close = nearest(method, methods) or (f"it has {', '.join(methods)}" if is_of_swift else "")
        if methods and method not in methods and close:
            yield RULES["launch-unknown-method"].found(
                script.part, first[-1].line, program=program, method=method, close=close
            )


# The starter ---------------------------------------------------------------------------------------------------------


def _nested(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report a launcher around a command that starts a launcher itself."""
    if not launch.starter:
        return
    if launch.program == "llamafactory-cli":
        yield _nested_llamafactory(launch)
    elif launch.program in ("swift", "megatron"):
        again = next((one for one in launch.variables if one.name in ("NPROC_PER_NODE", "NNODES")), None)
        if again is not None:
            rule = RULES["launch-nested-torchrun.swift"]
            yield rule.on(launch, called=launch.called, program=launch.program, variable=again.name)


def _nested_llamafactory(launch: Launch) -> Finding:
    processes = certain_count(launch.options.get("nproc_per_node")) or certain_count(launch.options.get("num_gpus"))
    each = f"each of the {processes} processes" if processes else "each process"
    edits: tuple[Edit, ...] = ()
    if launch.starter == "torchrun" and "no_python" not in launch.options:  # torchrun refuses `--no_python -m`
        edits = replaced(launch, _CLI_WORDS, "-m llamafactory.launcher")
    remedy = "write FORCE_TORCHRUN=1 llamafactory-cli train FILE: `deepspeed:` in FILE turns DeepSpeed on"
    return RULES["launch-nested-torchrun"].on(
        launch,
        line_of(launch, _CLI_WORDS),
        called=launch.called,
        each=each,
        remedy=remedy if launch.starter == "deepspeed" else "",
        edits=edits,
    )


def _run_by_python(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report `torchrun swift sft`: torchrun runs its program with Python unless --no_python is given."""
    if launch.starter != "torchrun":
        return
    if "no_python" in launch.options and "module" in launch.options:
        yield RULES["launch-no-python-module"].on(launch, edits=replaced(launch, re.compile(r"--no[_-]python\s+"), ""))
    if launch.program in ("swift", "megatron") and not {"no_python", "module"} & set(launch.options):
        line = line_of(launch, _BARE_SWIFT)
        if line is not None:
            yield RULES["launch-command-run-by-python"].on(
                launch, line, program=launch.program, edits=replaced(launch, _BARE_SWIFT, r"--no_python \1 \2")
            )


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
    if launch.config_file and "no_local_rank" not in launch.options and "llamafactory" in _family(setup, launch):
        yield RULES["launch-deepspeed-file"].on(launch, file=launch.config_file)


def _chosen_by_deepspeed(launch: Launch) -> set[str] | None:
    """Return the GPUs that `--include localhost:0,1` or `--num_gpus 2` selects, as text."""
    named = re.fullmatch(r"(?:localhost|127\.0\.0\.1):([\d,]+)", certain_text(launch.options.get("include")) or "")
    count = certain_count(launch.options.get("num_gpus"))
    if named:
        return set(named[1].split(","))
    return {str(one) for one in range(count)} if count else None


def _family(setup: Setup, launch: Launch) -> str:
    """Return the trainer whose configuration a launch uses."""
    used = launch.file_configuration or launch.configuration
    return used.trainer if used else ""


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
    if launch.starter or not any(one.get("deepspeed") for one in used) or starts_torchrun_anyway(launch):
        return
    is_cli = is_llamafactory_cli(launch)
    starts = is_cli and (is_enabled(launch, "FORCE_TORCHRUN") or visible_gpus(launch) != 1)
    if starts or from_outside(launch) or (not is_cli and "WORLD_SIZE" in {one.name for one in launch.variables}):
        return
    rule = RULES["launch-deepspeed-alone" if is_cli else "launch-deepspeed-alone.script"]
    yield rule.on(launch, program=launch.program)


# The trainer's own arguments -----------------------------------------------------------------------------------------


def _train_word(setup: Setup, launch: Launch) -> Iterator[Finding]:
    first = launch.arguments[0] if launch.arguments else ""
    if launch.program == "llamafactory.launcher" and first == "train":
        pattern = re.compile(r"(llamafactory[./]launcher(?:\.py)?[\"']?\s+)train\s+")
        yield RULES["launch-train-word"].on(launch, line_of(launch, pattern), edits=replaced(launch, pattern, r"\1"))
    elif launch.program == "llamafactory-cli" and first.endswith((".yaml", ".yml", ".json")):
        yield RULES["launch-train-word.file"].on(launch, first=first)


def _file_behind(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report a file that is not the first argument and therefore not read.

    Sources: LLaMA-Factory `parser.py`, read_args; ms-swift `cli/main.py`, parse_yaml_args.
    """
    if launch.starter or launch.config_file or launch.program not in ("llamafactory-cli", "swift", "megatron"):
        return
    for before, word in zip(launch.arguments[1:], launch.arguments[2:], strict=False):
        if word.endswith((".yaml", ".yml")) and not before.startswith("-") and "=" not in word and not is_open(word):
            yield RULES["launch-file-behind"].on(launch, line_of(launch, re.compile(re.escape(word))), file=word)


def _early_option(setup: Setup, launch: Launch) -> Iterator[Finding]:
    for line, text in lines_of(launch) if launch.starter == "accelerate" else ():
        if found := _EARLY_OPTION.search(text):
            yield RULES["launch-early-option"].on(launch, line, option=found[1])


def _other_launcher(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report subcommands of `v1/launcher.py` given without USE_V1=1 to LLaMA-Factory's `launcher.py`."""
    word, is_new = next(iter(launch.arguments), ""), is_enabled(launch, "USE_V1")
    if is_llamafactory_cli(launch) and word in _OF_V1 and not is_new and not from_outside(launch):
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
    if not is_llamafactory_cli(launch):
        return
    broken = next((word for word in launch.arguments if re.search(r"\s", word) and not is_open(word)), None)
    if broken is not None:
        yield RULES["launch-spaces-in-argument"].on(launch, broken=broken)


def _sudo(setup: Setup, launch: Launch) -> Iterator[Finding]:
    if "sudo" in launch.wrappers and is_llamafactory_cli(launch):
        yield RULES["launch-sudo"].on(launch)


def _relative_path(setup: Setup, launch: Launch) -> Iterator[Finding]:
    if not {"ssh", "pdsh"} & set(launch.wrappers) or not launch.config_file:
        return
    if launch.config_file.startswith(("/", "~", "$")) or is_open(launch.config_file):
        return
    if any(re.search(r"\b(?:cd|pushd)\s", line) for _, line in lines_of(launch)):
        return
    yield RULES["launch-relative-path"].on(launch, file=launch.config_file)


def _allocator_overwritten(setup: Setup, launch: Launch) -> Iterator[Finding]:
    variable = launch.variable("PYTORCH_CUDA_ALLOC_CONF")
    value = certain_text(variable)
    if variable is None or value is None or not is_llamafactory_cli(launch) or value == "expandable_segments:True":
        return
    if _keeps_allocator(launch):
        return
    yield RULES["launch-allocator-overwritten"].on(launch, variable, value=value)


def _keeps_allocator(launch: Launch) -> bool:
    """Whether PYTORCH_CUDA_ALLOC_CONF reaches the processes unchanged."""
    is_off = certain_text(launch.variable("OPTIM_TORCH")) is not None and not is_enabled(launch, "OPTIM_TORCH")
    return is_off or not is_llamafactory_cli(launch)


def _allocator_options(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report options that torch's allocator cannot parse: it fails when the first tensor is put on the GPU."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        variable = launch.variable(name)
        value = certain_text(variable)
        if variable is None or not value or not _keeps_allocator(launch):
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
    _nested,
    _run_by_python,
    _unknown_option,
    _option_values,
    _repeated,
    _deprecated,
    _train_word,
    _file_behind,
    _early_option,
    _other_launcher,
    _single_process,
    _deepspeed_alone,
    _deepspeed_nodes,
    _deepspeed_options,
    _one_process,
    _overrides,
    _declared_choices,
    _spaces,
    _sudo,
    _relative_path,
    _allocator_overwritten,
    _allocator_options,
)
