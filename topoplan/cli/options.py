"""Arguments shared by several verbs, and how they become a Spec."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import product
from math import prod
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from topoplan.cli import completion
from topoplan.errors import InputError, SpecError, listed

if TYPE_CHECKING:
    from topoplan.lint.job_file import JobFile
    from topoplan.specs.cluster import Cluster
    from topoplan.specs.source import Source
    from topoplan.specs.spec import Spec

Completes = Callable[..., Any] | None
"""Returns the completions of an option's value."""


def option(usage: str, words: str, completes: Completes = None, **further: Any) -> Any:
    """Return a typer option from its usage, such as `--set KEY=VALUE` or `--output -o FILE`."""
    names = [word for word in usage.split() if word.startswith("-")]
    value = usage.split()[len(names) :]
    return typer.Option(*names, metavar=value[0] if value else None, help=words, autocompletion=completes, **further)


def argument(metavar: str, words: str, completes: Completes = None) -> Any:
    """Return a typer positional argument."""
    return typer.Argument(metavar=metavar, help=words, autocompletion=completes, show_default=False)


SpecPath = Annotated[str, argument("SPEC", "The cluster spec, a YAML file.")]
OptionalSpecPath = Annotated[str | None, argument("SPEC", "The cluster spec, a YAML file.")]
ProfilePath = Annotated[
    str | None,
    option(
        "--profile FILE",
        "Calibration constants of your own, over the GPU's; `topoplan show profile GPU -o FILE` makes a start.",
    ),
]
BackendChoice = Annotated[
    str | None,
    option(
        "--backend all|NAME,...",
        "What to search: mca, ddp, deepspeed, fsdp2, megatron, or all; by default mca where it trains the job.",
        completion.backends,
    ),
]
TrainerChoice = Annotated[
    str | None,
    option(
        "--trainer llamafactory|swift|trinity",
        "Only plans that this trainer runs; by default a plan is for LLaMA-Factory, or for another one if that cannot"
        " run it.",
        completion.trainers,
    ),
]


AsJson = Annotated[bool, option("--json", "Print JSON.")]
Html = Annotated[str | None, option("--html FILE", "Write a page to look at in a browser: one file with all in it.")]
NoCache = Annotated[
    bool,
    option(
        "--no-cache",
        "Search anew and keep nothing of it. Searches are kept in $XDG_CACHE_HOME/topoplan, by default in "
        "~/.cache/topoplan, and answer the same question again.",
    ),
]


EXAMPLE = "--gpu h100-sxm-80gb --nodes 4 --model Qwen/Qwen3-8B --seq-len 4096 --batch 64"
"""Options that are sufficient without a spec file."""

_KEYS = {
    "--gpu": "gpu",
    "--nodes": "nodes",
    "--gpus-per-node": "gpus_per_node",
    "--seq-len": "job.seq_len",
    "--batch": "job.global_batch_size",
    "--finetuning": "job.finetuning",
    "--margin": "margin",
}
"""Options that each set one key of a spec."""

OPTION_OF = {key.removeprefix("job."): option.removeprefix("--").replace("-", "_") for option, key in _KEYS.items()}
"""Key of such an option, as `--set` takes it -> field of SpecOptions."""
_KEY_OF = {field: key for key, field in OPTION_OF.items()}

WITHOUT_SPEC = ("gpu", "nodes", "gpus_per_node", "model", "seq_len", "batch", "finetuning", "job")
"""Options of verbs that need no spec file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecOptions:
    """The command-line options that modify or replace a spec file. A verb with a parameter `options: SpecOptions` has
    all of these options, in this order; with `Annotated[SpecOptions, ("model", "job")]` it has only those named."""

    gpu: Annotated[
        str | None,
        option("--gpu NAME", "GPU of the cluster (`topoplan show gpus`); SPEC is then not needed.", completion.gpus),
    ] = None
    nodes: Annotated[str | None, option("--nodes N", "Machines of the cluster.")] = None
    gpus_per_node: Annotated[str | None, option("--gpus-per-node N", "GPUs in a machine.")] = None
    model: Annotated[
        str | None,
        option(
            "--model NAME",
            "Model to use in place of the spec's: a name (`topoplan show models`), a directory or a config.json.",
            completion.models,
        ),
    ] = None
    seq_len: Annotated[str | None, option("--seq-len TOKENS", "Tokens in a sequence.")] = None
    batch: Annotated[str | None, option("--batch N", "Sequences in a step, over all GPUs.")] = None
    finetuning: Annotated[
        str | None, option("--finetuning KIND", "full, freeze, lora or qlora; by default full.", completion.finetunings)
    ] = None
    job: Annotated[
        str | None,
        option(
            "--job FILE",
            "File whose job takes the place of the spec's: YAML of its keys, or a trainer's own train.yaml or script.",
        ),
    ] = None
    overrides: Annotated[
        list[str] | None, option("--set KEY=VALUE", "Set one key of the job or the cluster; may be repeated.")
    ] = None
    pin: Annotated[list[str] | None, option("--pin KEY=N,...", "Fixed layout keys, such as tp=4,pp=1.")] = None
    backend: BackendChoice = None
    trainer: TrainerChoice = None
    margin: Annotated[
        str | None,
        option(
            "--margin SHARE",
            "Share of the card that a plan must leave free, such as 5%; 0% takes predictions at their word.",
        ),
    ] = None
    profile: ProfilePath = None

    def __bool__(self) -> bool:
        return any(astuple(self))

    def gives(self, field: str) -> bool:
        """Return whether a value is given: by the option of this field, or by `--set` with the option's key."""
        key = _KEY_OF.get(field, field)
        return getattr(self, field) is not None or any(key_and_value(text)[0] == key for text in self.overrides or ())

    def with_sets(self, sets: Sequence[str], *, as_options: bool = False) -> SpecOptions:
        """Return the options with `key=value` texts, as of `--set`, in place of what they say of the same keys.

        A key goes to its own option if that was given, or wherever it has one if `as_options`.
        """
        said = dict(map(key_and_value, sets))
        fields = {key: OPTION_OF.get(key, key) for key in said if key in OPTION_OF or key == "model"}
        own = {key: name for key, name in fields.items() if as_options or getattr(self, name) is not None}
        pins = [part.strip() for text in self.pin or () for part in text.split(",")]
        pins = [part for part in pins if not _is_within(f"pin.{key_and_value(part)[0]}", said)]
        further = [text for text in self.overrides or () if not _is_within(key_and_value(text)[0], said)]
        for text in sets:
            key = key_and_value(text)[0]
            if as_options and key.startswith("pin."):
                pins.append(text.removeprefix("pin."))
            elif key not in own:
                further.append(text)
        return replace(self, overrides=further, pin=pins, **{name: said[key] for key, name in own.items()})

    def _of(self, option: str) -> str | None:
        value: str | None = getattr(self, option.removeprefix("--").replace("-", "_"))
        return value

    def _check_whole(self) -> None:
        """Raise InputError if the options are not sufficient without a spec file."""
        if self.gpu is None:
            raise InputError("expected a SPEC, or --gpu", remedy=f"such as {EXAMPLE}; `topoplan init` asks for it")
        needed = () if self.job else ("--model", "--seq-len", "--batch")
        if lacking := [option for option in needed if self._of(option) is None]:
            raise InputError(f"{missing(lacking)}, without a SPEC", remedy=f"write {EXAMPLE}")

    def assumed(self, spec: str | Source | None) -> list[str]:
        """Return sentences on what is assumed because it was not given: `assumed: 1 node (--nodes)`."""
        usual = {} if spec is not None else {"nodes": "1 node (--nodes)"}
        if spec is None and not self.job:
            usual["finetuning"] = "full fine-tuning (--finetuning)"
        words = [words for field, words in usual.items() if not self.gives(field)]
        return [*([f"assumed: {', '.join(words)}"] if words else []), *self.assumed_of_job(spec)]

    def assumed_of_job(self, spec: str | Source | None) -> list[str]:
        """Return sentences on how a trainer's file was interpreted, if --job is one."""
        if (of_trainer := self.trainer_job(spec)) is None:
            return []
        title, cluster = of_trainer.trainer.title, quote(spec) if isinstance(spec, str) else "SPEC"
        check = (
            f"`topoplan check {quote(self.job or '')} --cluster {cluster}` compares its own layout with the best plan"
        )
        alone = () if self.trainer else (f"searched is what {title} runs; --trainer names another",)
        on_batch = () if self.gives("batch") else of_trainer.on_batch
        job = self.read(spec).job
        on_lengths = [of_trainer.on_lengths] if of_trainer.on_lengths and job.lengths is None and not job.packs else []
        notes = (*on_batch, *on_lengths, *of_trainer.notes)
        return [f"the job is that of {self.job}, a file of {title}'s", *notes, check, *alone]

    def with_explicit_batch(self, spec: str | Source | None, read: Spec) -> SpecOptions:
        """Return the options with an explicit batch if --job is a trainer's file, which states the batch per GPU."""
        if self.gives("batch") or self.trainer_job(spec) is None:
            return self
        return replace(self, batch=str(read.job.global_batch_size))

    def words(self, spec: str | Source | None) -> list[str]:
        """Return SPEC and these options as command-line words."""
        found = [] if spec is None else [spec if isinstance(spec, str) else spec.name]
        for name, hint in get_type_hints(SpecOptions, include_extras=True).items():
            (option,) = hint.__metadata__
            value = getattr(self, name)
            for one in [value] if isinstance(value, str) else value or ():
                # Until typer has read the annotation, an option's first name is stored as its default.
                found += [f"{option.default}={one}"] if one.startswith("-") else [option.default, one]
        return found

    def _keys(self, spec: str | Source | None) -> dict[str, tuple[str, str]]:
        """Return the options that each set one key of a spec, as `load_spec` takes them."""
        said = {option: value for option in _KEYS if (value := self._of(option)) is not None}
        if spec is None and not self.gives("nodes"):
            said["--nodes"] = "1"
        return {option: (_KEYS[option], value) for option, value in said.items()}

    def read_cluster(self, spec: str | Source | None) -> Cluster:
        """Return only the cluster. Raises what `load_cluster` raises."""
        from topoplan.specs.load import load_cluster

        return load_cluster(spec, keys=self._keys(spec), overrides=self.overrides or ())

    def trainer_job(self, spec: str | Source | None, backend: str | None = None) -> JobFile | None:
        """Return the trainer's file given as --job, interpreted for this cluster; None if it is a file of topoplan's.
        Its global batch is computed for the cluster as described; variations of the cluster keep that batch. `backend`
        is that of the plan, if known."""
        if self.job is None:
            return None
        from topoplan.lint.job_file import job_of, trainer_file
        from topoplan.specs.kinds import in_thousands
        from topoplan.specs.source import parse_value
        from topoplan.trainers.registry import trainer_name

        file = trainer_file(self.job)
        if file is None:
            return None
        cluster = self.read_cluster(spec)
        tokens = None if self.seq_len is None else in_thousands(parse_value(self.seq_len, name="--seq-len"))
        length, whose = tokens if isinstance(tokens, int) else None, trainer_name(self.trainer, "--trainer")
        return job_of(file, cluster, model=self.model, seq_len=length, trainer=whose, backend=backend)

    def read(self, spec: str | Source | None, *changes: str, backend: str | None = None) -> Spec:
        """Return the spec file with the command line's options applied, and `key=value` changes of what they say.
        Without a file, the options must be sufficient by themselves. With the `backend` of a plan, a job of a trainer's
        file has every key that the plan's files can have."""
        from topoplan.specs.load import load_spec

        if spec is None:
            self._check_whole()
        of_trainer, said = self.trainer_job(spec, backend), self.with_sets(changes) if changes else self
        read = load_spec(
            spec,
            keys=said._keys(spec),
            model=said.model,
            job=of_trainer.source if of_trainer else said.job,
            overrides=said.overrides or (),
            pins=said.pin or (),
            profile=said.profile,
        )
        # A trainer's file may have further keys, which only that trainer understands.
        trainer = self.trainer or (of_trainer.trainer.name if of_trainer else None)
        is_any = self.backend is None and trainer is None and read.trainer is None
        return read if is_any else self._searched_by(read, trainer)

    def _searched_by(self, read: Spec, trainer: str | None) -> Spec:
        from topoplan.trainers.registry import backend_names, trainer_name

        where = "--trainer" if trainer else ": ".join(filter(None, (read.path, "trained_by")))
        job, whose = read.job, trainer_name(trainer or read.trainer, where)
        backends: tuple[str, ...] = ()
        if self.backend is not None:
            backends = backend_names(self.backend, whose, "--backend", finetuning=job.finetuning)
        pinned = job.pin.get("backend")
        if backends and pinned is not None and (pinned,) != backends:
            where, remedy = f"--backend {self.backend}", "leave one of them out"
            raise InputError(f"the job pins backend {pinned}", where=where, remedy=remedy)
        return replace(read, backends=backends, trainer=whose)


def key_and_value(text: str) -> tuple[str, str]:
    """Return the parts of `key=value`; `job.seq_len` and `seq_len` are the same key."""
    key, _, value = text.partition("=")
    return key.strip().removeprefix("job."), value.strip()


def _is_within(key: str, keys: Iterable[str]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in keys)


def expand_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Return the verb with a signature that typer can read: one parameter per SpecOptions field that it takes."""
    hints, fields = get_type_hints(verb, include_extras=True), get_type_hints(SpecOptions, include_extras=True)
    parameters: list[inspect.Parameter] = []
    taken: dict[str, tuple[str, ...]] = {}

    def parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)

    for name, one in inspect.signature(verb).parameters.items():
        hint = hints[name]
        if hint is SpecOptions or SpecOptions in get_args(hint):
            (taken[name],) = getattr(hint, "__metadata__", (tuple(fields),))
            parameters += [parameter(option, fields[option], None) for option in taken[name]]
        else:
            parameters.append(parameter(name, hint, one.default))

    def called(**given: Any) -> Any:
        for name, options in taken.items():
            given[name] = SpecOptions(**{option: given.pop(option) for option in options})
        return verb(**given)

    called.__doc__ = verb.__doc__
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called


def missing(options: list[str]) -> str:
    """Return `--model and --batch are missing`."""
    return f"{listed(options)} {'is' if len(options) == 1 else 'are'} missing"


def not_both(one: str, is_one: object, other: str, is_other: object) -> None:
    """Raise InputError if two mutually exclusive options are given."""
    if is_one and is_other:
        raise InputError(f"{one} and {other} cannot be used together", remedy="leave one out")


def variations(overrides: list[str] | None, *, most: int) -> list[tuple[str, ...]]:
    """Return every combination of the values of `--set key=a,b,c` options, each as single-valued options.

    A value with a comma must be quoted, or be a YAML list in brackets. Raises InputError for no option at all, an empty
    value, a key that is set twice, or more than `most` combinations.
    """
    from topoplan.units import quote

    if not overrides:
        raise InputError("nothing to change", where="--set", remedy="add it as in --set nodes=8, or --set nodes=2,4,8")
    choices: dict[str, tuple[str, ...]] = {}
    for text in overrides:
        name, equals, written = text.partition("=")
        key = name.strip()
        whole = not equals or written.lstrip()[:1] in ("[", "{", '"', "'")
        values = [value.strip() for value in ([written] if whole else written.split(","))]
        if equals and not all(values):
            what = "no value" if len(values) == 1 else "an empty value"
            raise SpecError(what, where=f"--set {quote(text)}", expected="expected one such as nodes=8 or nodes=2,4,8")
        # `job.seq_len` and `seq_len` are the same key.
        if (path := key.removeprefix("job.")) in choices:
            raise InputError(f"{key} is set twice", where="--set", remedy=f"write its values as --set {key}=A,B")
        choices[path] = tuple(dict.fromkeys(f"{key}={value}" if equals else text for value in values))
    if (count := prod(map(len, choices.values()))) > most:
        raise InputError(f"{count:,} combinations", where="--set", expected=f"expected at most {most}")
    return list(product(*choices.values()))
