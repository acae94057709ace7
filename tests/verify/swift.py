"""Parse arguments with ms-swift's own reader and argument classes, in a separate process.

Changes for a machine without GPUs: `use_cpu`; for Megatron, no process groups and a stand-in for mcore_bridge, which
imports kernels of Transformer Engine. Everything else is real, including every check of arguments in ms-swift.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.verify.answers import ONE_RANK, answers

ROOT = Path(__file__).parents[2]

# Reads each YAML as `swift sft FILE` does, and prints what the trainer would get.
PARSE = """
import json, os, sys

wanted, megatron = json.load(open(sys.argv[1])), sys.argv[2] == "megatron"
if megatron:
    from tests.verify import bridge_stand_in

    bridge_stand_in.install()
    from swift.megatron.arguments import MegatronSftArguments as Arguments, megatron_args, sft_args

    def as_planned(args):
        args.rank, args.world_size = 0, int(os.environ["RANKS"])

    megatron_args.initialize_megatron = as_planned
    sft_args.init_process_group = lambda **backend: None
else:
    from swift.arguments import SftArguments as Arguments
from swift.cli.main import parse_yaml_args
from swift.utils import parse_args

found = {}
for path, further in wanted.items():
    argv = [path]
    parse_yaml_args(argv)
    try:
        args, left = parse_args(Arguments, [*argv, *further])
        if left:
            raise ValueError(f"remaining_argv: {left}")
    except Exception as error:
        found[path] = {"error": f"{type(error).__name__}: {error}"}
        continue
    found[path] = {key: repr(value) for key, value in vars(args).items() if not key.startswith("_")}
print(json.dumps(found))
"""


def need_swift() -> None:
    """Skip the test if ms-swift is not installed."""
    pytest.importorskip("swift.cli", reason="ms-swift is not installed (the verify-swift extra has it)")


def parse(
    paths: Mapping[Path, list[str]], folder: Path, *, megatron: bool = False, ranks: int = 1
) -> dict[str, dict[str, str]]:
    """Return path -> the parsed arguments of that train.yaml with further arguments, as repr.

    {"error": ...} if the argument class refuses them. `folder` is the working directory.
    """
    environment = {**ONE_RANK, "LOCAL_WORLD_SIZE": "1", "RANKS": str(ranks)}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    wanted = {str(path): further for path, further in paths.items()}
    return answers(PARSE, wanted, folder, "megatron" if megatron else "plain", environment=environment)
