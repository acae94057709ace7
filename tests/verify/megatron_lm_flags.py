"""Read Megatron-LM's flags from the parser of each checkout, in the form of `topoplan/trainers/key_classes.py`.

    python tests/verify/megatron_lm_flags.py Megatron-LM-0.10 ... Megatron-LM

updates `topoplan/catalog/trainer_keys/megatron_lm.json` to these checkouts, oldest first. Needs torch (any build),
numpy, einops, transformers and triton. The list has the flags of all checkouts; kinds and choices are those of the
newest one, and choices of older ones are kept.
"""

import argparse
import contextlib
import enum
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIST = Path(__file__).parents[2] / "topoplan" / "catalog" / "trainer_keys" / "megatron_lm.json"
_KINDS = {int: "int", float: "float", str: "str", None: "str"}


def parser_here() -> argparse.ArgumentParser:
    """Return the parser of the checkout on sys.path."""
    from megatron.training import arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    groups = [name for name in dir(arguments) if re.fullmatch("_add_.*_arg(s|uments)", name)]
    for name in ["add_megatron_arguments"] if hasattr(arguments, "add_megatron_arguments") else groups:
        getattr(arguments, name)(parser)
    with contextlib.suppress(ImportError):  # in the first versions, pretrain_gpt.py adds them
        from megatron.post_training.arguments import add_modelopt_args

        add_modelopt_args(parser)
    return parser


def flags(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, list[str]]]:
    """Return the kind and the choices of each flag, by name."""
    for action in parser._actions:
        kind = "switch" if action.nargs == 0 else "any" if action.nargs else _KINDS.get(action.type, "any")
        choices = [one.name if isinstance(one, enum.Enum) else str(one) for one in action.choices or ()]
        for option in action.option_strings:
            if option.startswith("--"):
                yield option[2:].replace("-", "_"), kind, [] if action.nargs else choices


def main(checkouts: list[str]) -> None:
    """Read each checkout in a separate process, and write the flags of all of them to the list."""
    kinds: dict[str, str] = {}
    choices: dict[str, list[str]] = {}
    for checkout in checkouts:
        shown = subprocess.run([sys.executable, __file__, "--one", checkout], stdout=subprocess.PIPE, check=True).stdout
        for name, kind, some in json.loads(shown.decode().splitlines()[-1]):
            kinds[name] = kind
            others = choices.pop(f"Top.{name}", [])
            if some:
                choices[f"Top.{name}"] = sorted({*some, *others})
    from key_lists import text_of

    document: dict[str, Any] = json.loads(LIST.read_text(encoding="utf-8"))
    document |= {"choices": dict(sorted(choices.items())), "classes": {"Top": dict(sorted(kinds.items()))}}
    LIST.write_text(text_of(document), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        sys.path[0] = sys.argv[2]  # replaces this directory, which also has a megatron.py
        print(json.dumps(list(flags(parser_here()))))
    else:
        main(sys.argv[1:])
