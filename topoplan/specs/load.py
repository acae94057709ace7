"""From a spec file, or one run document of `topoplan predict`, to a Spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topoplan.errors import InputError, LayoutError, SpecError
from topoplan.specs.build_cluster import build_cluster
from topoplan.specs.build_job import build_job
from topoplan.specs.cluster import Cluster
from topoplan.specs.document import Document, relocated
from topoplan.specs.lengths import Lengths
from topoplan.specs.model import Model
from topoplan.specs.profile import OwnProfile, read_profile
from topoplan.specs.source import KeyPath, Source, below, dotted, parse_value, read_source
from topoplan.specs.spec import Spec
from topoplan.units import file_name, quote, shown

if TYPE_CHECKING:
    from topoplan.specs.forms import JobForm, ModelForm

_SCHEMA_KEY = "$schema"
_OTHER_DATA_KEYS = ("tokenized_path", "streaming")
"""Keys of the trainer with which an epoch is not the samples of the data sets, one after the other."""


def load_spec(
    path: str | Path,
    *,
    model: str | None = None,
    job: str | Path | None = None,
    overrides: Sequence[str] = (),
    pins: Mapping[str, Any] | str | Sequence[str] | None = None,
    profile: str | Path | None = None,
) -> Spec:
    """The spec in a file.

    `model` takes the place of the file's model, and `job` (a file with a job's keys, or with `job:` and perhaps
    `model:`) of its job. `overrides` are `key=value` texts: a key of the job or of the cluster, or a dotted one such
    as `job.seq_len`, `trainer.save_steps`, `fabric.latency`. `pins` are layout keys, as a mapping, as `tp=4,pp=1`, or
    as several such texts. `profile` is a file of calibration constants, in place of the one that the spec may name. The
    relative path of a model or a profile is relative to the file that holds it; given in an argument, to the working
    directory.

    Raises SpecError, UnitError, ModelError or LayoutError (for a pin), each with file and line.
    """
    path = Path(path)
    draft = _Draft(read_source(path), base=path.parent)
    if job is not None:
        draft.replace_job(Path(job))
    if model is not None:
        draft.put(("model",), model, Source(name="--model", data={}), base=Path.cwd())
    for override in overrides:
        draft.override(override)
    draft.pin(pins or {})
    own = None if profile is None else read_profile(profile)
    return draft.spec(default_name=_name_of_file(path), path=str(path), profile=own)


def load_cluster(path: str | Path, *, overrides: Sequence[str] = ()) -> Cluster:
    """The cluster alone of a spec file, which may lack model and job. Raises SpecError or UnitError."""
    path = Path(path)
    draft = _Draft(read_source(path), base=path.parent)
    for override in overrides:
        draft.override(override)
    return draft.cluster(default_name=_name_of_file(path))


def spec_from_document(
    document: Mapping[str, Any], *, where: str, base: Path | None = None, profile: OwnProfile | None = None
) -> Spec:
    """The spec of one run document: `cluster` (the short form or a whole spec), `model` and `job`.

    `where` names the document in messages; relative paths are relative to `base`, or to the working directory.
    `profile` takes the place of the one that the document may name. Other keys, such as `id` and `layout`, are left to
    the caller. Raises what `load_spec` raises.
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
    draft = _Draft(Source(name=where, data=merged), base=base or Path.cwd(), is_run_document=True)
    return draft.spec(default_name="", path=None, profile=profile)


def spec_json_schema() -> dict[str, Any]:
    """JSON Schema of the spec file, for editors and `topoplan schema`."""
    from topoplan.specs.schema import schema_of_spec

    return schema_of_spec()


def _name_of_file(path: Path) -> str:
    """The file's name as a cluster's name, or an empty string where it will not do."""
    return file_name(path.stem)[:64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """Where a part of a document came from."""

    source: Source
    at: KeyPath = ()
    """Its path there."""
    base: Path
    """Where relative paths in it start."""


class _Draft:
    """The document of a spec while files and options are laid over it, with the origin of every part."""

    def __init__(self, source: Source, *, base: Path, is_run_document: bool = False) -> None:
        self._data = {key: value for key, value in source.data.items() if key != _SCHEMA_KEY}
        self._is_run_document = is_run_document
        self._origins: dict[KeyPath, _Origin] = {(): _Origin(source=source, base=base)}

    def place(self, path: KeyPath) -> str:
        """`file:line` or the option that a value came from."""
        origin, there = self._origin(path)
        return origin.source.place(there)

    def _origin(self, path: KeyPath) -> tuple[_Origin, KeyPath]:
        """The origin of a value, and its path there."""
        start = next(end for end in range(len(path), -1, -1) if path[:end] in self._origins)
        origin = self._origins[path[:start]]
        return origin, (*origin.at, *path[start:])

    def _base(self, path: KeyPath) -> Path:
        """Where the relative path that stands at `path` starts."""
        return self._origin(path)[0].base

    def put(self, path: KeyPath, value: Any, source: Source, *, base: Path | None = None, at: KeyPath = ()) -> None:
        """Set one value, making the blocks above it; it came from `at` in `source`.

        Without a `base` it came from an option, whose relative paths start in the working directory.
        """
        block = self._data
        for depth, key in enumerate(path[:-1]):
            inner = block.get(str(key))
            if key == "gpu" and isinstance(inner, str):
                inner = {"name": inner}
            if inner is not None and not isinstance(inner, Mapping):
                there = path[: depth + 1]
                what = f"`{dotted(there)}` is {shown(inner)}, not a block of keys ({self.place(there)})"
                raise SpecError(what, where=source.name)
            # A copy: a document given by a caller, or shared by aliases, stays as it was.
            block[str(key)] = dict(inner or {})
            block = block[str(key)]
        block[str(path[-1])] = value
        for known in [known for known in self._origins if known[: len(path)] == path]:
            del self._origins[known]
        self._origins[path] = _Origin(source=source, at=at, base=base or Path.cwd())

    def replace_job(self, path: Path) -> None:
        """Take the job, and the model if there is one, from a job file."""
        source = read_source(path)
        if "job" not in source.data:
            data = {key: value for key, value in source.data.items() if key != _SCHEMA_KEY}
            self.put(("job",), data, source, base=path.parent)
            return
        for key in source.data:
            if key not in ("job", "model", _SCHEMA_KEY):
                raise SpecError(
                    f"unknown key {quote(key)!r} in a job file",
                    where=source.place((key,)),
                    expected="expected `job:` and perhaps `model:`, or the keys of a job alone",
                )
        for key in ("job", "model"):
            if key in source.data:
                self.put((key,), source.data[key], source, base=path.parent, at=(key,))

    def override(self, text: str) -> None:
        """Apply one `--set key=value`."""
        name, equals, written = text.partition("=")
        option = f"--set {quote(text)}"
        if not equals or not name.strip():
            raise SpecError("is not key=value", where=option, remedy="write it as --set seq_len=8192")
        path = _override_path(name.strip(), option)
        self.put(path, parse_value(written, name=option), Source(name=option, data={}))

    def pin(self, pins: Mapping[str, Any] | str | Sequence[str]) -> None:
        """Lay pins over those of the job."""
        items: list[tuple[str, Any, str]] = []
        if isinstance(pins, Mapping):
            items = [(str(key), value, f"pin {key}") for key, value in pins.items()]
        else:
            texts = [pins] if isinstance(pins, str) else pins
            for part in filter(None, (part.strip() for text in texts for part in text.split(","))):
                key, equals, written = part.partition("=")
                option = f"--pin {quote(part)}"
                if not equals or not key.strip():
                    raise SpecError("is not key=value", where=option, remedy="write it as --pin tp=4,pp=1")
                items.append((key.strip(), parse_value(written, name=option), option))
        seen: dict[str, Any] = {}
        for key, value, option in items:
            if seen.setdefault(key, value) != value:
                raise LayoutError(
                    f"{key} is pinned to {seen[key]} and to {value}", where=option, remedy="keep one of them"
                )
            self.put(("job", "pin", *key.split(".")), value, Source(name=option, data={}))

    def _document(self) -> Document:
        """The document, its values checked one by one."""
        from topoplan.specs.forms import SpecForm
        from topoplan.specs.mistakes import check_form

        self._check_trainer_words()
        form = check_form(SpecForm, self._data, self.place)
        return Document(form=form, place=self.place, raw=self._data, is_run_document=self._is_run_document)

    def cluster(self, *, default_name: str) -> Cluster:
        """Check everything, and build the cluster."""
        return build_cluster(self._document(), default_name)

    def spec(self, *, default_name: str, path: str | None, profile: OwnProfile | None) -> Spec:
        """Check everything, and build it."""
        document = self._document()
        form = document.form
        cluster = build_cluster(document, default_name)
        if form.model is None:
            document.lacks("model", remedy="add `model: Qwen/Qwen3-8B`, or give --model")
        if form.job is None:
            document.lacks("job", remedy="add a `job:` block with seq_len and global_batch_size, or give --job FILE")
        model = self._model(form.model, form.job.seq_len)
        job = build_job(document, cluster, model, form.job, self._lengths(form.job, model))
        if profile is None and form.profile is not None:
            profile = self._profile(form.profile)
        if profile is not None:
            profile.check_gpu(cluster.gpu)
        return Spec(cluster=cluster, model=model, job=job, profile=profile, path=path)

    def _profile(self, path: str) -> OwnProfile:
        try:
            return read_profile(self._base(("profile",)) / path)
        except InputError as error:
            raise relocated(error, f"{self.place(('profile',))}: profile") from None

    def _check_trainer_words(self) -> None:
        """Refuse a bare yes or no under `trainer`: some of its keys want the word, others true or false."""
        job = self._data.get("job")
        trainer = job.get("trainer") if isinstance(job, Mapping) else None
        for key, word in trainer.items() if isinstance(trainer, Mapping) else ():
            origin, there = self._origin(("job", "trainer", str(key)))
            if there in origin.source.old_booleans:
                raise SpecError(
                    f"job.trainer.{key}: a bare {word} is a word to some readers of YAML and a boolean to others",
                    where=origin.source.place(there),
                    remedy=f'write "{word}" in quotes, or true or false',
                )

    def _model(self, form: ModelForm, seq_len: int) -> Model:
        from topoplan.specs.config_json import model_from_config
        from topoplan.specs.model_source import load_model

        if form.config is not None:
            where = f"{self.place(('model', 'config'))}: model.config"
            return model_from_config(form.config, name=form.name or "model", where=where, default_positions=seq_len)
        place = self.place(("model",))
        if form.name is None:
            remedy = "write `model: Qwen/Qwen3-8B`"
            raise SpecError("model: neither `name` nor `config` is given", where=place, remedy=remedy)
        try:
            return load_model(form.name, base=self._base(("model", "name")), default_positions=seq_len)
        except InputError as error:
            raise relocated(error, f"{place}: model") from None

    def _lengths(self, job: JobForm, model: Model) -> Lengths | None:
        """The lengths of the samples, as `lengths` says or as the data set has them; None where neither is known."""
        path: KeyPath = ("job", "dataset" if job.lengths is None else "lengths")
        try:
            if isinstance(job.lengths, tuple):
                counts, source = job.lengths, "job.lengths"
            elif job.lengths is not None:
                from topoplan.specs.length_file import read_length_file

                file = below(self._base(path), job.lengths)
                counts, source = read_length_file(file), file.name
            else:
                return self._lengths_of_dataset(job, model)
        except InputError as error:
            raise relocated(error, f"{self.place(path)}: {'.'.join(map(str, path))}") from None
        sequences = sum(count for _, count in counts)
        samples = max(1, sequences // 2) if job.stage == "dpo" else sequences
        return Lengths(counts=counts, samples=samples, source=source)

    def _lengths_of_dataset(self, job: JobForm, model: Model) -> Lengths | None:
        from topoplan.specs.dataset import read_dataset

        trainer = job.trainer or {}
        is_mixed = trainer.get("mix_strategy") not in (None, "concat")
        if job.dataset is None or is_mixed or any(trainer.get(key) for key in _OTHER_DATA_KEYS):
            return None
        limit = trainer.get("max_samples")
        return read_dataset(
            job.dataset,
            below(self._base(("job", "dataset_dir")), job.dataset_dir or "data"),
            base=self._base(("job", "dataset")),
            stage=job.stage or "sft",
            tokenizer=Path(model.config_path) / "tokenizer.json" if model.config_path else None,
            max_samples=limit if isinstance(limit, int) and limit > 0 else None,
        )


def _override_path(name: str, option: str) -> KeyPath:
    """Where a key of `--set` sits in the document."""
    from topoplan.specs.forms import JobForm, PinForm, SpecForm
    from topoplan.specs.mistakes import keys_of, likely_key

    parts = tuple(name.split("."))
    if not all(parts):
        raise SpecError(f"{shown(name)} is not a key", where=option, remedy="write it as --set seq_len=8192")
    if parts[0] in keys_of(SpecForm):
        return parts
    if parts[0] in keys_of(JobForm):
        return ("job", *parts)
    remedy = "other keys of the trainer are set as --set trainer.KEY=VALUE"
    if likely := likely_key(parts[0], [*keys_of(SpecForm), *keys_of(JobForm)]):
        remedy = f"did you mean {likely!r}?"
    elif likely := likely_key(parts[0], keys_of(PinForm)):
        remedy = f"a layout key is held with --pin {likely}=..."
    raise SpecError(f"unknown key {shown(parts[0])}", where=option, remedy=remedy)
