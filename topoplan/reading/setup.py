"""The input of the rules: the configurations, launch commands and variables of one training job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from topoplan.errors import SpecError
from topoplan.reading.interpolation import filled
from topoplan.reading.recognizer import Recognizer, Recognizers, of_program
from topoplan.specs.source import KeyPath, Source, at, path_of

if TYPE_CHECKING:
    from topoplan.reading.hostfile import Hostfile
    from topoplan.reading.parts import Part
    from topoplan.reading.session import Script

Trainer = str
"""The name of the trainer that a configuration is for: the `trainer` of a Recognizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Keys with their values, from a file or from the arguments of a command."""

    trainer: Trainer
    part: Part
    source: Source
    """The values, each with its line in the text of the part."""
    from_command: bool = False
    """True if the keys are `--key value` arguments of a command."""
    over_file: bool = False
    """True if the command also names a file, whose keys these keys override."""
    misspelt: Mapping[str, str] = field(default_factory=dict)
    """Top-level keys that the trainer refuses, or that a command shortens -> the keys that they misspell or stand for,
    whose values they hold for the rules."""

    def written(self, key: str) -> str:
        """Return how the file spells a top-level key."""
        if key in self.source.data or not self.misspelt:
            return key
        return next((found for found, meant in self.misspelt.items() if meant == key), key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a top-level key."""
        return self.source.data.get(self.written(key), default)

    def at(self, key: str) -> Any:
        """Return the value at a dotted path such as `block.key`."""
        first, *rest = path_of(key)
        return at(self.source.data, (self.written(str(first)), *rest))

    def line(self, *path: str | int) -> int | None:
        """Return the line of a value in the text of the part, or of the nearest block that contains it."""
        found: KeyPath = (self.written(str(path[0])), *path[1:]) if path else path
        while found:
            if line := self.source.lines.get(found):
                return line
            found = found[:-1]
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """An environment variable that a script sets or a command is given."""

    name: str
    value: str
    """The value without quotes; `$...` that the shell would expand is left as written."""
    part: Part
    line: int
    assumed: bool = False
    """True if this is the default of a `${NAME:-default}`, which the environment may override."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a launcher, such as `--master_port 29500`."""

    value: str
    line: int
    assumed: bool = False
    """True if this is the default of a `${NAME:-default}`, which the environment may override."""
    file: Part | None = None
    """The file of `accelerate launch` that has the value; None if the command has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One command that starts training."""

    part: Part
    first_line: int
    last_line: int
    """Last line of the command, which may span several lines."""
    starter: Literal["torchrun", "deepspeed", "accelerate", ""]
    """The launcher of the processes; empty if the program starts them itself."""
    called: str = ""
    """The launcher as the command spells it: torchrun, torch.distributed.run, torch.distributed.launch, ..."""
    options: dict[str, Option]
    """The launcher's options by name, with underscores: `nproc_per_node`, `master_port`."""
    program: str
    """The program that runs: llamafactory-cli, llamafactory.launcher, swift, megatron, swift.cli.sft, ... (modules may
    also be given as files), or the path of a script."""
    trains: Recognizer | None = None
    """The trainer whose keys the program takes as arguments; None for a foreign program."""
    arguments: tuple[str, ...]
    """The arguments after the program."""
    variables: tuple[Variable, ...]
    """Variables that the command sees, exported earlier in the part or set in front of it; the last assignment wins."""
    configuration: Configuration | None = None
    """The trainer's keys among the arguments."""
    config_file: str = ""
    """The configuration file among the arguments, as written."""
    file_configuration: Configuration | None = None
    """The content of `config_file`, if the file was found or is among the given files."""
    starter_file: Configuration | None = None
    """The file of `accelerate launch`, which has the values of options that the command lacks, if it is at hand."""
    background: bool = False
    """True if the command ends with `&`, so that the next command does not wait for it."""
    wrappers: tuple[str, ...] = ()
    """Commands in front of the launcher: sudo, ssh, srun, ..."""
    wrapper_words: tuple[tuple[str, ...], ...] = ()
    """The words of each wrapper, including its own options, in the order of `wrappers`."""

    @property
    def starts_torchrun(self) -> bool:
        """Whether the program starts torchrun itself, as `llamafactory-cli train` and `swift sft` do."""
        return self.trains is not None and self.trains.starts_torchrun and self.is_command and not self.starter

    @property
    def is_command(self) -> bool:
        """Whether the program is the trainer's command, which takes a subcommand first."""
        return self.trains is not None and self.program == self.trains.command

    def option(self, name: str) -> Option | None:
        """Return the launcher's option of that name, from the command, or else from the launcher's file."""
        if name in self.options or self.starter_file is None or (value := self.starter_file.get(name)) is None:
            return self.options.get(name)
        return Option(value=str(value), line=self.starter_file.line(name) or 1, file=self.starter_file.part)

    def variable(self, name: str) -> Variable | None:
        """Return the variable of that name as the command sees it."""
        return next((one for one in reversed(self.variables) if one.name == name), None)

    def words_of(self, *wrappers: str) -> tuple[str, ...] | None:
        """Return the words of the first of these wrappers in front of the launcher; None if there is none of them."""
        said = zip(self.wrappers, self.wrapper_words, strict=False)
        return next((words for name, words in said if name in wrappers), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A package version that a command installs."""

    package: str
    """Name of the package, normalized as in PEP 503."""
    version: str
    part: Part
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything that was found in the files of one training job."""

    parts: tuple[Part, ...]
    configurations: tuple[Configuration, ...] = ()
    """Configurations from files and from commands."""
    launches: tuple[Launch, ...] = ()
    scripts: tuple[Script, ...] = ()
    """Parsed scripts, one for each shell part."""
    variables: tuple[Variable, ...] = ()
    """All assignments of variables, in order."""
    pins: tuple[Pin, ...] = ()
    """Versions that scripts install with `pip install`."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version that the files are meant for, as far as it is stated anywhere."""
    hostfiles: tuple[Hostfile, ...] = ()
    bundles: tuple[Path, ...] = ()
    """Bundle directories, written by `topoplan generate`, among the given paths."""
    required: Mapping[Path, Mapping[str, str]] = field(default_factory=dict)
    """Bundle directory -> package -> versions, as pip writes them, without which its scripts do not start; package
    names are normalized as in PEP 503."""
    recognizers: Recognizers = ()
    """Recognizers of the known trainers."""
    logs: tuple[Part, ...] = ()
    """Logs of runs."""
    unread: tuple[tuple[Part, SpecError], ...] = ()
    """Parts that could not be read, each with its error."""
    references: tuple[tuple[Part, Part], ...] = ()
    """Pairs of a part and the part whose file it names."""

    @property
    def unread_programs(self) -> tuple[str, ...]:
        """Launched programs, such as `pretrain_gpt.py`, whose arguments belong to no known trainer."""
        launches = (one for one in self.launches if one.configuration is None and not one.config_file)
        return tuple(
            dict.fromkeys(one.program for one in launches if of_program(self.recognizers, one.program) is None)
        )

    def hostfile_of(self, launch: Launch) -> Hostfile | None:
        """Return the host file that the `deepspeed` of a command reads, where it was found."""
        option = launch.options.get("hostfile") if launch.starter == "deepspeed" else None
        name = Path(option.value).name if option else ""
        return next((one for one in self.hostfiles if name and Path(one.part.name).name == name), None)

    def bundle_of(self, configuration: Configuration) -> Path | None:
        """Return the bundle directory that contains a configuration's file, if any."""
        directory = Path(configuration.part.name).parent
        return directory if directory in self.bundles else None

    def of(self, *trainers: Trainer) -> Iterator[Configuration]:
        """Return the configurations of these trainers."""
        return (one for one in self.configurations if one.trainer in trainers)

    @property
    def with_deepspeed(self) -> tuple[Configuration, ...]:
        """The configurations of trainers that have a key `deepspeed`."""
        names = [one.trainer for one in self.recognizers if one.takes_deepspeed]
        return tuple(self.of(*names))

    def is_complete(self, configuration: Configuration) -> bool:
        """Whether a configuration names a model; one that does not is an excerpt, as articles show them."""
        return self.named_model(configuration) is not None and not configuration.over_file

    @property
    def complete_configurations(self) -> list[Configuration]:
        """The configurations that name a model, without duplicates: an article may show one twice."""
        found: list[Configuration] = []
        for one in self.configurations:
            if self.is_complete(one) and one.source.data not in [other.source.data for other in found]:
                found.append(one)
        # A DeepSpeed file counts on its own if no trainer is there to use it.
        return found or ([] if self.launches else list(self.of("deepspeed")))

    def model_key(self, configuration: Configuration) -> str:
        """Return the key that names a configuration's model; empty for DeepSpeed and accelerate files."""
        keys = one.model_keys if (one := self.recognizer(configuration.trainer)) else ()
        return next((key for key in keys if type(configuration.at(key)) in (str, int)), keys[0] if keys else "")

    def named_model(self, configuration: Configuration) -> str | None:
        """Return the model that a configuration names, if any."""
        written = configuration.at(key) if (key := self.model_key(configuration)) else None
        found = filled(written, configuration.source.data, self.environment)
        return str(written if found is None else found) if type(written) in (str, int) else None

    @property
    def environment(self) -> Mapping[str, str]:
        """All variables set anywhere, by name; the last assignment wins."""
        return {one.name: one.value for one in self.variables}

    def uses_mca(self, configuration: Configuration) -> bool:
        """Whether LLaMA-Factory trains a configuration with mcore_adapter."""
        return self.training_path(configuration) == "mca"

    def training_path(self, configuration: Configuration) -> str | None:
        """Return the training path that a configuration takes; None if its trainer has only one."""
        one = self.recognizer(configuration.trainer)
        return one.path(configuration, self.variables) if one else None

    def recognizer(self, trainer: str) -> Recognizer | None:
        """Return the recognizer of a trainer's files."""
        return next((one for one in self.recognizers if one.trainer == trainer), None)
