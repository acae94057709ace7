"""A GPU of a new architecture, as docs/extending.md adds one: a row of `gpus.json` and an entry of `profiles.json`."""

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, cli
from tests.shipped import graded
from topoplan import catalog
from topoplan.planner.bands import earned_bands, profiles_text
from topoplan.specs import known
from topoplan.specs.constants import CONSTANTS
from topoplan.specs.forms import schema_of_spec
from topoplan.specs.gpu_profile import profile_of

__all__ = ["cli"]

CARD, ARCHITECTURE, KIN = "z1-sxm-192gb", "zeta", "hopper"
SPEC = """\
nodes: 2
gpus_per_node: 2
nvlink_bandwidth: 900GB/s
ib_bandwidth: 400Gb/s
nics_per_node: 8
gpu: {gpu}
model: Qwen/Qwen3-0.6B
job: {{seq_len: 2048, global_batch_size: 8, template: qwen3}}
"""
OWN_CARD = f"{{name: a-card, architecture: {ARCHITECTURE}, memory: 96GiB, memory_bandwidth: 4TB/s, bf16_tflops: 900}}"


def _forget() -> None:
    for kept in (known.gpu, profile_of):
        kept.cache_clear()


@pytest.fixture(autouse=True)
def new_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add a card and an architecture to the catalog, with all constants inherited."""
    load = catalog.load

    @lru_cache(maxsize=8)
    def loaded(*path: str) -> Any:
        table = {**load(*path)}
        if path == ("gpus.json",):
            table[CARD] = {**table["h100-sxm-80gb"], "architecture": ARCHITECTURE, "driver_names": ["Z1"]}
        elif path == ("profiles.json",):
            table[ARCHITECTURE] = {
                "date": "2026-11-22",
                "kin": KIN,
                "constants": {key: {"kin": KIN} for key in table[KIN]["constants"]},
                "bands": table[KIN]["bands"],
            }
        return table

    monkeypatch.setattr(catalog, "load", loaded)
    _forget()
    yield
    monkeypatch.undo()
    _forget()


def answer(cli: Cli, verb: str, gpu: str, folder: Path, *options: str) -> dict[str, Any]:
    spec = folder / "cluster.yaml"
    spec.write_text(SPEC.format(gpu=gpu))
    result = cli(verb, spec, "--json", *options)
    assert result.code == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


@pytest.mark.parametrize("backend", ["mca", "megatron", "ddp", "deepspeed", "fsdp2"])
def test_every_backend_plans_for_it_as_for_its_kin(cli: Cli, tmp_path: Path, backend: str) -> None:
    options = ("--backend", backend)
    new, known = (answer(cli, "rank", gpu, tmp_path, *options)["plans"] for gpu in (CARD, "h100-sxm-80gb"))
    assert new
    for ours, theirs in zip(new, known, strict=True):
        assert (ours["id"], ours["time"]["step_s"]) == (theirs["id"], theirs["time"]["step_s"])
        assert ours["memory"]["device_gib"] == theirs["memory"]["device_gib"]
    assert answer(cli, "explain", CARD, tmp_path, *options)["plan"]["id"] == new[0]["id"]


@pytest.mark.parametrize("backend", ["mca", "fsdp2"])
def test_a_gpu_block_may_name_its_architecture(cli: Cli, tmp_path: Path, backend: str) -> None:
    assert answer(cli, "rank", OWN_CARD, tmp_path, "--backend", backend)["plans"]
    assert answer(cli, "explain", OWN_CARD, tmp_path, "--backend", backend)["schema"]


@pytest.mark.parametrize("backend", ["mca", "megatron", "deepspeed", "fsdp2"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_its_bundle_is_written_or_refused_in_a_sentence(cli: Cli, tmp_path: Path, backend: str, precision: str) -> None:
    spec = tmp_path / "cluster.yaml"
    spec.write_text(SPEC.format(gpu=CARD))
    to = ("-o", tmp_path / "bundle", "--backend", backend, "--set", f"precision={precision}")
    result = cli("generate", spec, *to)
    assert result.code == (0 if precision == "bf16" else 2), result.err
    assert result.code == 0 or "fp8" in result.err


def test_a_user_may_give_any_of_its_constants(cli: Cli, tmp_path: Path) -> None:
    own = tmp_path / "z1.yaml"
    own.write_text(f"gpu: {ARCHITECTURE}\nnvls_inside_channels: 0\neager_memory_share: 1\n")
    path = ("--profile", str(own), "--backend", "fsdp2", "--top", "1")
    ours, theirs = answer(cli, "rank", CARD, tmp_path, *path), answer(cli, "rank", CARD, tmp_path, *path[2:])
    assert ours["plans"][0]["time"]["step_s"] < theirs["plans"][0]["time"]["step_s"]


def test_the_list_of_architectures_is_that_of_the_profiles(cli: Cli, tmp_path: Path) -> None:
    assert catalog.architectures()[-1] == ARCHITECTURE
    schema = schema_of_spec()["$defs"]["GpuForm"]["properties"]["architecture"]
    assert schema["enum"] == list(catalog.architectures())
    spec = tmp_path / "cluster.yaml"
    spec.write_text(SPEC.format(gpu=OWN_CARD.replace(ARCHITECTURE, "zetta")))
    refused = cli("rank", spec)
    assert (refused.code, "did you mean 'zeta'?" in refused.err) == (2, True)


def test_every_constant_says_whose_it_is(cli: Cli) -> None:
    shown = json.loads(cli("profile", CARD, "--json").out)
    assert [number["name"] for number in shown["constants"]] == list(CONSTANTS)
    assert {number["kind"] for number in shown["constants"]} == {"kin"}


def test_its_bands_are_its_kins_widened_until_runs_are_measured() -> None:
    bands = {(band.entry, band.key): band for band in earned_bands(graded().figures)}
    new, known = bands[ARCHITECTURE, "memory_band"], bands[KIN, "memory_band"]
    assert (new.figures, new.value) == (0, 2 * known.value)
    assert json.loads(profiles_text(tuple(bands.values())))[ARCHITECTURE]["bands"]["memory_band"]["value"] == new.value
