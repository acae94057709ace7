"""Files -> Setup: every part read, launches tied to the files that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from topoplan.check.launches import deepspeed_file, launches
from topoplan.check.parts import Part
from topoplan.check.read_parts import file_parts, read_parts
from topoplan.check.setup import Configuration, Launch, Setup, Trainer, Variable
from topoplan.check.shell import Environment, read_script
from topoplan.emit.trainer_keys import known_keys
from topoplan.errors import SpecError
from topoplan.specs.source import Source, below, parse_source, read_text, shown_path

_READ = (
    "read are the YAML of LLaMA-Factory, ms-swift, Trinity-RFT and accelerate, the JSON of DeepSpeed, "
    "launch scripts and documents with these"
)
_TRINITY = frozenset(["algorithm", "buffer", "cluster", "explorer", "model", "monitor", "synchronizer", "trainer"])
_DEEPSPEED = frozenset(
    ["zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer"]
)
_LLAMAFACTORY = frozenset(
    ["model_name_or_path", "stage", "finetuning_type", "cutoff_len", "dataset_dir", "template", "do_train"]
)
_SWIFT = frozenset(["train_type", "tuner_type", "torch_dtype", "max_length", "split_dataset_ratio", "model", "ENV"])
_SWIFT_MEGATRON = frozenset(
    [
        *("micro_batch_size", "global_batch_size", "train_iters", "mcore_model", "lr_warmup_fraction", "no_save_optim"),
        *("no_save_rng", "load_safetensors", "attention_backend", "cross_entropy_loss_fusion", "finetune"),
    ]
)
_LLAMAFACTORY_V1 = frozenset(
    ["train_dataset", "dist_config", "peft_config", "init_config", "kernel_config", "model_class"]
)
_OF_TOPOPLAN = frozenset(["gpus_per_node", "nodes", "gpu", "hosts", "job", "fabric"])
_SUFFIXES = (".yaml", ".yml", ".json")


class UnknownKindError(SpecError):
    """A YAML or JSON document that is no trainer's."""


def read_setup(paths: Sequence[str]) -> Setup:
    """Everything that these files say. Raises SpecError for what cannot be read, or is no configuration of training."""
    return setup_of(read_parts(paths))


def setup_of(parts: Sequence[Part]) -> Setup:
    """Everything that these parts say, and the files that they name. Raises SpecError."""
    return _Reader().read(parts)


class _Reader:
    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.configurations: list[Configuration] = []
        self.launches: list[Launch] = []
        self.variables: list[Variable] = []
        self._by_path: dict[Path, Configuration] = {}

    def read(self, parts: Sequence[Part]) -> Setup:
        for part in parts:
            if part.kind != "shell":
                try:
                    self._add(configuration_of(part))
                except UnknownKindError:
                    if not part.label:
                        raise
                    continue  # a block of a document may be about anything
            self.parts.append(part)
        environments: dict[str, Environment | None] = {}
        for part in parts:
            if part.kind == "shell":
                # The blocks of one document are one session in a shell; files are not.
                environments[part.name] = self._script(part, environments.get(part.name))
        if not (self.configurations or self.launches or self.variables):
            raise SpecError(
                "starts no training and holds no configuration", where=parts[0].name if parts else "", expected=_READ
            )
        self.launches = [self._followed(launch) for launch in self.launches]
        for configuration in tuple(self.configurations):
            self._follow_deepspeed(configuration)
        return Setup(
            parts=tuple(self.parts),
            configurations=tuple(self.configurations),
            launches=tuple(self.launches),
            variables=tuple(self.variables),
        )

    def _script(self, part: Part, environment: Environment | None) -> Environment | None:
        script = read_script(part, environment)
        self.launches += launches(script)
        self.variables += script.variables
        return script.environment

    def _add(self, configuration: Configuration) -> None:
        self.configurations.append(configuration)
        if not configuration.part.label:
            self._by_path[_resolved(Path(configuration.part.name))] = configuration

    # References ------------------------------------------------------------------------------------------------------

    def _followed(self, launch: Launch) -> Launch:
        """The launch with what its file holds, and the other files that it names read as well."""
        if launch.configuration is not None:
            self.configurations.append(launch.configuration)
        bases = _bases(launch.part)
        for option in ("config_file", "deepspeed_config_file"):
            if launch.starter == "accelerate" and option in launch.options:
                self._follow(launch.options[option].value, bases)
        self._follow(deepspeed_file(launch), bases)
        if not launch.config_file:
            return launch
        trainer = _trainer_of(launch.program)
        return replace(launch, reads=self._follow(launch.config_file, bases, trainer=trainer))

    def _follow_deepspeed(self, configuration: Configuration) -> None:
        value = configuration.get("deepspeed")
        if configuration.trainer == "accelerate":
            block = configuration.get("deepspeed_config")
            value = block.get("deepspeed_config_file") if isinstance(block, Mapping) else None
        if isinstance(value, str):
            self._follow(value, _bases(configuration.part))
        elif isinstance(value, dict):
            self._inline(configuration, value)

    def _inline(self, configuration: Configuration, value: dict[str, Any]) -> None:
        """A DeepSpeed configuration that stands in another one, with its lines there."""
        lines = {
            path[1:]: line for path, line in configuration.source.lines.items() if path[0] == "deepspeed" and path[1:]
        }
        source = Source(name=configuration.source.name, data=value, lines=lines)
        self.configurations.append(replace(configuration, trainer="deepspeed", source=source))

    def _follow(self, name: str, bases: Iterable[Path], *, trainer: Trainer | None = None) -> Configuration | None:
        """The configuration in the file of that name, where there is such a file."""
        name = _without_expansions(name)
        if not name.endswith(_SUFFIXES):
            return None
        for base in bases:
            path = below(base, name)
            if (known := self._by_path.get(_resolved(path))) is not None:
                return known
            if _is_file(path):
                for part in file_parts(read_text(path, wanted=_READ), name=shown_path(path)):
                    if part.kind == "shell":
                        continue
                    self._add(configuration_of(part, trainer=trainer))
                    self.parts.append(part)
                return self._by_path.get(_resolved(path))
        return None


def _without_expansions(name: str) -> str:
    """`$(dirname "$0")/train.yaml` and `$DIR/train.yaml`: what is behind them is looked for in the usual places."""
    cut = max(name.rfind("}"), name.rfind(")"), name.rfind("`"))
    if cut >= 0 and ("$" in name or "`" in name):
        name = name[cut + 1 :]
    elif "$" in name:
        name = re.sub(r"^.*\$\w+", "", name, flags=re.DOTALL)
    else:
        return name
    return name.lstrip("/")


def _bases(part: Part) -> list[Path]:
    """Where a relative path may start: the directory of the file that names it, and the working directory."""
    return [Path(part.name).parent, Path()]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return path


def _trainer_of(program: str) -> Trainer | None:
    if program == "megatron" or program.startswith("swift.cli._megatron."):
        return "swift-megatron"
    if program == "swift" or program.startswith("swift.cli."):
        return "swift"
    return "llamafactory" if program.startswith("llamafactory") else None


# Configurations ------------------------------------------------------------------------------------------------------


def configuration_of(part: Part, *, trainer: Trainer | None = None) -> Configuration:
    """The configuration in a YAML or JSON part; `trainer` says whose it is, where a command does.

    Raises SpecError when it cannot be parsed, or is nobody's.
    """
    source = _source(part)
    guessed = _guess(source.data)
    if guessed in ("deepspeed", "accelerate", "trinity") or trainer is None:
        trainer = guessed
    if trainer is None:
        raise UnknownKindError("is a configuration of an unknown kind", where=part.place(None), **_hint(source.data))
    return Configuration(trainer=trainer, part=part, source=source)


def _source(part: Part) -> Source:
    try:
        if part.kind == "json":
            return _json_source(part)
        return parse_source(part.text, name=part.name)
    except SpecError as error:
        raise SpecError(
            error.what, where=_in_file(part, error.where), expected=error.expected, remedy=error.remedy
        ) from None


def _in_file(part: Part, where: str) -> str:
    """`name:line:column` in the text of a part, as the line of the file."""
    match = re.fullmatch(r":(\d+)(?::\d+)?", where.removeprefix(part.name))
    if not part.lines or match is None:
        return where
    return part.place(int(match.group(1)))


def _json_source(part: Part) -> Source:
    """JSON, with the line of each value: YAML's events give these, and the JSON parser the strictness."""
    source = parse_source(part.text.replace("\t", " "), name=part.name)
    try:
        data = json.loads(part.text)
    except ValueError as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        message = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise SpecError(
            f"is not valid JSON: {message}",
            where=f"{part.name}:{line}",
            remedy="JSON has no comments, no commas behind the last item and double quotes only",
        ) from None
    return replace(source, data=data)


def _guess(data: Mapping[str, Any]) -> Trainer | None:
    """Whose keys these are."""
    keys = set(data)
    if keys & _DEEPSPEED and not keys & _LLAMAFACTORY:
        return "deepspeed"
    if keys & {"compute_environment", "distributed_type"}:
        return "accelerate"
    if keys & _LLAMAFACTORY_V1:
        return None
    blocks = {key for key in keys & _TRINITY if isinstance(data[key], dict)}
    model = data.get("model")
    if len(blocks) >= 2 or (isinstance(model, dict) and "model_path" in model):
        return "trinity"
    scores: dict[Trainer, int] = {
        "llamafactory": 2 * len(keys & _LLAMAFACTORY),
        "swift": 2 * len(keys & _SWIFT),
        "swift-megatron": 2 * len(keys & _SWIFT_MEGATRON) + len(keys & {"model"}),
    }
    known = sum(key in known_keys() for key in keys)
    best = max(scores, key=lambda name: scores[name])
    if scores[best]:
        return best if known or scores[best] > 2 else None
    return "llamafactory" if known and known * 2 >= len(keys) else None


def _hint(data: Mapping[str, Any]) -> dict[str, str]:
    schema = data.get("schema")
    if isinstance(schema, str) and schema.startswith("topoplan."):
        return {"expected": _READ, "remedy": "for a bundle give its directory"}
    if set(data) & _LLAMAFACTORY_V1:
        return {
            "expected": _READ,
            "remedy": "it looks like one of LLaMA-Factory's new engine (USE_V1), which is not read",
        }
    if len(set(data) & _OF_TOPOPLAN) >= 2:
        return {"expected": _READ, "remedy": "it looks like a cluster spec of topoplan: see `topoplan rank`"}
    return {"expected": _READ}
