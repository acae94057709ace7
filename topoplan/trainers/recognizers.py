"""Recognition of all trainers' and launchers' files and commands, and the codecs that interpret them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from topoplan.reading.interpolation import filled
from topoplan.reading.recognizer import SURE, Recognizer, Recognizers
from topoplan.reading.setup import Configuration, Setup
from topoplan.specs.source import at, path_of
from topoplan.trainers import deepspeed_alone, megatron_lm, registry
from topoplan.trainers.codec import Codec
from topoplan.trainers.llamafactory import bridge_job, v1_job
from topoplan.trainers.llamafactory.key_list import deepspeed_keys
from topoplan.trainers.roll import codecs as roll
from topoplan.trainers.roll.role import ROLL
from topoplan.trainers.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """A trainer that is recognized and named, but neither checked nor predicted: a row of others.toml.

    Sources of the keys: Axolotl 0.19.0 `utils/schemas/config.py`; verl 0.9.1 `trainer/config/`; NeMo-RL
    `examples/configs/`; ms-swift 4.6.0 `swift/ray/`.
    """

    name: str
    title: str
    """Name of the trainer's files or commands, for use in a sentence."""
    needs: tuple[tuple[str, ...], ...]
    """Groups of keys that identify the trainer: all keys of any one group must be present."""
    model: tuple[str, ...]
    """Keys that may name the model."""
    says: Mapping[str, str]
    """Phrase with a placeholder -> the key whose value fills it."""
    why: str
    """Why nothing is predicted."""
    programs: str = ""
    names: tuple[str, ...] = ()
    command: str = ""
    files: tuple[str, ...] = ()
    """Options of the programs that name the file."""
    keys_are_options: bool = False
    """True if the programs take keys as `--key value`, False for `block.key=value`."""
    part: bool = False
    """What a command of another trainer names."""
    beside: tuple[str, ...] = ()
    """Keys of which at least one must be present too."""
    without: tuple[str, ...] = ()
    """Keys of which none may be present, because they belong to a supported trainer that shares the other keys. The
    trainer of the file is then a guess, which a command that names the file may override."""
    recognized: Recognizer = field(init=False)

    def __post_init__(self) -> None:
        one = Recognizer(
            trainer=self.name,
            claim=self._claim,
            model_keys=self.model,
            names=self.names,
            programs=self.programs,
            command=self.command,
            methods="train",
            program_substring=self.command or "\0",  # a character that occurs in no program's name
            file_options=self.files,
            has_blocks=bool(self.programs) and not self.keys_are_options,
            unpredicted=(f"{self.title} is not predicted", self.why, ""),
        )
        object.__setattr__(self, "recognized", one)

    def _claim(self, data: Mapping[str, Any], _known: int) -> float:
        is_there = any(all(at(data, path_of(key)) is not None for key in keys) for keys in self.needs)
        is_beside = not self.beside or any(key in data for key in self.beside)
        if not is_there or not is_beside or any(key in data for key in self.without):
            return 0.0
        return SURE + 1 if self.without else SURE

    def words(self, configuration: Configuration, setup: Setup) -> Iterator[str]:
        """Yield what a configuration says about its training, in phrases."""
        if model := setup.named_model(configuration):
            yield model
        data = configuration.source.data
        for words, key in self.says.items():
            value = filled(at(data, path_of(key)), data, setup.environment)
            if isinstance(value, str | int | float) and not re.search(r"[\n$]", str(value)):
                yield words.format(f"{value:,}" if isinstance(value, int) else value)


@cache
def others() -> Mapping[str, Other]:
    """Return the rows of the table by name."""
    text = files("topoplan.trainers").joinpath("others.toml").read_text(encoding="utf-8")
    rows: dict[str, Other] = {}
    for name, row in tomllib.loads(text).items():
        lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
        rows[name] = Other(name=name, **{**row, **lists})
    return rows


_OF_DEEPSPEED = frozenset(["zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer"])
_OF_ACCELERATE = frozenset(["compute_environment", "distributed_type"])


def _deepspeed(data: Mapping[str, Any], _known: int) -> float:
    is_likely = "train_batch_size" in data and 2 * len(data.keys() & deepspeed_keys()) >= len(data)
    return SURE if data.keys() & _OF_DEEPSPEED or is_likely else 0.0


def _accelerate(data: Mapping[str, Any], _known: int) -> float:
    return SURE if data.keys() & _OF_ACCELERATE else 0.0


_STARTERS = (
    Recognizer(trainer="deepspeed", claim=_deepspeed),
    Recognizer(trainer="accelerate", claim=_accelerate),
)
_ONLY_READ = (ROLL, megatron_lm.MEGATRON_LM, v1_job.RECOGNIZED)
_CODECS = (
    *(deepspeed_alone.CODEC, roll.MEGATRON, roll.FSDP2),
    *(megatron_lm.CODEC, bridge_job.CODEC, v1_job.CODEC),
)
"""Codecs of files that are only read, never written."""


def recognizers() -> Recognizers:
    """Return the recognizers of launchers, of trainers that are only read, and of each trainer."""
    return (
        *_STARTERS,
        *_ONLY_READ,
        *(one.recognized for one in others().values()),
        *(one for trainer in registry.TRAINERS for one in trainer.recognizers),
    )


def trainer_of(configuration: Configuration) -> Trainer:
    """Return the trainer of a configuration; a lone DeepSpeed file is attributed to the first trainer."""
    name, (first, *_) = configuration.trainer, registry.TRAINERS
    return next((one for one in registry.TRAINERS if name in {each.trainer for each in one.recognizers}), first)


def codec_of(configuration: Configuration, setup: Setup) -> Codec | None:
    """Return the codec of a configuration; None if it is not predicted."""
    name = setup.training_path(configuration) or configuration.trainer
    codecs = (way.codec for trainer in registry.TRAINERS for way in trainer.training_paths)
    return next((one for one in (*codecs, *_CODECS) if one is not None and one.reads == name), None)
