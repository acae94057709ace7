"""Kite, a fictitious trainer that docs/extending.md walks through. It trains with DDP and FSDP2."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tests.trainers.kite.reading import CODEC, RECOGNIZER, ROWS
from topoplan.catalog.packages import Package
from topoplan.layout.layout import Layout
from topoplan.operators.params import parameter_count
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers.checkpoint_size import CheckpointSize
from topoplan.trainers.codec import entries
from topoplan.trainers.log import Log, loss_key
from topoplan.trainers.refusal import Refusal
from topoplan.trainers.requirements import Requirement, Versions, install_commands
from topoplan.trainers.train_yaml import OUTPUT_TITLE, trainer_files
from topoplan.trainers.trainer import (
    DATASET_TO_FILL_IN,
    ReadmeWords,
    Trainer,
    TrainerFiles,
    TrainerRun,
    TrainingPath,
    torchrun_command,
)
from topoplan.trainers.traits import HUGGING_FACE
from topoplan.trainers.yaml_text import Entry, Section

_KITE = Requirement(package=Package(name="kite-trainer", module="kite"), versions=">=2", why="1 has other keys")


def _refusals(spec: Spec, layout: Layout) -> Iterator[Refusal]:
    if spec.job.stage != "sft":
        what = f"stage {spec.job.stage}: Kite has supervised fine-tuning alone"
        yield Refusal("stage", what, where="job.stage", expected="expected sft")
    if layout.ulysses > 1:
        what = f"ulysses {layout.ulysses}: Kite splits no sequences"
        yield Refusal("sequences", what, where="layout.ulysses", remedy="pin ulysses=1")


def _steps(job: Job, keys: Mapping[str, Any]) -> int | None:
    """Kite counts samples across epochs and drops the last incomplete batch."""
    return keys.get("steps") or (job.samples and int(job.samples * job.epochs) // job.global_batch_size)


def _files(spec: Spec, layout: Layout) -> TrainerFiles:
    job = spec.job
    lines = (
        Entry(key="kite_model", value=spec.model.name),
        Entry(key="kite_data", value=job.dataset or DATASET_TO_FILL_IN),
        Entry(key="kite_tokens", value=job.seq_len),
        *entries(ROWS, ROWS, spec, layout),
    )
    sections = (Section(title="Kite", entries=lines), Section(title=OUTPUT_TITLE, entries=()))
    head = (f"{spec.model.name} on {spec.cluster.name}: plan {layout.id}",)
    return trainer_files(spec, layout, sections, user=job.trainer, head=head, warnings=())


def _run(spec: Spec, layout: Layout, values: Mapping[str, Any]) -> TrainerRun:
    parameters = parameter_count(spec.model)
    return TrainerRun(
        model_dir=str(values["kite_model"]),
        output_dir=str(values["output_dir"]),
        dataset=str(values["kite_data"]),
        to_fill_in="kite_data",
        requirements=(_KITE,),
        checkpoint=CheckpointSize(
            megatron_bytes=0, hf_bytes=2 * parameters, optimizer_bytes=12 * parameters, at_once=2
        ),
        steps=_steps(spec.job, values),
        readme=ReadmeWords(
            engine="Kite",
            packages="Kite",
            install=install_commands((_KITE,)),
            progress="It hums.",
            resume="start again.",
        ),
    )


def _start(spec: Spec, layout: Layout, node: int) -> str:
    return "# Kite flies.\n" + torchrun_command(spec, node, '-m kite.fly "$bundle_dir/train.yaml"')


KITE = Trainer(
    name="kite",
    title="Kite",
    training_paths=(
        TrainingPath(
            backends=("ddp", "fsdp2"),
            traits={"ddp": HUGGING_FACE, "fsdp2": HUGGING_FACE},
            packages={"ddp": (), "fsdp2": ("string",)},
            refusals=_refusals,
            steps=_steps,
            files=_files,
            run=_run,
            start=_start,
            versions=lambda: {"kite-trainer": "2"},
            codec=CODEC,
        ),
    ),
    log=Log(loss=loss_key("kite_loss"), steps=re.compile(r"gust (?P<step>\d+) of (?P<total>\d+)")),
    versions=Versions(title="Kite"),
    recognizers=(RECOGNIZER,),
    rules="tests.trainers.kite.rules",
)
