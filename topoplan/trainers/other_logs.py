"""Log formats of programs that topoplan writes no files for, but that its trainers build on."""

from __future__ import annotations

import re

from topoplan.trainers.log import FIGURE, Log

MEGATRON_LM = Log(
    loss=re.compile(rf"lm loss: (?P<loss>{FIGURE})"),
    steps=re.compile(r"\biteration\s+(?P<step>[0-9]{1,12})/\s*(?P<total>[0-9]{1,12}) \|"),
    step_time=re.compile(rf"elapsed time per iteration \(ms\): (?P<ms>{FIGURE})"),
    allocated=re.compile(rf"max allocated: (?P<mib>{FIGURE})"),
    reserved=re.compile(rf"max reserved: (?P<mib>{FIGURE})"),
    batch=re.compile(r"global batch size:\s+(?P<batch>[0-9]{1,12})"),
    aside=re.compile(r"validation loss at |saving checkpoint at "),
)
"""One line per `--log-interval` iterations, with their mean time (megatron/training/training.py, training_log). The
memory peaks of the ranks with data-parallel rank 0 are printed once, after the first such line (report_memory)."""

VERL = Log(
    loss=re.compile(rf"train/loss:(?P<loss>{FIGURE})"),
    steps=re.compile(r"\bstep:(?P<step>[0-9]{1,12}) - "),
    step_time=re.compile(
        rf"(?:perf/time_per_step|train/time\(s\)|timing_s/step):(?:np\.float64\()?(?P<s>{FIGURE})",
    ),
    allocated=re.compile(rf"perf/max_memory_allocated_gb:(?:np\.float64\()?(?P<gib>{FIGURE})"),
    reserved=re.compile(rf"perf/max_memory_reserved_gb:(?:np\.float64\()?(?P<gib>{FIGURE})"),
)
"""`step:N - key:value - ...` (verl/utils/logger/aggregate_logger.py); its `gb` are GiB (verl/utils/memory_utils.py). In
reinforcement learning, a step includes more than training."""

OTHER_LOGS = {"Megatron-LM": MEGATRON_LM, "verl": VERL}

WRITTEN_BY = {"Megatron-LM": ("swift",), "verl": ("trinity",)}
"""Program -> trainers whose logs may contain its lines."""
