"""`topoplan show`: what topoplan knows: GPUs, models, calibration constants, recipes, the JSON Schema of the spec."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from topoplan.cli import completion
from topoplan.cli.options import AsJson, ProfilePath, argument, not_both, option
from topoplan.cli.output import print_json, print_written, show, write_new
from topoplan.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from topoplan.specs.model import Model
    from topoplan.trainers.trinity.recipes import OpenRange


def gpus(as_json: AsJson = False) -> None:
    """Any other GPU can be given as a block with its own figures."""
    from topoplan.report.lists import gpu_entries, print_gpus

    show(as_json, lambda entries: entries, print_gpus, gpu_entries())


def models(as_json: AsJson = False) -> None:
    """Any other model can be given as a directory or file with its config.json."""
    from topoplan.report.lists import model_entries, print_models

    show(as_json, lambda entries: entries, print_models, model_entries())


def profile(
    gpu: Annotated[str | None, argument("GPU", "A name of `topoplan show gpus`.", completion.gpus)] = None,
    profile: ProfilePath = None,
    output: Annotated[
        str | None, option("--output -o FILE", "Write the constants as a YAML file to change, which --profile takes.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Each constant is shown with its source. Without a GPU, lists all profiles. Exit code 2: bad input."""
    from topoplan.report import profile as report
    from topoplan.specs.gpu_profile import profile_of
    from topoplan.specs.known import gpu as gpu_named
    from topoplan.specs.profile import read_profile

    not_both("--output", output is not None, "--json", as_json)
    if gpu is None:
        if output is not None or profile is not None:
            raise InputError("no GPU is named", remedy="`topoplan show gpus` lists the names")
        show(as_json, report.profiles_to_dict, report.print_profiles)
        return
    card = gpu_named(gpu)
    own = None if profile is None else read_profile(profile)
    if own is not None:
        own.check_gpu(card)
    found = profile_of(card, own)
    if output is None:
        show(as_json, report.profile_to_dict, report.print_profile, card, found)
    else:
        write_new(output, report.profile_text(card, found))
        print_written(output)


def recipes(
    model: Annotated[
        str,
        option(
            "--model NAME,...",
            "Models: names (`topoplan show models`; the organisation may be left out) or config.json files.",
            completion.model_lists,
        ),
    ],
    gpu: Annotated[str, option("--gpu NAME", "The card, a name of `topoplan show gpus`.", completion.gpus)],
    gpus: Annotated[str, option("--gpus N,...", "Numbers of GPUs of the trainer.")] = "1,2,4,6",
    context: Annotated[
        str,
        option(
            "--context N,...|N..[M]",
            "Tokens of prompt and response: a list, or from N on until nothing fits (or up to M).",
        ),
    ] = "4096..",
    as_csv: Annotated[bool, option("--csv", "Print CSV: gpus, max_model_len, model, cell.")] = False,
    as_json: AsJson = False,
) -> None:
    """Shows what it takes to train a model by reinforcement learning, with Trinity-RFT and verl.

    Each cell is the first recipe that fits: vanilla, Env (expandable segments), SP=N (Ulysses sequence parallelism),
    Offload (FSDP 2 with everything in host memory), or - if none does. Exit code 2: bad input.
    """
    from topoplan.report.lists import print_table, table_to_dict, write_csv
    from topoplan.specs.known import gpu as gpu_named
    from topoplan.trainers.trinity.recipes import table as table_of

    not_both("--csv", as_csv, "--json", as_json)
    card, models = gpu_named(gpu), _models(model)
    cells = table_of(models, card, _numbers(gpus, "--gpus", most=_MOST_GPUS), _contexts(context))
    if as_csv:
        write_csv(sys.stdout, cells)
    else:
        show(as_json, table_to_dict, print_table, card, cells)


_MOST_GPUS = 1024
_MOST_TOKENS = 2**24


def _models(text: str) -> list[Model]:
    from topoplan.report.lists import short_name
    from topoplan.specs.model_source import load_model

    models = [load_model(name, base=Path.cwd()) for name in _parts(text, "--model")]
    names = [short_name(model) for model in models]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{twice} is named twice", where="--model", remedy="leave one out")
    return models


def _parts(text: str, option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError("an empty value" if len(parts) > 1 else "no value", where=option)
    return parts


def _numbers(text: str, option: str, *, most: int) -> list[int]:
    return sorted({_number(part, option, most=most) for part in _parts(text, option)})


def _number(text: str, option: str, *, most: int) -> int:
    from topoplan.units import quote

    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 9 and 1 <= int(digits) <= most):
        raise InputError(
            f"{quote(digits)!r} is not a whole number", where=option, expected=f"expected one from 1 to {most:,}"
        )
    return int(digits)


def _contexts(text: str) -> Sequence[int] | OpenRange:
    from topoplan.trainers.trinity.recipes import OpenRange

    if ".." not in text:
        return _numbers(text, "--context", most=_MOST_TOKENS)
    start, _, end = text.partition("..")
    first = _number(start, "--context", most=_MOST_TOKENS)
    last = _number(end, "--context", most=_MOST_TOKENS) if end.strip() else None
    if last is not None and last < first:
        raise InputError(f"{text} ends before it begins", where="--context")
    return OpenRange(first=first, last=last)


def schema() -> None:
    """An editor with this schema completes and checks a spec while it is written."""
    from topoplan.specs.forms import schema_of_spec

    print_json(schema_of_spec())
