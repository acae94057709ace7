"""The launchers that start training processes, and how to split their command lines into options, program, arguments.

Options as of torch 2.13 (torch/distributed/run.py and launch.py), DeepSpeed 0.18 (deepspeed/launcher/runner.py) and
accelerate 1.11 (accelerate/commands/launch.py). In all three, options end at the first word that is not one; what
follows belongs to the program.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Literal

from topoplan.catalog import key_list
from topoplan.reading.setup import Option
from topoplan.reading.words import Word, is_open

StarterName = Literal["torchrun", "deepspeed", "accelerate", ""]

PYTHON = re.compile(r"(?:python|pypy)[0-9.]*(?:\.exe)?")

_TORCHRUN_VALUES = frozenset(
    [
        *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts"),
        *("monitor_interval", "start_method", "event_log_handler", "role", "log_dir", "redirects", "tee"),
        *("log_line_prefix_template", "local_ranks_filter", "duplicate_stdout_filters", "duplicate_stderr_filters"),
        *("node_rank", "master_addr", "master_port", "local_addr", "logs_specs", "numa_binding"),
        *("signals_to_handle", "shutdown_timeout", "print_completion"),
    ]
)
_TORCHRUN_FLAGS = frozenset(["standalone", "module", "no_python", "run_path", "use_env", "virtual_local_rank", "help"])
_DEEPSPEED_FLAGS = frozenset(
    [
        *("module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid"),
        *("elastic_training", "bind_cores_to_rank", "quiet", "help"),
    ]
)
_ACCELERATE_FLAGS = frozenset(
    [
        *("cpu", "debug", "downcast_bf16", "dynamo_use_dynamic", "dynamo_use_fullgraph", "enable_cpu_affinity"),
        *("dynamo_use_regional_compilation", "fp8_use_autocast_during_eval", "module", "multi_gpu", "no_python"),
        *("no_tpu_cluster", "quiet", "same_network", "tpu", "tpu_cluster", "tpu_use_sudo", "use_deepspeed"),
        *("use_fsdp", "use_megatron_lm", "use_parallelism_config", "use_xpu", "help"),
    ]
)
_ACCELERATE_VALUES = frozenset(
    [
        *("aws_access_key_id", "aws_secret_access_key", "dynamo_mode", "env", "log_dir", "max_restarts"),
        *("monitor_interval", "mpirun_hostfile", "num_cpu_threads_per_process", "rdzv_conf", "role", "tee"),
        *("fp8_amax_compute_algo", "fp8_amax_history_len", "fp8_backend", "fp8_format", "fp8_interval", "fp8_margin"),
        *("fp8_enable_fsdp_float8_all_gather", "fp8_override_linear_precision", "fp8_pad_inner_dim"),
        *("fp8_opt_level", "mpirun_ccl", "tpu_name", "tpu_zone", "vm"),
        *(f"megatron_lm_{name}" for name in ("attention_backend", "attention_dropout", "calculate_per_token_loss")),
        *(f"megatron_lm_{name}" for name in ("context_parallel_size", "decoder_last_pipeline_num_layers")),
        *(f"megatron_lm_{name}" for name in ("attention_softmax_in_fp32", "eod_mask_loss", "gradient_clipping")),
        *(f"megatron_lm_{name}" for name in ("expert_model_parallel_size", "expert_tensor_parallel_size")),
        *(f"megatron_lm_{name}" for name in ("hidden_dropout", "no_load_optim", "no_save_optim", "pp_degree")),
        *(f"megatron_lm_{name}" for name in ("num_micro_batches", "optimizer_cpu_offload", "tp_degree")),
        *(f"megatron_lm_{name}" for name in ("overlap_cpu_optimizer_d2h_h2d", "recompute_activations")),
        *(f"megatron_lm_{name}" for name in ("recompute_granularity", "recompute_method", "recompute_num_layers")),
        *(f"megatron_lm_{name}" for name in ("sequence_parallelism", "use_custom_fsdp", "use_distributed_optimizer")),
        *(f"megatron_lm_{name}" for name in ("use_precision_aware_optimizer", "use_rotary_position_embeddings")),
    ]
)
"""Options of accelerate that its file lacks, or has in a separate block."""
_DEEPSPEED_VALUES = frozenset(
    [
        *("hostfile", "include", "exclude", "num_nodes", "min_elastic_nodes", "max_elastic_nodes", "num_gpus"),
        *("num_accelerators", "master_port", "master_addr", "node_rank", "launcher", "launcher_args"),
        *("enable_each_rank_log", "autotuning", "bind_core_list", "ssh_port", "venv_script", "log_level"),
    ]
)
_SHORT = {
    "torchrun": {"m": "module", "r": "redirects", "t": "tee", "h": "help"},
    "deepspeed": {"H": "hostfile", "i": "include", "e": "exclude", "q": "quiet", "h": "help"},
    "accelerate": {"m": "module", "q": "quiet", "t": "tee", "h": "help"},
}
_FLAGS = {"torchrun": _TORCHRUN_FLAGS, "deepspeed": _DEEPSPEED_FLAGS, "accelerate": _ACCELERATE_FLAGS}


@dataclass(slots=True, kw_only=True)
class LaunchCommand:
    """A command line split into launcher, options, program and arguments."""

    starter: StarterName
    called: str = ""
    options: dict[str, Option] = field(default_factory=dict)
    module: bool = False
    """True if the program is a Python module."""
    program: Word | None = None
    arguments: tuple[Word, ...] = ()


@lru_cache
def options_of(starter: StarterName) -> frozenset[str]:
    """Return all options of a launcher, with underscores; accelerate's include the keys of its configuration file."""
    if starter == "torchrun":
        return _TORCHRUN_VALUES | _TORCHRUN_FLAGS
    if starter == "deepspeed":
        return _DEEPSPEED_VALUES | _DEEPSPEED_FLAGS
    known = key_list("accelerate")
    of_fsdp = {f"fsdp_{name}" for name in known["blocks"]["fsdp_config"]}
    blocks = known["blocks"].values()
    return _ACCELERATE_FLAGS.union(_ACCELERATE_VALUES, known["top"], of_fsdp, *blocks, ["config_file"])


def base_name(text: str) -> str:
    """Return the last component of a path."""
    return PurePosixPath(text).name if "/" in text and not is_open(text) else text.rpartition("/")[2]


def split_launch(words: Sequence[Word]) -> LaunchCommand | None:
    """Split a command into launcher, options, program and arguments. None if it cannot start training."""
    if not words:
        return None
    name, rest = base_name(words[0].text), words[1:]
    if name == "torchrun":
        return _cut("torchrun", "torchrun", rest)
    if name == "deepspeed":
        return _cut("deepspeed", "deepspeed", rest)
    if name in ("accelerate", "accelerate-launch"):
        if name == "accelerate":
            at = next((at for at, word in enumerate(rest) if word.text == "launch"), None)
            if at is None or (at and not rest[0].text.startswith("-")):
                return None
            rest = [*rest[:at], *rest[at + 1 :]]  # refused before `launch`, but meant as its options
        return _cut("accelerate", "accelerate launch", rest)
    if PYTHON.fullmatch(name) or (is_open(words[0].text) and _runs_module(rest)):
        return _python(rest)
    return LaunchCommand(starter="", program=words[0], arguments=tuple(rest))


def _runs_module(words: Sequence[Word]) -> bool:
    """Whether the first word, a variable, must be a Python interpreter: `"$python" -m ...` or `"$python" train.py`."""
    return any(word.text == "-m" for word in words[:4]) or bool(words and words[0].text.endswith(".py"))


def _python(words: Sequence[Word]) -> LaunchCommand | None:
    at = 0
    while at < len(words) and words[at].text.startswith("-"):
        text = words[at].text
        if text == "-m" and at + 1 < len(words):
            return _module(words[at + 1], words[at + 2 :])
        if text in ("-c", "-", "-V", "--version", "-h"):
            return None
        at += 2 if text in ("-W", "-X") else 1
    if at == len(words):
        return None
    return LaunchCommand(starter="", program=words[at], arguments=tuple(words[at + 1 :]))


def _module(module: Word, rest: Sequence[Word]) -> LaunchCommand | None:
    name = module.text
    if name in ("torch.distributed.run", "torch.distributed.launch"):
        return _cut("torchrun", name, rest)
    if name in ("accelerate.commands.launch", "accelerate.commands.accelerate_cli"):
        return _cut("accelerate", name, rest[1:] if name.endswith("_cli") else rest)
    if name in ("deepspeed.launcher.runner", "deepspeed"):
        return _cut("deepspeed", name, rest)
    return LaunchCommand(starter="", module=True, program=module, arguments=tuple(rest))


def _cut(starter: Literal["torchrun", "deepspeed", "accelerate"], called: str, words: Sequence[Word]) -> LaunchCommand:
    found = LaunchCommand(starter=starter, called=called)
    at = 0
    while at < len(words):
        word = words[at]
        if not word.text.startswith("-") or word.text == "-":
            break
        at += 1
        name, equals, value = word.text.lstrip("-").partition("=")
        name = _SHORT[starter].get(name, name) if not word.text.startswith("--") else name.replace("-", "_")
        line, assumed = word.line, word.assumed
        if starter == "torchrun":
            name = _whole_name(name)
        if name in _FLAGS[starter]:
            value = value if equals else ""
        elif not equals and at < len(words):
            value, assumed = words[at].text, words[at].assumed
            at += 1
        if name:
            found.options[name] = Option(value=value, line=line, assumed=assumed)
    found.module = "module" in found.options
    if at < len(words):
        found.program, found.arguments = words[at], tuple(words[at + 1 :])
    return found


@lru_cache(maxsize=1024)
def _whole_name(name: str) -> str:
    """Complete an abbreviated option as argparse does, if only one option begins with it."""
    known = options_of("torchrun")
    if name in known:
        return name
    full = [one for one in known if name and one.startswith(name)]
    return full[0] if len(full) == 1 else name
