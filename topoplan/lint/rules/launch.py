"""Launch commands that do not start what is meant: the starter, the program and its arguments.

Facts from LLaMA-Factory 0.9.5 (launcher.py, hparams/parser.py), ms-swift 4 (swift/cli/main.py), torch 2.13
(distributed/run.py) and DeepSpeed 0.18 (launcher/runner.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from topoplan.errors import nearest
from topoplan.lint.rules.launch_facts import (
    count_of,
    finding_about,
    is_enabled,
    is_llamafactory_cli,
    known,
    line_of,
    lines_of,
    replaced,
)
from topoplan.reading.finding import Edit, Finding
from topoplan.reading.setup import Launch, Setup
from topoplan.reading.starters import torchrun_options
from topoplan.reading.words import is_open

_CLI_WORDS = re.compile(
    r"(?:\$\((?:which|command -v) (?:llamafactory-cli|lmf)\)|`which (?:llamafactory-cli|lmf)`"
    r"|(?:[^\s'\"`$()]*/)?(?:llamafactory-cli|lmf))\s+train(?!\S)"
)
_BARE_SWIFT = re.compile(r"(?<!\S)(swift|megatron)\s+(sft|pt|rlhf)(?!\S)")
_FORM_A_VARIABLES = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")


def findings(setup: Setup) -> Iterator[Finding]:
    """What is wrong with the launches, one by one."""
    for launch in setup.launches:
        for rule in _RULES:
            yield from rule(setup, launch)


# The starter ---------------------------------------------------------------------------------------------------------


def _nested(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """A launcher around a command that is one itself."""
    if not launch.starter:
        return
    if launch.program == "llamafactory-cli":
        processes = count_of(launch.options.get("nproc_per_node")) or count_of(launch.options.get("num_gpus"))
        each = f"each of the {processes} processes" if processes else "each process"
        edits: tuple[Edit, ...] = ()
        if launch.starter == "torchrun":
            edits = replaced(launch, _CLI_WORDS, "-m llamafactory.launcher")
            if edits and "no_python" in launch.options:
                edits = ()  # `--no_python -m` is refused; which of them stands where is for a person
        yield finding_about(
            launch,
            "launch-nested-torchrun",
            "error",
            f"{launch.called} starts llamafactory-cli, which starts torchrun again in {each}",
            why="launcher.py runs torchrun whenever there are several GPUs, and always with USE_MCA or FORCE_TORCHRUN; "
            "it does not look whether it runs under one, and its own copies all count as node 0",
            remedy=_nested_remedy(launch),
            line=line_of(launch, _CLI_WORDS),
            edits=edits,
        )
    elif launch.program in ("swift", "megatron"):
        again = next((one for one in launch.variables if one.name in ("NPROC_PER_NODE", "NNODES")), None)
        if again is not None:
            yield finding_about(
                launch,
                "launch-nested-torchrun",
                "error",
                f"{launch.called} starts {launch.program}, which starts torchrun again, as {again.name} is set",
                why="swift/cli/main.py starts torchrun when NPROC_PER_NODE or NNODES is in the environment",
                remedy=f"leave {launch.called} out and set NPROC_PER_NODE, NNODES and so on, or unset these",
            )


def _nested_remedy(launch: Launch) -> str:
    if launch.starter == "deepspeed":
        return "write FORCE_TORCHRUN=1 llamafactory-cli train FILE: `deepspeed:` in FILE turns DeepSpeed on"
    return f"run the launcher as a module: `{launch.called} ... -m llamafactory.launcher FILE`, without the word train"


def _run_by_python(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """`torchrun swift sft`: torchrun runs its program with Python, unless it is told not to."""
    if launch.starter != "torchrun":
        return
    if "no_python" in launch.options and "module" in launch.options:
        yield finding_about(
            launch,
            "launch-no-python-module",
            "error",
            "--no_python and -m exclude each other",
            why="torchrun stops with a ValueError",
            remedy="leave --no_python out",
            edits=replaced(launch, re.compile(r"--no[_-]python\s+"), ""),
        )
    if launch.program in ("swift", "megatron") and not {"no_python", "module"} & set(launch.options):
        line = line_of(launch, _BARE_SWIFT)
        if line is not None:
            yield finding_about(
                launch,
                "launch-command-run-by-python",
                "error",
                f"torchrun runs {launch.program} with Python: can't open file '{launch.program}'",
                why="without --no_python the program has to be a Python file",
                remedy=f"write --no_python in front of {launch.program}, or leave torchrun out and set NPROC_PER_NODE",
                line=line,
                edits=replaced(launch, _BARE_SWIFT, r"--no_python \1 \2"),
            )


def _unknown_option(setup: Setup, launch: Launch) -> Iterator[Finding]:
    if launch.starter != "torchrun" or launch.called == "torch.distributed.launch":
        return
    for name, option in launch.options.items():
        if name in torchrun_options() or is_open(name):
            continue
        yield finding_about(
            launch,
            "launch-unknown-option",
            "error",
            f"torchrun knows no option --{name}",
            why="it stops with a usage message",
            remedy=nearest(name, torchrun_options()) or "what belongs to the training program comes behind it",
            line=option.line,
        )


def _deprecated(setup: Setup, launch: Launch) -> Iterator[Finding]:
    if launch.called != "torch.distributed.launch":
        return
    yield finding_about(
        launch,
        "launch-deprecated-module",
        "note",
        "torch.distributed.launch is deprecated",
        why="it is torchrun with another default: without --use_env it passes --local-rank to the program",
        remedy="write torchrun, or python -m torch.distributed.run, and leave --use_env out",
    )


def _deepspeed_nodes(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """The deepspeed launcher reads no NODE_RANK."""
    if launch.starter != "deepspeed":
        return
    given = [one for one in launch.variables if one.name in ("NNODES", "NODE_RANK", "NPROC_PER_NODE")]
    if given:
        yield finding_about(
            launch,
            "launch-deepspeed-variables",
            "warning",
            f"the deepspeed launcher does not read {given[0].name}",
            why="it takes its nodes from --hostfile, and the number of GPUs from --num_gpus",
            remedy="give --hostfile (or --no_ssh with --node_rank and --master_addr), or use torchrun",
            line=given[0].line if given[0].part is launch.part else None,
        )


def _single_process(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """The launcher as a module, without torchrun, is one process."""
    if launch.starter or launch.program != "llamafactory.launcher":
        return
    given = [name for name in _FORM_A_VARIABLES if launch.variable(name) is not None]
    if given:
        yield finding_about(
            launch,
            "launch-single-process",
            "error",
            f"llamafactory.launcher run by Python is one process, and does not read {given[0]}",
            why="it starts torchrun only as llamafactory-cli train",
            remedy="write torchrun ... -m llamafactory.launcher FILE, or llamafactory-cli train FILE",
        )


# The trainer's own arguments -----------------------------------------------------------------------------------------


def _train_word(setup: Setup, launch: Launch) -> Iterator[Finding]:
    first = launch.arguments[0] if launch.arguments else ""
    if launch.program == "llamafactory.launcher" and first == "train":
        pattern = re.compile(r"(llamafactory[./]launcher(?:\.py)?[\"']?\s+)train\s+")
        yield finding_about(
            launch,
            "launch-train-word",
            "error",
            "llamafactory.launcher takes `train` for an argument of the trainer",
            why="run as a module or a file it trains at once, and its first argument has to be the YAML file",
            remedy="leave the word train out",
            line=line_of(launch, pattern),
            edits=replaced(launch, pattern, r"\1"),
        )
    elif launch.program == "llamafactory-cli" and first.endswith((".yaml", ".yml", ".json")):
        yield finding_about(
            launch,
            "launch-train-word",
            "error",
            f"llamafactory-cli takes {first} for a command, and knows none of that name",
            remedy=f"write llamafactory-cli train {first}",
        )


def _overrides(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Behind a file LLaMA-Factory reads `key=value`."""
    if not launch.program.startswith("llamafactory") or not launch.config_file or launch.configuration is None:
        return
    dashed = [word for word in launch.arguments if re.match(r"--[A-Za-z]", word)]
    if dashed:
        key = dashed[0].lstrip("-").partition("=")[0]
        value = launch.configuration.get(key.replace("-", "_"))
        shown = "true" if value is True else "false" if value is False else value
        yield finding_about(
            launch,
            "launch-dashed-override",
            "error",
            f"{dashed[0].partition('=')[0]} behind {launch.config_file} is refused",
            why="after a file LLaMA-Factory reads the other arguments as key=value (parser.py, OmegaConf.from_cli), "
            "and takes the dashes for a part of the key",
            remedy=f"write {key}={shown}",
            line=launch.configuration.line(key.replace("-", "_")),
            edits=_undashed(launch),
        )


def _undashed(launch: Launch) -> tuple[Edit, ...]:
    edits = []
    keys = {word.lstrip("-").partition("=")[0] for word in launch.arguments if re.match(r"--[A-Za-z]", word)}
    pattern = re.compile(r"(?<!\S)--([A-Za-z][\w.-]*)(?:=|\s+)(?!--)([^\s\\]+)")
    for number, line in lines_of(launch):
        changed = pattern.sub(lambda match: f"{match[1]}={match[2]}" if match[1] in keys else match[0], line)
        if changed != line:
            edits.append(Edit(first_line=number, last_line=number, text=changed))
    return tuple(edits)


def _recompute_method(setup: Setup, launch: Launch) -> Iterator[Finding]:
    configuration = launch.configuration
    if not launch.program.startswith("llamafactory") or launch.config_file or configuration is None:
        return
    if configuration.get("recompute_method") == "block":
        yield finding_about(
            launch,
            "launch-recompute-method",
            "error",
            "--recompute_method block is refused on the command line",
            why="mcore_adapter declares the choices uniform and recompute, which argparse checks, but not in a file",
            remedy="put recompute_method: block into a YAML file",
            line=configuration.line("recompute_method"),
        )


def _spaces(setup: Setup, launch: Launch) -> Iterator[Finding]:
    if not is_llamafactory_cli(launch):
        return
    broken = next((word for word in launch.arguments if re.search(r"\s", word) and not is_open(word)), None)
    if broken is not None:
        yield finding_about(
            launch,
            "launch-spaces-in-argument",
            "error",
            f"llamafactory-cli cuts {broken!r} at its blanks",
            why="launcher.py joins the arguments and splits them again before it starts torchrun",
            remedy="use a name without blanks, or start torchrun yourself: torchrun ... -m llamafactory.launcher FILE",
        )


def _sudo(setup: Setup, launch: Launch) -> Iterator[Finding]:
    if "sudo" not in launch.wrappers or not is_llamafactory_cli(launch):
        return
    yield finding_about(
        launch,
        "launch-sudo",
        "warning",
        "under sudo llamafactory-cli hardly ever finds torchrun, and loses the variables that were set",
        why="sudo takes a PATH of its own and clears the environment; launcher.py starts torchrun by its name",
        remedy="train as an ordinary user",
    )


def _relative_path(setup: Setup, launch: Launch) -> Iterator[Finding]:
    if not {"ssh", "pdsh"} & set(launch.wrappers) or not launch.config_file:
        return
    if launch.config_file.startswith(("/", "~", "$")) or is_open(launch.config_file):
        return
    if any(re.search(r"\b(?:cd|pushd)\s", line) for _, line in lines_of(launch)):
        return
    yield finding_about(
        launch,
        "launch-relative-path",
        "warning",
        f"{launch.config_file} is looked for in the home directory of the other machine",
        why="ssh starts there, whatever directory this one is in",
        remedy="give the whole path, or begin with cd: ssh HOST 'cd DIRECTORY && ...'",
    )


def _allocator_overwritten(setup: Setup, launch: Launch) -> Iterator[Finding]:
    variable = launch.variable("PYTORCH_CUDA_ALLOC_CONF")
    value = known(variable)
    if variable is None or value is None or not is_llamafactory_cli(launch) or value == "expandable_segments:True":
        return
    if known(launch.variable("OPTIM_TORCH")) is not None and not is_enabled(launch, "OPTIM_TORCH"):
        return
    yield finding_about(
        launch,
        "launch-allocator-overwritten",
        "warning",
        f"PYTORCH_CUDA_ALLOC_CONF={value} has no effect: llamafactory-cli overwrites it with expandable_segments:True",
        why="launcher.py does so for every distributed training unless OPTIM_TORCH=0",
        remedy="remove it, or set OPTIM_TORCH=0 as well",
        line=variable.line if variable.part is launch.part else None,
    )


_RULES: tuple[Callable[[Setup, Launch], Iterator[Finding]], ...] = (
    _nested,
    _run_by_python,
    _unknown_option,
    _deprecated,
    _train_word,
    _single_process,
    _deepspeed_nodes,
    _overrides,
    _recompute_method,
    _spaces,
    _sudo,
    _relative_path,
    _allocator_overwritten,
)
