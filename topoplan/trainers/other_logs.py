"""What programs print that topoplan writes no files for, and that its trainers are built on."""

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
"""A line for each `--log-interval` iterations, with their mean time (megatron/training/training.py, training_log); the
peaks of the ranks without data parallelism once, after the first of them (report_memory)."""

VERL = Log(
    loss=re.compile(rf"train/loss:(?P<loss>{FIGURE})"),
    steps=re.compile(r"\bstep:(?P<step>[0-9]{1,12}) - "),
    step_time=re.compile(
        rf"(?:perf/time_per_step|train/time\(s\)|timing_s/step):(?:np\.float64\()?(?P<s>{FIGURE})",
    ),
    allocated=re.compile(rf"perf/max_memory_allocated_gb:(?:np\.float64\()?(?P<gib>{FIGURE})"),
    reserved=re.compile(rf"perf/max_memory_reserved_gb:(?:np\.float64\()?(?P<gib>{FIGURE})"),
)
"""`step:N - key:value - ...` (verl/utils/logger/aggregate_logger.py); its `gb` are GiB (verl/utils/memory_utils.py).
Of reinforcement learning, a step has more parts than training."""

OTHER_LOGS = {"Megatron-LM": MEGATRON_LM, "verl": VERL}

WRITTEN_BY = {"Megatron-LM": ("swift",), "verl": ("trinity",)}
"""Trainers in whose logs such lines may stand."""
