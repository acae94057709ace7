"""What a trainer is: a value that says everything that the search, the bundle, `check` and a run ask of it.

Each wing makes one, and `trainers/registry.py` lists them. The rest of a bundle (node scripts, job script, hosts.json,
plan.json, README.md, preflight) is made from these values alone, and nothing asks which trainer it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from topoplan.errors import LayoutError
from topoplan.layout.layout import Layout
from topoplan.reading.recogniser import Recogniser
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.specs.traits import Traits
from topoplan.trainers.checkpoint_size import CheckpointSize
from topoplan.trainers.codec import Codec, none
from topoplan.trainers.environment import EnvVar
from topoplan.trainers.log import Log
from topoplan.trainers.made_up import is_made_up
from topoplan.trainers.pauses import Pauses
from topoplan.trainers.refusal import Refusal, refuse
from topoplan.trainers.requirements import Requirement, Versions
from topoplan.trainers.trials import Trial

MAIN_FILE = "train.yaml"
"""The file that a trainer reads first; a bundle has it whatever the trainer."""

PLAN_FILE = "plan.json"
"""Inputs and layout, from which the whole bundle can be written again."""

DATASET_TO_FILL_IN = "SET_ME"
"""Stands for the dataset that the spec does not name; the node scripts refuse to start with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFiles:
    """The trainer's own files of one plan."""

    files: Mapping[str, str]
    """Relative path -> text; MAIN_FILE is among them."""
    values: Mapping[str, Any]
    """What a YAML reader gets from MAIN_FILE."""
    run_name: str
    """Names this run: model, plan, and a hash of everything in the files."""
    warnings: tuple[str, ...]
    """Sentences for the reader of the bundle, beside those of the plan."""

    @property
    def text(self) -> str:
        """MAIN_FILE."""
        return self.files[MAIN_FILE]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadmeWords:
    """The parts of README.md that only a trainer can say; Markdown, lines of a list item indented by three spaces."""

    engine: str
    """What runs: `A run of ...`."""
    packages: str
    """What the Python environment holds: `A Python environment with ..., in the same versions everywhere`."""
    install: tuple[str, ...]
    """Commands that install it, beside PyTorch."""
    model_note: str = ""
    """A sentence on the model's directory."""
    data_note: str = ""
    """Sentences on how the trainer reads its samples."""
    dataset_entry: tuple[str, str] | None = None
    """An entry of dataset_info.json and a record of its file, as JSON text."""
    dataset_words: str = "to a name in `dataset_info.json`"
    """Where the spec names no data set: set `dataset` in train.yaml ..."""
    progress: str
    """What is seen while it trains."""
    resume: str
    """How a run that ended goes on from its last checkpoint."""
    files: tuple[tuple[str, str], ...] = ()
    """Rows of the table of files: those of the trainer beside MAIN_FILE, and what they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """What a run leaves in its output_dir to go on from: a directory for each checkpoint, whose name ends in the number
    of its step. The script of each node finds the last whole one, so all have to see the same output_dir."""

    resumable: bool = True
    """Whether the trainer can go on from one of this layout."""
    directories: str = "checkpoint-"
    """What comes before the number."""
    whole: str = "trainer_state.json"
    """A file in it that is written last: without it, or with a part of it, it is not whole."""
    tracker: str = ""
    """A file in output_dir with the step of the last whole one, where there is no such file in each."""
    takes_any: bool = False
    """Whether the trainer, where it is told none, takes the one with the highest number, whole or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRun:
    """What a run wants of a node, and leaves there. Paths are absolute, or relative to the working directory."""

    model_dir: str
    output_dir: str
    dataset: str
    """As the trainer knows it; DATASET_TO_FILL_IN where the spec names none."""
    dataset_dir: str | None = None
    """The directory with LLaMA-Factory's dataset_info.json; None where no such file is read."""
    dataset_files: tuple[str, ...] = ()
    """Files of samples that have to be on every node; for trainers that read them by their path."""
    to_fill_in: str | None = None
    """Key in MAIN_FILE, with its indentation, that is DATASET_TO_FILL_IN where the spec names no data set."""
    requirements: tuple[Requirement, ...]
    """Packages whose lack, or wrong version, each rank would report in its own time, or not at all."""
    environment: tuple[EnvVar, ...] = ()
    """Variables of this trainer; those of NCCL, OpenMP and the spec come after them."""
    model_files: tuple[str, ...] = ("config.json",)
    """Any of these shows that the model is there."""
    refuses_quantized: tuple[str, str] | None = None
    """Why weights with scales beside them cannot be read (a comment), and the message that says so; None: they can."""
    checkpoint: CheckpointSize
    pauses: Pauses = field(default_factory=Pauses)
    checkpoints: Checkpoints = Checkpoints()
    steps: int | None = None
    """Optimizer steps of the whole run; None when the spec does not say how many samples there are."""
    readme: ReadmeWords


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of a trainer to train: layouts of some backends, and what it makes of them."""

    backends: tuple[str, ...]
    """What is searched for it, in this order."""
    traits: Mapping[str, Traits]
    """Backend -> how it computes; those that it takes without being searched for them are here too."""
    packages: Mapping[str, tuple[str, ...]]
    """Backend -> what it takes beside PyTorch and the trainer itself."""
    job_refusals: Callable[[Spec], Iterator[Refusal]] = none
    """Jobs that no layout would help. Asked of the first trainer that has a backend, for all that have it."""
    model_warnings: Callable[[Model], Iterator[str]] = none
    """What a user should know of a model; asked in the same way."""
    caveats: Callable[[Spec, Layout], Iterator[str]] = none
    """Known trouble with what it writes of a layout; the faults of packages are in `known_faults.py`."""
    refusals: Callable[[Spec, Layout], Iterator[Refusal]]
    """What it would refuse, silently ignore or train otherwise than planned; the first is what people read."""
    steps: Callable[[Job, Mapping[str, Any]], int | None]
    """Optimizer steps of a job with these keys of the trainer; None where nobody says how many samples there are."""
    files: Callable[[Spec, Layout], TrainerFiles]
    """Its files, for what is not refused. Raises SpecError for a key of the user that contradicts the layout."""
    run: Callable[[Spec, Layout, Mapping[str, Any]], TrainerRun]
    """What a run wants, from the keys of MAIN_FILE, which a person may have edited since."""
    start: Callable[[Spec, Layout, int], str]
    """The end of a node's script, from a comment to `exec`: bash that starts the processes of the node of this number.
    It finds $python, $bundle_dir, $master_addr, $master_port, $log_dir, and $last_checkpoint, which is empty where
    there is no whole one; `torchrun_command` is the usual one."""
    versions: Callable[[], Mapping[str, Any]]
    """Package -> version that the files are for, as plan.json has them."""
    trial: Trial | None = None
    """How a few steps of a job are measured; None where they are not."""
    codec: Codec | None = None
    """What its files mean, for `check`; None where they are not predicted."""

    def written(self, spec: Spec, layout: Layout) -> TrainerFiles:
        """Its files. Raises what it refuses, as an error, and LayoutError for a layout of another cluster."""
        gpus = spec.cluster.world_size
        if layout.world_size != gpus:
            raise LayoutError(f"the layout is for {layout.world_size} GPUs, and the cluster has {gpus}")
        refuse(self.refusals(spec, layout))
        found = self.files(spec, layout)
        if self.trial is None or not is_made_up(spec.job):
            return found
        return replace(found, files={**found.files, **self.trial.samples(spec)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """One trainer. `trainers/registry.py` lists them."""

    name: str
    """As `--trainer` takes it."""
    title: str
    """As its makers write it."""
    ways: tuple[Way, ...]
    """How it trains: on Megatron first, where it does; no two of them for one backend."""
    log: Log
    versions: Versions
    recognisers: tuple[Recogniser, ...] = ()
    """How `check` knows its files and commands."""
    rules: str = ""
    """Module of the rules on its files, which `check` alone loads: `findings(setup)`, and their table RULES."""
    unwritten: tuple[str, ...] = ()
    """Stages of jobs that it trains and that are predicted, though no files are written for them."""
    usual_for: tuple[str, ...] = ()
    """Kinds of fine-tuning for which its backends are searched where nobody names a trainer."""

    @property
    def backends(self) -> tuple[str, ...]:
        """What is searched for it."""
        return tuple(backend for way in self.ways for backend in way.backends)

    def way(self, backend: str) -> Way | None:
        """How it trains layouts of a backend; None where it does not."""
        return next((way for way in self.ways if backend in way.traits), None)
