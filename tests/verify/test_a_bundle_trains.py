"""Run a bundle as `topoplan generate` writes it: real torchrun, LLaMA-Factory's launcher and trainer, over Gloo.

No GPU is needed, so LLaMA-Factory's plain trainer runs instead of the Megatron one. The only changes for this are
`env: {USE_MCA: "0"}` in the spec, `on_the_cpu`, which rewrites train.yaml, and empty packages in place of Megatron
packages that are not installed, because the scripts look for them. The scripts run as they are written.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.bundle.nodes import Machine, Nodes, nodes, two_machines, wait_until
from tests.verify.llamafactory import ROOT, need_llamafactory
from topoplan.specs.load import load_spec
from topoplan.specs.passed_on import HIJACKERS
from topoplan.trainers.llamafactory.key_list import known_keys

pytestmark = [
    pytest.mark.verify,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]

MODEL = "Qwen/Qwen3-0.6B"
"""The model of the spec; the nodes have a tiny one in its place."""

# Imported when Python starts, so that every rank records what it was started with.
REPORTER = """
import json, os, pathlib, sys

if "RANK" in os.environ and "llamafactory.launcher" in sys.orig_argv:
    seen = {"argv": sys.orig_argv, "cwd": os.getcwd(), "env": dict(os.environ)}
    pathlib.Path(os.environ["REPORTS"], os.environ["RANK"] + ".json").write_text(json.dumps(seen))
"""


def on_the_cpu(train_yaml: Path) -> None:
    """Remove the keys of mcore_adapter and those that need a GPU, so that the plain trainer accepts the file."""
    values = yaml.safe_load(train_yaml.read_text(encoding="utf-8"))
    plain = {key: value for key, value in values.items() if known_keys()[key].package != "mcore_adapter"}
    text = yaml.safe_dump(plain | {"bf16": False, "use_cpu": True}, allow_unicode=True)
    train_yaml.write_text(text, encoding="utf-8")


def make_model(folder: Path, config: Any = None) -> None:
    """Write a Qwen3 of 0.2M random parameters, or the config's model, and a tokenizer of 256 bytes and 3 tokens."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = [*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.add_special_tokens(marks)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = config or transformers.Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_data(folder: Path, samples: int = 20) -> None:
    folder.mkdir(parents=True)
    rows = [{"instruction": f"Count to {n}.", "input": "", "output": "one two three"} for n in range(samples)]
    (folder / "tiny.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "tiny.jsonl"}}), encoding="utf-8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_llamafactory()
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_model(folder)
    return folder


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Nodes]:
    with nodes(tmp_path / "run") as running:
        (running.folder / "sitecustomize.py").write_text(REPORTER)
        (running.folder / "reports").mkdir()
        for package in ("mcore_adapter", "transformer_engine"):
            # Installed, not only on this process's path: a script starts with its own environment.
            if package not in importlib.metadata.packages_distributions():
                (running.folder / package).mkdir()
                (running.folder / package / "__init__.py").touch()
        yield running


@pytest.fixture
def pair() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as machines:
        yield machines


def make_spec(path: Path, model: str | Path, hosts: list[dict[str, Any]], **job: Any) -> Path:
    """Return a spec with two GPUs per node."""
    spec = {
        "name": f"test-{uuid.uuid4().hex}",  # determines the port, which must be free when such tests run in parallel
        "nodes": max(1, len(hosts)),
        "gpus_per_node": 2,
        "gpu": "h100-sxm-80gb",
        "nvlink_bandwidth": "900GB/s",
        "ib_bandwidth": "400Gb/s",
        "nics_per_node": 2,
        "cpu_cores": 2,
        "hosts": hosts or None,
        "env": {"USE_MCA": "0", "TINY": "a 'b' \"c\" $d"},
        "model": str(model),
        "job": {
            "seq_len": 128,
            "global_batch_size": 4,
            "learning_rate": 5e-3,
            "packing": False,
            "dataset": "tiny",
            "samples": 20,
            "epochs": 2,
            "pin": {"tp": 1, "pp": 1, "cp": 1},  # the plain trainer only splits data
            **job,
        },
    }
    path.write_text(yaml.safe_dump(spec, allow_unicode=True), encoding="utf-8")
    return path


def two_node_spec(root: Path, model: Path, machines: tuple[Machine, ...], **job: Any) -> Path:
    """Return a spec of two nodes with separate working directories, each with the model where README.md puts it."""
    hosts = []
    for node, machine in enumerate(machines):
        workdir = root / f"node {node}"
        (workdir / "models" / MODEL).parent.mkdir(parents=True)
        (workdir / "models" / MODEL).symlink_to(model)
        make_data(workdir / "data")
        hosts.append(
            {
                "address": machine.address,
                "workdir": str(workdir),
                "venv": sys.prefix,
                "socket_interface": machine.interface,
            }
        )
    return make_spec(root / "spec.yaml", MODEL, hosts, **job)


def generate(spec: Path, bundle: Path) -> str:
    """Write the bundle, and return the name of the run."""
    command = [sys.executable, "-m", "topoplan", "generate", str(spec), "--output", str(bundle)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    on_the_cpu(bundle / "train.yaml")
    return str(json.loads((bundle / "plan.json").read_text())["run"])


def environment(running: Nodes) -> Mapping[str, str]:
    """Return an environment with variables that an earlier job may have left, and those of the test."""
    return dict.fromkeys(HIJACKERS, "7") | {
        "PYTHONPATH": str(running.folder),
        "REPORTS": str(running.folder / "reports"),
        "HF_HUB_OFFLINE": "1",
        "DISABLE_VERSION_CHECK": "1",
        "TOPOPLAN_ANY_VERSIONS": "1",  # the packages of the Megatron trainer
        "PATH": os.pathsep.join([f"{sys.prefix}/bin", os.environ["PATH"]]),
    }


def steps_in(log: Path) -> list[dict[str, Any]]:
    """Return the lines of LLaMA-Factory's own log that have a loss: one per optimizer step."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [line for line in lines if "loss" in line]


def test_two_nodes_train_one_model_as_it_was_planned(
    launched: Nodes, pair: tuple[Machine, Machine], model: Path, tmp_path: Path
) -> None:
    spec = two_node_spec(tmp_path, model, pair)
    bundle = tmp_path / "bundle"
    run = generate(spec, bundle)
    env = environment(launched)
    started = [launched.start(bundle / f"node-0{node}.sh", machine=pair[node], env=env) for node in range(2)]
    assert [(one.wait(), one.text[-4000:]) for one in started if one.wait()] == []

    port = json.loads((bundle / "hosts.json").read_text())["master"]["port"]
    for rank in range(4):
        node, local = divmod(rank, 2)
        seen = json.loads((launched.folder / "reports" / f"{rank}.json").read_text())
        assert seen["argv"][-3:] == ["-m", "llamafactory.launcher", f"{bundle}/train.yaml"]
        assert seen["cwd"] == str(tmp_path / f"node {node}")
        expected = {
            "RANK": f"{rank}",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": f"{local}",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": f"{node}",
            "MASTER_ADDR": pair[0].address,
            "MASTER_PORT": f"{port}",
            "GLOO_SOCKET_IFNAME": pair[0].interface,
            "OMP_NUM_THREADS": "1",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            **load_spec(spec).cluster.env,
        }
        assert {key: seen["env"].get(key) for key in expected} == expected
        assert not {"NNODES", "NODE_RANK", "NPROC_PER_NODE", "FORCE_TORCHRUN", "RDZV_ID"} & seen["env"].keys()
        # LLaMA-Factory describes its process group only in the log of each rank.
        logs = [*(tmp_path / f"node {node}" / "logs" / run / f"node-0{node}").rglob(f"{local}/std*.log")]
        assert len(logs) == 2
        assert f"Process rank: {rank}, world size: 4," in "".join(path.read_text() for path in logs)

    saved = tmp_path / "node 0" / "saves" / run
    steps = steps_in(saved / "trainer_log.jsonl")
    assert [step["current_steps"] for step in steps] == [*range(1, 11)]  # 20 samples / 4 * 2 epochs
    assert "| the whole job | 10 steps," in (bundle / "README.md").read_text(encoding="utf-8")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert (saved / "model.safetensors").exists()
    assert [one.left() for one in started] == [{}, {}]


def test_one_node_trains_whatever_its_directories_are_called(launched: Nodes, model: Path, tmp_path: Path) -> None:
    odd = "训练 'a' \"b\" $(c) `d` & e"
    # A model given by its path is found at the same path on the node.
    (tmp_path / f"model {odd}").symlink_to(model)
    keys = {"dataset_dir": f"data {odd}", "trainer": {"output_dir": f"out/{odd}"}}
    spec = make_spec(tmp_path / "spec.yaml", tmp_path / f"model {odd}", [], **keys)
    bundle = tmp_path / odd
    generate(spec, bundle)
    # Without hosts, the working directory is that of the bundle.
    make_data(bundle / f"data {odd}")
    started = launched.start(bundle / "node-00.sh", env=environment(launched))
    assert started.wait() == 0, started.text[-4000:]
    assert len(steps_in(bundle / "out" / odd / "trainer_log.jsonl")) == 10
    assert {path.name for path in (launched.folder / "reports").iterdir()} == {"0.json", "1.json"}


def test_ranks_that_raise_end_the_scripts_of_both_nodes(
    launched: Nodes, pair: tuple[Machine, Machine], model: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    generate(two_node_spec(tmp_path, model, pair), bundle)
    (tmp_path / "node 1" / "data" / "tiny.jsonl").unlink()
    env = environment(launched)
    started = [launched.start(bundle / f"node-0{node}.sh", machine=pair[node], env=env) for node in range(2)]
    assert [one.wait() for one in started] == [1, 1]
    assert "ValueError: File data/tiny.jsonl not found." in started[1].text
    assert [one.left() for one in started] == [{}, {}]


def test_sigterm_to_one_script_ends_its_ranks_and_the_rest_of_the_job(
    launched: Nodes, pair: tuple[Machine, Machine], model: Path, tmp_path: Path
) -> None:
    spec = two_node_spec(tmp_path, model, pair, epochs=10_000)
    bundle = tmp_path / "bundle"
    run = generate(spec, bundle)
    env = environment(launched)
    started = [launched.start(bundle / f"node-0{node}.sh", machine=pair[node], env=env) for node in range(2)]
    log = tmp_path / "node 0" / "saves" / run / "trainer_log.jsonl"
    wait_until("it trains", lambda: steps_in(log), started)
    started[0].process.terminate()
    assert started[0].wait() != 0
    assert started[0].left() == {}
    assert started[1].wait() != 0
    assert started[1].left() == {}
