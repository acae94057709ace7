"""What the rules look at: the configurations, launch commands and variables of one training job, as they were found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from topoplan.errors import SpecError
from topoplan.reading.interpolation import filled
from topoplan.reading.parts import Part
from topoplan.reading.recogniser import Recogniser, Recognisers, of_program
from topoplan.specs.source import KeyPath, Source, at, path_of

if TYPE_CHECKING:
    from topoplan.reading.session import Script

Trainer = str
"""Whose keys a configuration holds: the `trainer` of a Recogniser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Keys with their values, from a file or from the arguments of a command."""

    trainer: Trainer
    part: Part
    source: Source
    """The values, with the line of each in the text of the part."""
    from_command: bool = False
    """The keys are `--key value` arguments of a command."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key at the top."""
        return self.source.data.get(key, default)

    def at(self, key: str) -> Any:
        """The value at `block.key`."""
        return at(self.source.data, path_of(key))

    def line(self, *path: str | int) -> int | None:
        """Line of a value in the text of the part, or of the nearest block that holds it."""
        found: KeyPath = path
        while found:
            if line := self.source.lines.get(found):
                return line
            found = found[:-1]
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """An environment variable that a script sets, or a command is given."""

    name: str
    value: str
    """With quotes removed; what the shell would put in place of `$...` is left as it is written."""
    part: Part
    line: int
    assumed: bool = False
    """The default of a `${NAME:-default}`: the environment may say otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a launcher: `--master_port 29500`."""

    value: str
    line: int
    assumed: bool = False
    """The default of a `${NAME:-default}`: the environment may say otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One command that starts training."""

    part: Part
    first_line: int
    last_line: int
    """It may go over several lines."""
    starter: Literal["torchrun", "deepspeed", "accelerate", ""]
    """What starts the processes; empty when the program does so itself."""
    called: str = ""
    """How the starter is called: torchrun, torch.distributed.run, torch.distributed.launch, ..."""
    options: dict[str, Option]
    """Options of the starter, with underscores: `nproc_per_node`, `master_port`."""
    program: str
    """llamafactory-cli, llamafactory.launcher (as a module or a file), swift, megatron, swift.cli.sft and the like (as
    a module or a file), or the script that is run."""
    arguments: tuple[str, ...]
    """What comes behind the program."""
    variables: tuple[Variable, ...]
    """Set when it runs: exported before it in the same part, or in front of it. The last one of a name wins."""
    configuration: Configuration | None = None
    """The trainer's keys among the arguments."""
    config_file: str = ""
    """The configuration file among the arguments, as it is written."""
    reads: Configuration | None = None
    """What that file holds, where it was found or is one of the given files."""
    background: bool = False
    """It ends with `&`: the next command does not wait for it."""
    wrappers: tuple[str, ...] = ()
    """What stands in front of it: sudo, ssh, srun, ..."""

    def variable(self, name: str) -> Variable | None:
        """The variable of that name, as the command sees it."""
        return next((one for one in reversed(self.variables) if one.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A version of a package that a command installs."""

    package: str
    """As the package index writes it (PEP 503)."""
    version: str
    part: Part
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything that was found."""

    parts: tuple[Part, ...]
    configurations: tuple[Configuration, ...] = ()
    """Of files and of commands."""
    launches: tuple[Launch, ...] = ()
    scripts: tuple[Script, ...] = ()
    """Of the parts in shell."""
    variables: tuple[Variable, ...] = ()
    """All that are set anywhere, in order."""
    pins: tuple[Pin, ...] = ()
    """What `pip install` is told in scripts."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version that the files are for, where anything says it."""
    bundles: tuple[Path, ...] = ()
    """Directories that `topoplan generate` wrote, among what was given."""
    recognisers: Recognisers = ()
    """Of the trainers that are known."""
    logs: tuple[Part, ...] = ()
    """What runs have written."""
    unread: tuple[tuple[Part, SpecError], ...] = ()
    """What could not be read beside what was, and why."""

    @property
    def unread_programs(self) -> tuple[str, ...]:
        """Programs that are launched with arguments of no trainer that is read: `pretrain_gpt.py`."""
        launches = (one for one in self.launches if one.configuration is None and not one.config_file)
        return tuple(
            dict.fromkeys(one.program for one in launches if of_program(self.recognisers, one.program) is None)
        )

    def bundle_of(self, configuration: Configuration) -> Path | None:
        """The bundle that a configuration is a file of."""
        directory = Path(configuration.part.name).parent
        return directory if directory in self.bundles else None

    def of(self, *trainers: Trainer) -> Iterator[Configuration]:
        """The configurations of these trainers."""
        return (one for one in self.configurations if one.trainer in trainers)

    @property
    def with_deepspeed(self) -> tuple[Configuration, ...]:
        """The configurations of trainers that may have a key `deepspeed`."""
        names = [one.trainer for one in self.recognisers if one.takes_deepspeed]
        return tuple(self.of(*names))

    def is_whole(self, configuration: Configuration) -> bool:
        """It names a model: what does not is a piece of a configuration, as articles show them."""
        return self.named_model(configuration) is not None

    @property
    def whole(self) -> list[Configuration]:
        """The configurations that name a model, each only once: an article may show one twice."""
        found: list[Configuration] = []
        for one in self.configurations:
            if self.is_whole(one) and one.source.data not in [other.source.data for other in found]:
                found.append(one)
        # A DeepSpeed file alone is one where no trainer is there to use it.
        return found or ([] if self.launches else list(self.of("deepspeed")))

    def model_key(self, configuration: Configuration) -> str:
        """The key that names its model; empty for a file of DeepSpeed's or accelerate's alone."""
        keys = one.model_keys if (one := self.recogniser(configuration.trainer)) else ()
        return next((key for key in keys if type(configuration.at(key)) in (str, int)), keys[0] if keys else "")

    def named_model(self, configuration: Configuration) -> str | None:
        """The model that it names, if it does."""
        written = configuration.at(key) if (key := self.model_key(configuration)) else None
        found = filled(written, configuration.source.data, self.environment)
        return str(written if found is None else found) if type(written) in (str, int) else None

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that are set anywhere, the last one of a name."""
        return {one.name: one.value for one in self.variables}

    def uses_mca(self, configuration: Configuration) -> bool:
        """Whether LLaMA-Factory trains it with mcore_adapter."""
        return self.path_of(configuration) == "mca"

    def path_of(self, configuration: Configuration) -> str | None:
        """Which of its trainer's ways to train a configuration takes; None where there is but one."""
        one = self.recogniser(configuration.trainer)
        return one.path(configuration, self.variables) if one else None

    def recogniser(self, trainer: str) -> Recogniser | None:
        """What knows the files of a trainer."""
        return next((one for one in self.recognisers if one.trainer == trainer), None)
