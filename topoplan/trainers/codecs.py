"""The ways of the trainers whose configurations are read: a line each."""

from __future__ import annotations

from collections.abc import Mapping

from topoplan.layout.layout import MEGATRON_BACKENDS
from topoplan.reading.setup import Configuration, Setup
from topoplan.trainers import deepspeed_alone
from topoplan.trainers.codec import Codec
from topoplan.trainers.llamafactory import mca_job, plain_job
from topoplan.trainers.swift import megatron_job, sft_job

CODECS: Mapping[str, Codec] = {
    "mca": mca_job.CODEC,
    "plain": plain_job.CODEC,
    "swift-megatron": megatron_job.CODEC,
    "swift": sft_job.CODEC,
    "deepspeed": deepspeed_alone.CODEC,
}
"""What trains with LLaMA-Factory, or the trainer of a configuration -> its codec."""


def codec_of(configuration: Configuration, setup: Setup) -> Codec | None:
    """The codec of a configuration; None for a trainer that is not predicted."""
    return CODECS.get(setup.path_of(configuration) or configuration.trainer)


def codec_for(trainer: str, backend: str) -> Codec | None:
    """The codec of the files that are written for a trainer and a backend; None where they are not read."""
    megatron, data = {"llamafactory": ("mca", "plain"), "swift": ("swift-megatron", "swift")}.get(trainer, ("", ""))
    return CODECS.get(megatron if backend in MEGATRON_BACKENDS else data)
