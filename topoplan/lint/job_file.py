"""The model and the job in a trainer's own file (a train.yaml, a launch script), converted to a spec."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topoplan.errors import ModelError, SpecError, listed
from topoplan.lint.translate import Translation, translate
from topoplan.reading.configurations import UnknownKindError
from topoplan.reading.processes import Processes, processes_for
from topoplan.reading.read_setup import read_setup
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import is_complete
from topoplan.specs.cluster import Cluster
from topoplan.specs.forms import JobForm, SpecForm
from topoplan.specs.passed_on import TRAINER_KEYS_OF_JOB, TRAINER_KEYS_OF_LAYOUT
from topoplan.specs.source import Source, read_source, shown_path
from topoplan.specs.written import job_keys, model_key
from topoplan.trainers.recognizers import codec_of, recognizers, trainer_of
from topoplan.trainers.registry import trainer_named
from topoplan.trainers.trainer import Trainer

_OF_A_JOB = frozenset(["job", "seq_len", "finetuning", "samples", "pin"])
"""Keys that identify a YAML file of topoplan's own: no trainer has them."""
_EXPECTED = "expected keys of a job, such as seq_len, or a file of LLaMA-Factory or ms-swift"


@dataclass(frozen=True, slots=True)
class TrainerFile:
    """A trainer's file, and the setup that it is part of."""

    path: str
    setup: Setup
    configuration: Configuration

    @property
    def processes(self) -> Processes | None:
        """The processes that the file's command starts; None if there is no command."""
        return processes_for(self.setup, self.configuration)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """The job of a trainer's file on a cluster."""

    source: Source
    """`model` and `job`, with line numbers in the file."""
    trainer: Trainer
    """The trainer that the file is for."""
    on_batch: tuple[str, ...]
    """How the batch follows from the file and the cluster."""
    notes: tuple[str, ...]
    """Assumptions, and what the file holds besides the job."""
    on_lengths: str
    """What the file alone leaves to assume on the lengths of samples; the spec made of it may know them."""
    left_out: Mapping[str, Any]
    """The keys that are in the file and do not go along with its job, with their values."""


def trainer_file(path: str) -> TrainerFile | None:
    """Read a trainer's file at `path`; None for a job file of topoplan's own. Raises SpecError if it is neither."""
    if not path:
        raise SpecError("the name of the job's file is empty", expected="expected the path of a file")
    is_yaml = Path(path).suffix.lower() in (".yaml", ".yml", ".json")
    if is_yaml and read_source(Path(path)).data.keys() & _OF_A_JOB:
        return None
    try:
        setup = read_setup([path], recognizers())
    except UnknownKindError as error:
        if error.remedy:
            raise  # the file looks like something else
        _refuse_other_keys(path)
        return None
    found = [one for one in setup.complete_configurations if setup.is_complete(one)]
    if len(found) == 1 and codec_of(found[0], setup) is None:
        recognizer = setup.recognizer(found[0].trainer)
        title = recognizer.unpredicted[0] if recognizer and recognizer.unpredicted else found[0].trainer
        raise SpecError(title, where=shown_path(Path(path)), expected=_EXPECTED)
    if len(found) == 1:
        return TrainerFile(path, setup, found[0])
    named = any(map(setup.model_key, setup.configurations))
    if is_yaml and not found and named and not any(map(is_complete, setup.configurations)):
        _refuse_other_keys(path)
        return None
    places = listed([one.part.place(one.line(*setup.model_key(one).split("."))) for one in found])
    what = f"holds {len(found)} jobs ({places})" if found else "names no model, so it is not a whole job"
    raise SpecError(what, where=shown_path(Path(path)), expected="expected the file or the command of one job")


def _refuse_other_keys(path: str) -> None:
    """Raise SpecError for keys that are not a job's; for those that are, the job's own errors name the mistakes."""
    given = read_source(Path(path)).data.keys()
    known = given & {
        *SpecForm.__dataclass_fields__,
        *JobForm.__dataclass_fields__,
        *TRAINER_KEYS_OF_JOB,
        *TRAINER_KEYS_OF_LAYOUT,
    }
    if 2 * len(known) < len(given):
        raise SpecError(
            "is neither a job nor a trainer's file that is read here",
            where=shown_path(Path(path)),
            expected=_EXPECTED,
        )


def job_of(
    file: TrainerFile,
    cluster: Cluster,
    *,
    model: str | None = None,
    seq_len: int | None = None,
    trainer: str | None = None,
    backend: str | None = None,
) -> JobFile:
    """Return the job of a trainer's file on a cluster, whose size determines how many sequences a step takes.

    `model` and `seq_len` override the file. Of its further keys, the job has those that plans of `backend` can have,
    or, for None, of every backend; `trainer` is by default the file's. Raises InputError, with the reason, for what
    cannot be predicted.
    """
    try:
        found = translate(file.configuration, file.setup, cluster, model=model, length=seq_len)
    except ModelError as error:
        place = file.configuration.part.place(file.configuration.line(*_model_key(file).split(".")))
        raise ModelError(str(error), where=place, remedy="" if model else "say with --model which it is") from None
    whose = trainer_of(file.configuration)
    by = whose if trainer is None else trainer_named(trainer)
    further = _further(file, found, by, backend)
    keys = {**job_keys(found.spec.job), **further}
    left_out = _left_out(file, found, further)
    # A job is planned for the whole cluster; the GPUs of its command only give the batch.
    assumptions = [words for words in found.assumptions if words not in (found.on_part, found.on_lengths)]
    notes = [*assumptions, *_on_layout(file, found), *_on_left_out(file, found, by, left_out)]
    return JobFile(
        source=Source(name=shown_path(Path(file.path)), data={"model": model_key(found.spec.model), "job": keys}),
        trainer=whose,
        on_batch=tuple(_on_batch(found)),
        notes=tuple(notes),
        on_lengths=found.on_lengths,
        left_out=left_out,
    )


def _further(file: TrainerFile, found: Translation, trainer: Trainer, backend: str | None) -> dict[str, Any]:
    """Return the file's further keys of a job that plans of a trainer can have under a backend, or, for None, under all
    that may train the job."""
    further = {**found.codec.carries(found.keys, found.spec.job, backend)}
    if trainer is not trainer_of(file.configuration):
        paths = [path for path in trainer.training_paths if backend is None or backend in path.traits]
        codecs = [path.codec for path in paths if path.codec is not None]
        keys = further.get("trainer", {})
        further["trainer"] = {
            name: value for name, value in keys.items() if codecs and all(codec.takes(name, value) for codec in codecs)
        }
    return further


def _model_key(file: TrainerFile) -> str:
    return file.setup.model_key(file.configuration)


def _on_batch(found: Translation) -> Iterator[str]:
    layout, world = found.layout, found.spec.cluster.world_size
    data, split = layout.dp, layout.world_size // layout.dp
    yield (
        f"a batch of {found.spec.job.global_batch_size:,}: micro batch {layout.micro_batch_size} x gradient"
        f" accumulation {layout.gradient_accumulation_steps} x {data} data parallel rank{'' if data == 1 else 's'}"
        f"{found.on_part.removeprefix('predicted')}"
    )
    if rest := world % split:
        what = f"its layout splits a model over {split} GPUs, and {world} GPUs % {split} = {rest}"
        yield f"{what}: --batch sets another batch"


def _on_layout(file: TrainerFile, found: Translation) -> Iterator[str]:
    if of_layout := _of_layout(file, found):
        yield f"its layout is not taken over: {', '.join(of_layout)}"


def _of_layout(file: TrainerFile, found: Translation) -> list[str]:
    written, meant = found.keys.configuration.source.data, found.keys.configuration.misspelt
    keys = _layout_keys(file)
    return [key for key in written if meant.get(key, key) in keys]


def _left_out(file: TrainerFile, found: Translation, further: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the file has besides defaults and does not go along with its job; `further` does."""
    written, meant = found.keys.configuration.source.data, found.keys.configuration.misspelt
    taken = {_model_key(file), *_of_layout(file, found), *further.get("trainer", ()), *found.keys.read}
    usual = found.codec.defaults()
    return {
        key: value for key, value in written.items() if meant.get(key, key) not in taken and value != usual.get(key)
    }


def _on_left_out(file: TrainerFile, found: Translation, by: Trainer, left_out: Iterable[str]) -> Iterator[str]:
    """Say which keys no plan has, and which are in the files of some plans only."""
    paths = [path for path in by.training_paths if path.codec is not None]
    lacking = [_left_out(file, found, _further(file, found, by, path.backends[0])) for path in paths]
    if nowhere := [key for key in left_out if all(key in lacks for lacks in lacking)]:
        yield f"left out: {', '.join(nowhere)}"
    for path, lacks in zip(paths, lacking, strict=True):
        if only := [key for key in left_out if key not in lacks]:
            yield f"only in the files of plans with {listed(path.backends, 'or')}: {', '.join(only)}"


def _layout_keys(file: TrainerFile) -> set[str]:
    """Return the keys in which the trainer expresses layouts, and those that name DeepSpeed and FSDP files."""
    codecs = (way.codec for way in trainer_of(file.configuration).training_paths)
    rows = {key for codec in codecs if codec is not None for key in codec.rows}
    return rows | {"deepspeed", "fsdp", "fsdp_config"}
