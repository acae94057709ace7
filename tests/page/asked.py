"""The questions whose pages are tested, and their answers."""

import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from topoplan.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "cluster_specs").glob("*.yaml"))
FLAGSHIP = [str(ROOT / "cluster_specs" / "h100-4x8.yaml")]
MOE = [str(ROOT / "cluster_specs" / "b200-128x8-deepseek-v3.yaml"), "--pin", "tp=1,pp=8,cp=1,ep=8,micro_batch_size=1"]
LORA = shlex.split("--gpu rtx4090 --gpus-per-node 1 --model Qwen/Qwen3-8B --seq-len 1k --batch 16 --finetuning lora")
NOWHERE = shlex.split("--gpu rtx4090 --gpus-per-node 1 --model Qwen/Qwen3-32B --seq-len 4k --batch 16")
QUESTIONS = {"flagship": FLAGSHIP, "moe": MOE, "lora": LORA, "nowhere": NOWHERE}

LARGE = {"gpu": "h200-sxm-141gb", "nodes": "32", "model": "Qwen/Qwen3-235B-A22B", "seq_len": "8192", "batch": "1024"}
"""A question whose search takes many seconds."""
SPEC = "gpu: h100\nnodes: 1\nmodel: Qwen/Qwen3-8B\njob: {seq_len: 4096, global_batch_size: 16, pin: {tp: 4}}\n"
CONFIG = {
    **{"_name_or_path": "/data/Mine-8B", "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}
HOSTILE = "</script><img src=x onerror=alert(1)><!-- & \u2028"


def hostile_spec(folder: Path) -> Path:
    """Return a spec whose path contains markup. Names inside specs are checked; file names are the user's choice."""
    spec = folder / f"{HOSTILE}.yaml"
    spec.parent.mkdir()
    spec.write_text(SPEC, encoding="utf-8")
    return spec


def run(*words: str) -> Any:
    return CliRunner().invoke(app(), list(words))


@cache
def ranked(name: str) -> dict[str, Any]:
    """Return the output of `rank --json` for a question."""
    document: dict[str, Any] = json.loads(run("rank", *QUESTIONS[name], "--json").stdout)
    return document


def answers_of(text: str) -> dict[str, Any]:
    """Return the content of a page's only data block, as a browser parses it."""
    (block,) = text.split('<script type="application/json" id="answers">')[1:]
    answers: dict[str, Any] = json.loads(block.split("</script>")[0])
    return answers
