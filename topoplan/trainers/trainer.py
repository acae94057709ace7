"""What a trainer is: one value with everything that the search, bundles, `check` and runs need to know about it.

Each trainer's subpackage defines one, and `trainers/registry.py` lists them. The other files of a bundle (node scripts,
job script, hosts.json, plan.json, README.md, preflight) are made from these values alone; no code asks which trainer it
is dealing with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from topoplan.errors import LayoutError
from topoplan.layout.layout import Layout
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.specs.traits import Traits
from topoplan.trainers.checkpoint_size import CheckpointSize
from topoplan.trainers.codec import Codec, none
from topoplan.trainers.environment import EnvVar
from topoplan.trainers.log import Log
from topoplan.trainers.refusal import Refusal, refuse
from topoplan.trainers.requirements import Requirement, Versions
from topoplan.trainers.steps import Pauses
from topoplan.trainers.trials import Trial, is_generated

if TYPE_CHECKING:
    from topoplan.reading.recognizer import Recognizer

MAIN_FILE = "train.yaml"
"""The configuration file that the trainer reads first; every bundle has it."""

PLAN_FILE = "plan.json"
"""Inputs and layout, from which the whole bundle can be regenerated."""

DATASET_TO_FILL_IN = "SET_ME"
"""Placeholder for a dataset that the spec does not name; the node scripts refuse to start while it is there."""


class TrainerFiles(NamedTuple):
    """The trainer's own files of one plan."""

    files: Mapping[str, str]
    """Relative path -> text, including MAIN_FILE."""
    values: Mapping[str, Any]
    """MAIN_FILE as a YAML parser reads it."""
    run_name: str
    """Name of the run: model, plan, and a hash of the content of all files."""
    warnings: tuple[str, ...]
    """Sentences for the reader of the bundle, in addition to the plan's warnings."""

    @property
    def text(self) -> str:
        """The text of MAIN_FILE."""
        return self.files[MAIN_FILE]


class ReadmeWords(NamedTuple):
    """Trainer-specific parts of README.md, as Markdown; lines of a list item are indented by three spaces."""

    engine: str
    """What runs, to complete `A run of ...`."""
    packages: str
    """Content of the Python environment: `A Python environment with ..., in the same versions everywhere`."""
    install: tuple[str, ...]
    """Commands that install the environment, PyTorch apart."""
    progress: str
    """What is visible while it trains."""
    resume: str
    """How to resume a run from its last checkpoint."""
    model_note: str = ""
    """A sentence on the model's directory."""
    data_note: str = ""
    """Sentences on how the trainer reads its samples."""
    dataset_entry: tuple[str, str] | None = None
    """An entry of dataset_info.json and a record of the file that it names, as JSON text."""
    dataset_words: str = "to a name in `dataset_info.json`"
    """Completes `set dataset in train.yaml ...` if the spec names no dataset."""
    files: tuple[tuple[str, str], ...] = ()
    """Rows of the table of files: each trainer file other than MAIN_FILE, with its description."""


class Checkpoints(NamedTuple):
    """The checkpoints in a run's output_dir: one directory each, named with the step number at its end.

    The script of each node looks for the last complete one, so all nodes must see the same output_dir.
    """

    resumable: bool = True
    """Whether the trainer can resume this layout from a checkpoint."""
    directories: str = "checkpoint-"
    """Prefix of the directory names, before the step number."""
    whole: str = "trainer_state.json"
    """The file that is written last: a checkpoint in which it is missing or truncated is incomplete."""
    tracker: str = ""
    """A file in output_dir with the step of the last complete checkpoint, for trainers without a last file in each."""
    takes_any: bool = False
    """Whether the trainer, given no checkpoint, resumes from the highest step number, complete or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRun:
    """What a run needs on a node and leaves there. Paths are absolute, or relative to the working directory."""

    model_dir: str
    output_dir: str
    dataset: str
    """The dataset's name or path for the trainer; DATASET_TO_FILL_IN if the spec names none."""
    dataset_dir: str | None = None
    """The directory of LLaMA-Factory's dataset_info.json; None for trainers that read no such file."""
    dataset_files: tuple[str, ...] = ()
    """Sample files that must exist on every node, for trainers that read them by path."""
    to_fill_in: str | None = None
    """Key in MAIN_FILE, with its indentation, that holds DATASET_TO_FILL_IN if the spec names no dataset."""
    requirements: tuple[Requirement, ...]
    """Packages that, if missing or of a wrong version, the ranks would report one by one, late or not at all."""
    environment: tuple[EnvVar, ...] = ()
    """Variables of this trainer; those of NCCL, OpenMP and the spec follow them."""
    model_files: tuple[str, ...] = ("config.json",)
    """Any one of these files shows that the model is present."""
    refuses_quantized: tuple[str, str] | None = None
    """Why quantized weights with separate scales cannot be read (a comment), and the message; None if they can be."""
    checkpoint: CheckpointSize
    pauses: Pauses = field(default_factory=Pauses)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    steps: int | None = None
    """Optimizer steps of the whole run; None if the spec does not give the number of samples."""
    readme: ReadmeWords


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPath:
    """One training path of a trainer: the backends whose layouts it runs, and how."""

    backends: tuple[str, ...]
    """Backends to search, in this order."""
    traits: Mapping[str, Traits]
    """Backend -> how the trainer computes, including backends that it accepts but that are not searched."""
    packages: Mapping[str, tuple[str, ...]]
    """Backend -> packages needed besides PyTorch and the trainer itself."""
    job_refusals: Callable[[Spec], Iterator[Refusal]] = none
    """Why a job cannot run under any layout. Only the first trainer with a backend is asked, for all that have it."""
    model_warnings: Callable[[Model], Iterator[str]] = none
    """Sentences that a user of a model should know; only the first trainer with a backend is asked."""
    caveats: Callable[[Spec, Layout], Iterator[str]] = none
    """Known problems of the files written for a layout; faults of packages are in `known_faults.py`."""
    refusals: Callable[[Spec, Layout], Iterator[Refusal]]
    """What the trainer would refuse, silently ignore, or train differently from the plan; users see the first one."""
    steps: Callable[[Job, Mapping[str, Any]], int | None]
    """Optimizer steps of a job with these trainer keys; None if the number of samples is unknown."""
    files: Callable[[Spec, Layout], TrainerFiles]
    """The files for a layout that is not refused. Raises SpecError for a user's key that contradicts the layout."""
    run: Callable[[Spec, Layout, Mapping[str, Any]], TrainerRun]
    """What a run needs, read from the keys of MAIN_FILE, which a person may have edited."""
    start: Callable[[Spec, Layout, int], str]
    """The end of a node's script, from a comment to `exec`: bash that starts the processes of the node with this
    number. The variables $python, $bundle_dir, $master_addr, $master_port, $log_dir and $last_checkpoint are set; the
    last is empty if there is no complete checkpoint. Usually made with `torchrun_command`."""
    versions: Callable[[], Mapping[str, Any]]
    """Package -> version that the files are written for, as recorded in plan.json."""
    trial: Trial | None = None
    """How to measure a few steps of a job; None if trials are not supported."""
    codec: Codec | None = None
    """How to interpret the trainer's files, for `check`; None if they are not predicted."""

    def written(self, spec: Spec, layout: Layout) -> TrainerFiles:
        """Return the trainer's files. Raises its first refusal as an error, and LayoutError if the layout does not fit
        the cluster's GPU count."""
        gpus = spec.cluster.world_size
        if layout.world_size != gpus:
            raise LayoutError(f"the layout is for {layout.world_size} GPUs, and the cluster has {gpus}")
        refuse(self.refusals(spec, layout))
        found = self.files(spec, layout)
        if self.trial is None or not is_generated(spec.job):
            return found
        return found._replace(files={**found.files, **self.trial.samples(spec)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """One trainer. `trainers/registry.py` lists all of them."""

    name: str
    """The name that `--trainer` takes."""
    title: str
    """The name as its makers spell it."""
    training_paths: tuple[TrainingPath, ...]
    """The training paths, Megatron first if the trainer has it; each backend belongs to at most one of them."""
    log: Log
    versions: Versions
    recognizers: Sequence[Recognizer] = ()
    """How `check` recognizes the trainer's files and commands."""
    rules: str = ""
    """Module with the rules on the trainer's files, imported only by `check`: `findings(setup)` and the table RULES."""
    unwritten: tuple[str, ...] = ()
    """Stages of jobs that the trainer supports and that are predicted, but that no files are written for."""
    usual_for: tuple[str, ...] = ()
    """Kinds of fine-tuning for which the trainer's backends are searched if no trainer is named."""

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends that are searched for this trainer."""
        return tuple(backend for way in self.training_paths for backend in way.backends)

    def training_path_for(self, backend: str) -> TrainingPath | None:
        """Return the training path for a backend; None if the trainer does not support it."""
        return next((way for way in self.training_paths if backend in way.traits), None)


def torchrun_command(spec: Spec, node: int, words: str) -> str:
    """Return the last command of a node's script: one process per GPU that runs `words`, which are quoted for bash.

    The rendezvous is static, which keeps the planned node ranks (c10d sorts nodes by address).
    """
    cluster = spec.cluster
    return f"""\
exec "$python" -m torch.distributed.run \\
  --nnodes {cluster.nodes} --node_rank {node} --nproc_per_node {cluster.gpus_per_node} \\
  --master_addr "$master_addr" --master_port "$master_port" \\
  --max_restarts 0 --log_dir "$log_dir" --tee 3 \\
  {words}
"""
