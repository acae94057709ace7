"""Launches that do not start what is meant: what the three launch_*rules modules find together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bundle.samples import CLUSTER, HOSTS, ONE_NODE, make_spec_and_plan
from tests.reading.setups import fixed, rules_of, setup_of
from topoplan.bundle.bundle import generate
from topoplan.bundle.write import write_bundle
from topoplan.lint.rules import launch, launch_megatron, launch_nodes
from topoplan.reading.finding import Finding
from topoplan.reading.read_setup import read_setup
from topoplan.reading.setup import Setup
from topoplan.trainers.recognisers import recognisers

MEGATRON = "model_name_or_path: a\nstage: sft\ntensor_model_parallel_size: 2\n"
PLAIN = "model_name_or_path: a\nstage: sft\n"


def findings(setup: Setup) -> Iterator[Finding]:
    for module in (launch, launch_nodes, launch_megatron):
        yield from module.findings(setup)


def found(text: str, **others: str) -> dict[str, Finding]:
    return rules_of(findings, setup_of(text + "\n", **others))


RIGHT = [
    "NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 llamafactory-cli train a.yaml",
    "llamafactory-cli train a.yaml learning_rate=1e-5",
    "torchrun --nnodes 2 --node_rank 1 --master_addr 10.0.0.1 --master_port 29500 -m llamafactory.launcher a.yaml",
    "torchrun --nnodes 2 --node_rank $RANK --master_addr $MASTER_ADDR a.py",
    "torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint host:29400 a.py",
    "torchrun --standalone --nproc_per_node 8 a.py",
    "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 --no_python swift sft --model a",
    "NPROC_PER_NODE=8 NNODES=2 NODE_RANK=0 MASTER_ADDR=127.0.0.1 swift sft --model a",
    "torchrun --nproc_per_node 8 $(which swift) sft --model a",
    "accelerate launch --num_processes 8 a.py --x 1",
    "deepspeed --num_gpus 8 a.py --deepspeed ds.json",
    "torchrun --nnodes ${NNODES:-2} --master_addr ${MASTER_ADDR:-localhost} a.py",
    "source env.sh\nNNODES=2 llamafactory-cli train a.yaml",
    "torchrun --master_port 1 a.py &\ntorchrun --master_port 2 b.py &\nwait",
]


@pytest.mark.parametrize("text", RIGHT)
def test_right_launches_give_nothing(text: str) -> None:
    assert found(text) == {}


WRONG = [
    ("torchrun --nproc_per_node 8 llamafactory-cli train a.yaml", "launch-nested-torchrun", "error"),
    ("accelerate launch llamafactory-cli train a.yaml", "launch-nested-torchrun", "error"),
    ("NPROC_PER_NODE=8 torchrun --no_python swift sft --model a", "launch-nested-torchrun", "error"),
    ("torchrun --nproc_per_node 8 swift sft --model a", "launch-command-run-by-python", "error"),
    ("torchrun --no_python -m pkg.train", "launch-no-python-module", "error"),
    ("torchrun --nproc_pre_node 8 a.py", "launch-unknown-option", "error"),
    ("python -m torch.distributed.launch --use_env a.py", "launch-deprecated-module", "note"),
    ("torchrun -m llamafactory.launcher train a.yaml", "launch-train-word", "error"),
    ("llamafactory-cli a.yaml", "launch-train-word", "error"),
    ("NPROC_PER_NODE=8 python -m llamafactory.launcher a.yaml", "launch-single-process", "error"),
    ("NNODES=2 RANK=1 MASTER_ADDR=h MASTER_PORT=1 llamafactory-cli train a.yaml", "launch-rank-variable", "error"),
    ("WORLD_SIZE=2 RANK=1 MASTER_ADDR=h llamafactory-cli train a.yaml", "launch-rank-variable", "error"),
    ("torchrun --nnodes 2 --master_addr h a.py", "launch-missing-node-rank", "error"),
    ("torchrun --nnodes 2 --node_rank 0 a.py", "launch-missing-master-address", "error"),
    ("NNODES=2 NODE_RANK=0 MASTER_ADDR=h llamafactory-cli train a.yaml", "launch-missing-master-port", "error"),
    ("NNODES=2 NODE_RANK=0 MASTER_PORT=1 swift sft --model a", "launch-missing-master-address", "warning"),
    ("torchrun --nnodes 2 --node_rank 2 --master_addr h a.py", "launch-node-rank-too-high", "error"),
    ("torchrun --nnodes 2 --node_rank 1 --master_addr localhost a.py", "launch-local-master-address", "error"),
    ("torchrun --nnodes 2 --node_rank 1 --master_addr '<ip>' a.py", "launch-placeholder-address", "warning"),
    ("torchrun --nnodes 2 --node_rank 1 --master_addr 主节点IP a.py", "launch-placeholder-address", "warning"),
    ("torchrun --nnodes 2 --rdzv_backend c10d --node_rank 1 a.py", "launch-node-rank-ignored", "warning"),
    ("RDZV_ID=a NODE_RANK=1 llamafactory-cli train a.yaml", "launch-node-rank-ignored", "warning"),
    ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 4 a.py", "launch-process-count", "error"),
    ("CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=1 llamafactory-cli train a.yaml", "launch-process-count", "warning"),
    ("NODE_RANK=1 deepspeed --num_gpus 8 a.py", "launch-deepspeed-variables", "warning"),
    ("llamafactory-cli train a.yaml --seed 1", "launch-dashed-override", "error"),
    (
        "USE_MCA=1 llamafactory-cli train --stage sft --model_name_or_path a --recompute_method block",
        "launch-recompute-method",
        "error",
    ),
    ("llamafactory-cli train 'my jobs/a.yaml'", "launch-spaces-in-argument", "error"),
    ("sudo llamafactory-cli train a.yaml", "launch-sudo", "warning"),
    ("ssh host 'llamafactory-cli train jobs/a.yaml'", "launch-relative-path", "warning"),
    (
        "PYTORCH_CUDA_ALLOC_CONF=garbage_collection_threshold:0.8 llamafactory-cli train a.yaml",
        "launch-allocator-overwritten",
        "warning",
    ),
    ("torchrun a.py &\ntorchrun b.py &", "launch-same-port", "error"),
    (
        "torchrun --nnodes 2 --node_rank 0 --master_addr h a.py\n" * 2,
        "launch-same-node-rank",
        "warning",
    ),
    (
        "export CUDA_DEVICE_MAX_CONNECTIONS=1\naccelerate launch --use_fsdp a.py",
        "launch-max-connections",
        "warning",
    ),
]


@pytest.mark.parametrize(("text", "rule", "severity"), WRONG)
def test_each_fault_is_found_alone(text: str, rule: str, severity: str) -> None:
    rules = found(text)
    assert {name: finding.severity for name, finding in rules.items()} == {rule: severity}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "torchrun \\\n  --nnodes=2 --node_rank=0 --master_addr h \\\n$(which llamafactory-cli) train a.yaml seed=1",
            "torchrun \\\n  --nnodes=2 --node_rank=0 --master_addr h \\\n-m llamafactory.launcher a.yaml seed=1",
        ),
        (
            "torchrun --nproc_per_node 8 swift sft --model a",
            "torchrun --nproc_per_node 8 --no_python swift sft --model a",
        ),
        ("torchrun -m llamafactory.launcher train a.yaml", "torchrun -m llamafactory.launcher a.yaml"),
        (
            "NNODES=2 RANK=1 MASTER_ADDR=h MASTER_PORT=1 llamafactory-cli train a.yaml",
            "NNODES=2 NODE_RANK=1 MASTER_ADDR=h MASTER_PORT=1 llamafactory-cli train a.yaml",
        ),
        (
            "export NNODES=2 NODE_RANK=0 MASTER_ADDR=h\nllamafactory-cli train a.yaml",
            "export MASTER_PORT=29500 NNODES=2 NODE_RANK=0 MASTER_ADDR=h\nllamafactory-cli train a.yaml",
        ),
        ("llamafactory-cli train a.yaml --seed 1 --lr=2", "llamafactory-cli train a.yaml seed=1 lr=2"),
    ],
)
def test_the_fix_removes_the_fault_and_makes_no_other(text: str, expected: str) -> None:
    ((_, finding),) = found(text).items()
    assert fixed(finding).rstrip("\n") == expected
    assert found(expected) == {}


def test_megatron_keys_need_use_mca() -> None:
    rules = found("llamafactory-cli train a.yaml", a_yaml=MEGATRON)
    assert rules["launch-missing-use-mca"].severity == "error"
    assert fixed(rules["launch-missing-use-mca"]).startswith("export USE_MCA=1\nllamafactory-cli")
    assert found("llamafactory-cli train a.yaml", a_yaml=PLAIN) == {}
    assert set(found("USE_MCA=1 llamafactory-cli train a.yaml", a_yaml=PLAIN)) == {"launch-unused-use-mca"}


def test_an_export_is_only_added_where_the_launch_has_it() -> None:
    loop = found("for i in 1; do\n  llamafactory-cli train a.yaml\ndone", a_yaml=MEGATRON)["launch-missing-use-mca"]
    assert "do\n  export USE_MCA=1\n  llamafactory-cli" in fixed(loop)
    for text in ("pdsh -w b 'llamafactory-cli train a.yaml'", "cd b &&\nllamafactory-cli train a.yaml"):
        assert found(text, a_yaml=MEGATRON)["launch-missing-use-mca"].edits == ()
    assert "launch-missing-use-mca" not in found("tmux send-keys 'llamafactory-cli train a.yaml' C-m", a_yaml=MEGATRON)


def test_tensor_parallelism_under_megatron_wants_one_connection() -> None:
    rules = found("export USE_MCA=1\nllamafactory-cli train a.yaml", a_yaml=MEGATRON)
    assert set(rules) == {"launch-max-connections"}
    repaired = fixed(rules["launch-max-connections"])
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in repaired
    assert found(repaired, a_yaml=MEGATRON) == {}
    assert (
        "is 8"
        in found("export USE_MCA=1 CUDA_DEVICE_MAX_CONNECTIONS=8\nllamafactory-cli train a.yaml", a_yaml=MEGATRON)[
            "launch-max-connections"
        ].what
    )
    assert found("export USE_MCA=1\nllamafactory-cli train a.yaml", a_yaml=MEGATRON.replace("size: 2", "size: 1")) == {}


def test_bundles_of_topoplan_give_nothing(tmp_path: Path) -> None:
    assert list(findings(read_setup(["generated/h100-4x8"], recognisers()))) == []
    for name, cluster in {"hosts": replace(CLUSTER, hosts=HOSTS), "one": ONE_NODE, "none": CLUSTER}.items():
        spec, plan = make_spec_and_plan(cluster=cluster)
        write_bundle(generate(spec, plan), tmp_path / name)
        assert list(findings(read_setup([str(tmp_path / name)], recognisers()))) == []


def test_a_bundle_for_blackwell_is_right_without_one_connection(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(MEGATRON)
    (tmp_path / "node-00.sh").write_text("export USE_MCA=1\npython -m llamafactory.launcher a.yaml\n")
    setup = read_setup([str(tmp_path / "node-00.sh")], recognisers())

    assert "launch-max-connections" in [one.rule for one in findings(setup)]
    assert "launch-max-connections" not in [one.rule for one in findings(replace(setup, bundles=(tmp_path,)))]
