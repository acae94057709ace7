"""Load a Spec from a spec file, or from one run document of `topoplan predict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topoplan.errors import SpecError
from topoplan.specs.build_cluster import build_cluster
from topoplan.specs.build_job import build_job
from topoplan.specs.cluster import Cluster
from topoplan.specs.draft import Document, Draft, given_value
from topoplan.specs.job import Job
from topoplan.specs.lengths import Lengths, read_length_file
from topoplan.specs.model import Model, with_labels
from topoplan.specs.profile import OwnProfile, read_profile
from topoplan.specs.source import Source, below, is_there, read_source
from topoplan.specs.spec import Spec
from topoplan.units import file_name, quote

if TYPE_CHECKING:
    from topoplan.specs.forms import JobForm, ModelForm

_OTHER_DATA_KEYS = ("tokenized_path", "streaming")
"""Trainer keys with which an epoch is not simply the samples of the data sets in sequence."""


def load_spec(
    path: str | Path | Source | None,
    *,
    keys: Mapping[str, tuple[str, str]] | None = None,
    model: str | None = None,
    job: str | Path | Source | None = None,
    overrides: Sequence[str] = (),
    pins: Mapping[str, Any] | str | Sequence[str] | None = None,
    profile: str | Path | None = None,
) -> Spec:
    """Return the spec in a file (or already read from one), or without a file, the spec made of the other arguments.

    `keys` maps command-line options that set one key each: `--nodes` -> (`nodes`, `4`). `model` replaces the file's
    model. `job` replaces its job: a file with a job's keys, or with `job:` and perhaps `model:`, or the content of one.
    `overrides` are `key=value` texts: a key of the job or of the cluster, or a dotted one such as `job.seq_len`,
    `trainer.save_steps`, `fabric.latency`. `pins` are layout keys, as a mapping, as `tp=4,pp=1`, or as several such
    texts. `profile` is a file of calibration constants that replaces the one named in the spec. The path of a model or
    a profile is relative to the file that contains it, or to the working directory if it comes from an argument.

    Raises SpecError, UnitError, ModelError or LayoutError (for a pin), each with file and line.
    """
    if path == "":
        raise SpecError("the name of the spec file is empty", expected="expected the path of a YAML file")
    draft, name, shown = _draft(path)
    if isinstance(job, Source):
        draft.replace_job(job, base=Path.cwd())
    elif job is not None:
        draft.replace_job(read_source(Path(job)), base=Path(job).parent)
    if model is not None:
        draft.give(("model",), model, "--model")
    _put_options(draft, keys or {}, overrides)
    draft.pin(pins or {})
    if profile is not None:
        draft.check_once(("profile",), str(profile), "--profile")
    own = None if profile is None else read_profile(profile)
    return _spec(draft.document(), default_name=name, path=shown, profile=own)


def load_cluster(
    path: str | Path | Source | None,
    *,
    keys: Mapping[str, tuple[str, str]] | None = None,
    overrides: Sequence[str] = (),
) -> Cluster:
    """Load the cluster alone, from a spec that may lack model and job. Raises SpecError or UnitError."""
    draft, name, _ = _draft(path)
    has_job = draft.has("job")
    _put_options(draft, keys or {}, overrides)
    if not has_job:
        draft.drop("job")  # made by options alone, about a job defined elsewhere
    return build_cluster(draft.document(), name)


def _draft(path: str | Path | Source | None) -> tuple[Draft, str, str | None]:
    """Return the initial draft, the default name of the cluster, and the file's name for messages."""
    if not isinstance(path, str | Path | Source | None):
        kind = f"a {type(path).__name__}"
        remedy = "keys are varied as overrides=['nodes=8'], and a document of keys is predicted by `topoplan predict`"
        raise SpecError(f"{kind} is no spec file", expected="expected the path of a YAML file", remedy=remedy)
    if path is None:
        return Draft(Source(name="without a spec file", data={}), base=Path.cwd()), "", None
    if isinstance(path, Source):
        return Draft(path, base=Path.cwd()), "", path.name
    path = Path(path)
    return Draft(read_source(path), base=path.parent), file_name(path.stem)[:64], str(path)


def _put_options(draft: Draft, keys: Mapping[str, tuple[str, str]], overrides: Sequence[str]) -> None:
    for option, (key, text) in keys.items():
        draft.give(tuple(key.split(".")), given_value(text, option), f"{option} {quote(text)}")
    draft.override(*overrides)


def spec_from_document(
    document: Mapping[str, Any], *, where: str, base: Path | None = None, profile: OwnProfile | None = None
) -> Spec:
    """Return the spec in one run document: `cluster` (the short form or a whole spec), `model` and `job`.

    `where` names the document in messages; paths are relative to `base`, or else to the working directory. `profile`
    replaces the profile named in the document. Other keys, such as `id` and `layout`, are left to the caller. Raises
    what `load_spec` raises.
    """
    if not isinstance(document, Mapping):
        raise SpecError("is not a run document", where=where, expected="expected keys `cluster`, `model` and `job`")
    cluster = document.get("cluster")
    if not isinstance(cluster, Mapping):
        what = "`cluster` is missing" if cluster is None else f"cluster: {quote(cluster)} is not a block of keys"
        raise SpecError(what, where=where, remedy='give it as {"gpu": "h100-sxm-80gb", "nodes": 4, "gpus_per_node": 8}')
    merged = {**cluster, **{key: document[key] for key in ("model", "job") if document.get(key) is not None}}
    if not all(isinstance(key, str) for key in merged):
        raise SpecError("has a key that is not text", where=where)
    draft = Draft(Source(name=where, data=merged), base=base or Path.cwd(), is_run_document=True)
    return _spec(draft.document(), default_name="", path=None, profile=profile)


def _spec(document: Document, *, default_name: str, path: str | None, profile: OwnProfile | None) -> Spec:
    form = document.form
    cluster = build_cluster(document, default_name)
    if form.model is None:
        document.fail_missing("model", remedy="add `model: Qwen/Qwen3-8B`, or give --model")
    if form.job is None:
        document.fail_missing("job", remedy="add a `job:` block with seq_len and global_batch_size, or give --job FILE")
    model = _model(document, form.model, form.job.seq_len)
    job = build_job(document, cluster, model, form.job, _lengths(document, form.job, model))
    model = with_labels(model, job.num_labels)
    if profile is None and form.profile is not None:
        with document.errors_at("profile"):
            profile = read_profile(document.base(("profile",)) / form.profile)
    if profile is not None:
        profile.check_gpu(cluster.gpu)
    note = "" if job.lengths else data_note(form.job, **_places(document))
    # Constants calibrated on one trainer's runs hold for that trainer only, so it becomes the default.
    calibrated = profile.calibrated.trainer or None if profile is not None and profile.calibrated else None
    trainer = form.trained_by or calibrated
    return Spec(cluster=cluster, model=model, job=job, profile=profile, trainer=trainer, data_note=note, path=path)


def _model(document: Document, form: ModelForm, seq_len: int) -> Model:
    from topoplan.specs.config_json import model_from_config
    from topoplan.specs.model_source import load_model

    if form.config is not None:
        where = f"{document.place(('model', 'config'))}: model.config"
        return model_from_config(form.config, name=form.name or "model", where=where, default_positions=seq_len)
    if form.name is None:
        document.fail(("model",), "neither `name` nor `config` is given", remedy="write `model: Qwen/Qwen3-8B`")
    with document.errors_at("model"):
        return load_model(form.name, base=document.base(("model", "name")), default_positions=seq_len)


def _lengths(document: Document, job: JobForm, model: Model) -> Lengths | None:
    """Return the sample lengths, from `lengths` or else from the data set; None if neither is known."""
    if job.lengths is None:
        with document.errors_at("job", "dataset"):
            return lengths_of_dataset(job, model, **_places(document))
    counts, source = job.lengths, "job.lengths"
    if isinstance(counts, str):
        file = below(document.base(("job", "lengths")), counts)
        with document.errors_at("job", "lengths"):
            counts, source = read_length_file(file), file.name
    sequences = sum(count for _, count in counts)
    if job.stage == "dpo" and sequences % 2:
        document.fail(
            ("job", "lengths"),
            f"{sequences:,} answers are no whole number of pairs",
            expected="expected two for each sample of stage dpo, the chosen and the rejected one, each with its prompt",
            remedy="count both",
        )
    samples = sequences // 2 if job.stage == "dpo" else sequences
    return Lengths(counts=counts, samples=samples, source=source)


def _places(document: Document) -> dict[str, Path]:
    """Return the directories that relative paths of the data sets, and of their directory, start at."""
    return {"base": document.base(("job", "dataset")), "directory_base": document.base(("job", "dataset_dir"))}


def data_note(job: JobForm | Job, *, base: Path, directory_base: Path) -> str:
    """Return why the named data sets, or their directory, could not be read; `lengths_of_dataset` has the parameters.

    Raises SpecError as `read_dataset`.
    """
    directory = _data_directory(job, directory_base)
    if job.dataset_dir is not None and not is_there(directory, Path.is_dir):
        return f"dataset_dir {job.dataset_dir} is not on this machine"
    if job.dataset is None:
        return ""
    from topoplan.specs.dataset import why_unread

    return why_unread(job.dataset, directory, base)


def _data_directory(job: JobForm | Job, base: Path) -> Path:
    return below(base, job.dataset_dir or "data")


def lengths_of_dataset(job: JobForm | Job, model: Model, *, base: Path, directory_base: Path) -> Lengths | None:
    """Return the lengths of the samples, in tokens, of a job's data sets if they are on this machine, otherwise None.

    Relative paths of data sets start at `base`, that of their directory at `directory_base`. Raises SpecError as
    `read_dataset`.
    """
    trainer = job.trainer
    is_mixed = trainer.get("mix_strategy") not in (None, "concat")
    if job.dataset is None or is_mixed or any(trainer.get(key) for key in _OTHER_DATA_KEYS):
        return None
    from topoplan.specs.dataset import read_dataset

    limit = trainer.get("max_samples")
    return read_dataset(
        job.dataset,
        _data_directory(job, directory_base),
        base=base,
        stage=job.stage,
        tokenizer=Path(model.config_path) / "tokenizer.json" if model.config_path else None,
        max_samples=limit if isinstance(limit, int) and limit > 0 else None,
    )
