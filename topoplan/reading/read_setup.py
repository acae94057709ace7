"""Read files into a Setup: parse every part and link launches to the files that they name."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from topoplan.errors import SpecError
from topoplan.reading.configurations import READ, UnknownKindError, configuration_of
from topoplan.reading.hostfile import Hostfile, hostfile_of
from topoplan.reading.kinds import names_a_job
from topoplan.reading.launches import cut_off, deepspeed_file, launches
from topoplan.reading.named_files import own_first
from topoplan.reading.parts import Part
from topoplan.reading.read_parts import STANDARD_INPUT, file_parts, is_bundle, known_files, read_parts
from topoplan.reading.recognizer import Recognizers, keys_of, of_program
from topoplan.reading.session import Environment, Script
from topoplan.reading.setup import Configuration, Launch, Pin, Setup, Trainer, Variable
from topoplan.reading.shell import read_script
from topoplan.reading.versions import pins
from topoplan.specs.source import NoTextError, Source, below, is_there, read_text, shown_path

_SUFFIXES = (".yaml", ".yml", ".json")


def read_setup(paths: Sequence[str], recognizers: Recognizers) -> Setup:
    """Read everything in these files into a setup, which lists the files that cannot be read.

    Raises SpecError if no file can be read, or none starts or configures training.
    """
    parts: list[Part] = []
    unread: list[tuple[Part, SpecError]] = []
    beside = {file for path in paths for file in _in_directory(path)}
    for file in dict.fromkeys(file for path in paths for file in _in_directory(path) or [path]):
        try:
            parts += read_parts([file], keys_of(recognizers))
        except SpecError as error:
            unread.append((Part(kind="shell", name=file, text=""), error))
    return _Reader(recognizers, unread).read(parts, beside)


def _in_directory(path: str) -> list[str]:
    """Return the files of a directory that is not a bundle; some may be about something else."""
    directory = Path(path)
    if path == STANDARD_INPUT or not _is_directory(directory) or is_bundle(directory):
        return []
    return [str(file) for file in known_files(directory)]


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def setup_of(parts: Sequence[Part], recognizers: Recognizers) -> Setup:
    """Read parts, and the files that they name, into a setup. Raises SpecError."""
    return _Reader(recognizers).read(parts)


class _Reader:
    def __init__(self, recognizers: Recognizers, unread: Sequence[tuple[Part, SpecError]] = ()) -> None:
        self.recognizers, self.unread = recognizers, list(unread)
        self.scripts: list[Script] = []
        self.parts: list[Part] = []
        self.configurations: list[Configuration] = []
        self.launches: list[Launch] = []
        self.cut_off: list[Script] = []
        """Scripts in which a command that would start training ends too early."""
        self.variables: list[Variable] = []
        self.pins: list[Pin] = []
        self.hostfiles: list[Hostfile] = []
        self.references: dict[tuple[Part, Part], None] = {}
        self._by_path: dict[Path, Configuration] = {}

    def read(self, parts: Sequence[Part], beside: Collection[str] = ()) -> Setup:
        """Read the parts. Files in `beside` are dropped if they are about something else. Raises SpecError."""
        for part in parts:
            if part.kind == "hosts":
                self.hostfiles.append(hostfile_of(part))
            elif part.kind != "shell" and not part.is_excerpt:
                try:
                    self._add(configuration_of(part, self.recognizers))
                except SpecError as error:
                    # A block of a document, or a file that a script writes, may be about anything.
                    if not part.file and not (part.label and isinstance(error, UnknownKindError)):
                        self.unread.append((part, error))
                    continue
            self.parts.append(part)
        environments: dict[str, Environment | None] = {}
        for part in parts:
            if part.kind == "shell":
                try:
                    # The blocks of one document form one shell session; separate files do not.
                    environments[part.name] = self._script(part, environments.get(part.name))
                except SpecError as error:
                    self.unread.append((part, error))
        if not (self.configurations or self.launches or self.variables or self.cut_off):
            if self.unread:
                raise self.unread[0][1]
            raise SpecError(
                "starts no training and holds no configuration", where=parts[0].name if parts else "", expected=READ
            )
        self._leave_out(beside)
        self.launches = [self._followed(launch) for launch in self.launches]
        self.launches = [self._with_only_file(launch) for launch in self.launches]
        for configuration in tuple(self.configurations):
            self._follow_deepspeed(configuration)
        return Setup(
            parts=tuple(self.parts),
            configurations=tuple(self.configurations),
            launches=tuple(self.launches),
            scripts=tuple(self.scripts),
            variables=tuple(self.variables),
            pins=tuple(self.pins),
            hostfiles=tuple(self.hostfiles),
            recognizers=self.recognizers,
            unread=tuple(self.unread),
            references=tuple(self.references),
        )

    def _leave_out(self, beside: Collection[str]) -> None:
        kept = (self.configurations, self.launches, self.variables, self.cut_off)
        parts = (one.part for found in kept for one in found)
        others = set(beside).difference(part.name for part in parts)
        keys = keys_of(self.recognizers)
        others -= {
            part.name
            for part, error in self.unread
            if isinstance(error, NoTextError) or names_a_job(part.text, keys, kind=part.kind)
        }
        self.parts = [part for part in self.parts if part.name not in others]
        self.scripts = [script for script in self.scripts if script.part.name not in others]
        self.unread = [(part, error) for part, error in self.unread if part.name not in others]

    def _script(self, part: Part, environment: Environment | None) -> Environment | None:
        script = read_script(part, self.recognizers, environment)
        self.launches += launches(script, self.recognizers)
        self.scripts.append(script)
        if any(cut_off(script, self.recognizers)):
            self.cut_off.append(script)
        self.variables += script.variables
        for one in script.commands:
            found = pins([word.text for word in one.words])
            self.pins += (Pin(package=name, version=said, part=part, line=one.first_line) for name, said in found)
        return script.environment

    def _add(self, configuration: Configuration) -> None:
        self.configurations.append(configuration)
        part = configuration.part
        if part.file:
            for base in own_first(part):
                self._by_path[_resolved(below(base, _without_expansions(part.file)))] = configuration
        elif not part.label:
            self._by_path[_resolved(Path(part.name))] = configuration

    # References ------------------------------------------------------------------------------------------------------

    def _followed(self, launch: Launch) -> Launch:
        """Return a launch with the content of its configuration file, also reading the other files that it names."""
        if launch.configuration is not None:
            self.configurations.append(launch.configuration)
        if launch.starter == "accelerate":
            launch = replace(launch, starter_file=self._follow_option(launch, "config_file"))
            self._follow_option(launch, "deepspeed_config_file")
        self._follow(launch.part, deepspeed_file(launch))
        if launch.starter == "deepspeed" and "hostfile" in launch.options:
            self._follow_hostfile(launch.part, launch.options["hostfile"].value)
        if not launch.config_file:
            return launch
        of = of_program(self.recognizers, launch.program)
        trainer = of.trainer if of else None
        return replace(launch, file_configuration=self._follow(launch.part, launch.config_file, trainer=trainer))

    def _follow_option(self, launch: Launch, option: str) -> Configuration | None:
        return self._follow(launch.part, launch.options[option].value) if option in launch.options else None

    def _with_only_file(self, launch: Launch) -> Launch:
        """Return a launch with the only file of accelerate there is, if the one that it names was not found."""
        files = [one for one in self.configurations if one.trainer == "accelerate"]
        if launch.starter != "accelerate" or launch.starter_file is not None or len(files) != 1:
            return launch
        return replace(launch, starter_file=files[0])

    def _follow_deepspeed(self, configuration: Configuration) -> None:
        value = configuration.get("deepspeed")
        if configuration.trainer == "accelerate":
            block = configuration.get("deepspeed_config")
            value = block.get("deepspeed_config_file") if isinstance(block, Mapping) else None
        if isinstance(value, str):
            self._follow(configuration.part, value)
        elif isinstance(value, dict):
            self._inline(configuration, value)

    def _follow_hostfile(self, part: Part, name: str) -> None:
        """Read a host file that a command of `part` names, if it exists."""
        name = _without_expansions(name)
        paths = [below(base, name) for base in own_first(part)] if name else []
        known = {_resolved(Path(one.part.name)) for one in self.hostfiles}
        path = next((one for one in paths if is_there(one, Path.is_file)), None)
        if path is not None and _resolved(path) not in known:
            for found in self._parts_of(path, lambda text: (Part(kind="hosts", name=shown_path(path), text=text),)):
                self.hostfiles.append(hostfile_of(found))
                self.parts.append(found)

    def _parts_of(self, path: Path, parts: Callable[[str], Iterable[Part]]) -> Iterable[Part]:
        """Return the `parts` of the text of a file that another one names; none if it is unread, which is noted."""
        try:
            return parts(read_text(path, wanted=READ))
        except SpecError as error:
            self._not_read(Part(kind="shell", name=shown_path(path), text=""), error)
            return ()

    def _not_read(self, part: Part, error: SpecError) -> None:
        """Note a part that cannot be read, unless its file is noted already: it may be given, and named twice."""
        if _resolved(Path(part.name)) not in {_resolved(Path(one.name)) for one, _ in self.unread}:
            self.unread.append((part, error))

    def _inline(self, configuration: Configuration, value: dict[str, Any]) -> None:
        """Add a DeepSpeed configuration that is embedded in another one, with its lines there."""
        lines = {
            path[1:]: line for path, line in configuration.source.lines.items() if path[0] == "deepspeed" and path[1:]
        }
        source = Source(name=configuration.source.name, data=value, lines=lines)
        self.configurations.append(replace(configuration, trainer="deepspeed", source=source))

    def _follow(self, part: Part, name: str, *, trainer: Trainer | None = None) -> Configuration | None:
        """Return the configuration in a file that `part` names, if the file exists and can be read."""
        name = _without_expansions(name)
        if not name.endswith(_SUFFIXES):
            return None
        for base in own_first(part):
            path = below(base, name)
            if _resolved(path) not in self._by_path and is_there(path, Path.is_file):
                self._add_file(path, trainer)
            if (found := self._by_path.get(_resolved(path))) is not None:
                self.references[part, found.part] = None
            if found is not None or is_there(path, Path.is_file):
                return found
        return None

    def _add_file(self, path: Path, trainer: Trainer | None) -> None:
        keys = keys_of(self.recognizers)
        for part in self._parts_of(path, lambda text: file_parts(text, keys, name=shown_path(path))):
            if part.kind == "shell":
                continue
            try:
                self._add(configuration_of(part, self.recognizers, trainer=trainer))
            except SpecError as error:
                self._not_read(part, error)
            else:
                self.parts.append(part)


def _without_expansions(name: str) -> str:
    """Return the path after an expansion such as `$(dirname "$0")/` or `$DIR/`, to be looked up in the usual places."""
    cut = max(name.rfind("}"), name.rfind(")"), name.rfind("`"))
    if cut >= 0 and ("$" in name or "`" in name):
        name = name[cut + 1 :]
    elif "$" in name:
        name = re.sub(r"^.*\$\w+", "", name, flags=re.DOTALL)
    else:
        return name
    return name.lstrip("/")


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return path
