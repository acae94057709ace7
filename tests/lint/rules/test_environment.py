"""Verdicts on environment variables."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from tests.bundle.samples import CLUSTER, HOSTS, make_spec_and_plan
from tests.reading.setups import fixed, rules_of, setup_of
from topoplan.bundle.bundle import generate
from topoplan.bundle.write import write_bundle
from topoplan.lint.rules.environment import findings
from topoplan.reading.finding import Finding
from topoplan.reading.read_setup import read_setup
from topoplan.trainers.recognisers import recognisers


def found(text: str) -> dict[str, Finding]:
    return rules_of(findings, setup_of(text + "\n"))


def test_a_variable_that_another_line_goes_on_in_is_left_where_it_is() -> None:
    assert found('[ -n "$A" ] && \\\n  export NCCL_P2P_DISABLE=1\nb')["env-nccl-debugging"].edits == ()
    assert found("[ -n a ] &&\n  export NCCL_P2P_DISABLE=1\nb")["env-nccl-debugging"].edits == ()
    assert found("A=1 \\\nNCCL_P2P_DISABLE=1 \\\n  torchrun b.py")["env-nccl-debugging"].edits


@pytest.mark.parametrize(
    ("value", "missing"), [("Tree", True), ("tree,nvls", True), ("ring,tree", False), ("^nvls", False)]
)
def test_algorithms_without_ring_fail_where_ring_is_the_only_one(value: str, missing: bool) -> None:
    assert ("leaves out ring" in found(f"export NCCL_ALGO={value}")["env-nccl-debugging"].what) is missing


@pytest.mark.parametrize(
    ("variable", "rule", "severity"),
    [
        ("NCCL_IB_DISABLE=0", "env-nccl-default", "note"),
        ("NCCL_IB_DISABLE=1", "env-nccl-ib-disable", "warning"),
        ("NCCL_NET_GDR_LEVEL=5", "env-nccl-integer-level", "warning"),
        ("NCCL_NET_GDR_LEVEL=PHB", "env-nccl-debugging", "warning"),
        ("NCCL_P2P_LEVEL=3", "env-nccl-integer-level", "warning"),
        ("NCCL_P2P_DISABLE=1", "env-nccl-debugging", "warning"),
        ("NCCL_IB_GID_INDEX=3", "env-nccl-gid-index", "warning"),
        ("NCCL_IB_TIMEOUT=22", "env-nccl-ib-timeout", "note"),
        ("NCCL_IB_TIMEOUT=0", "env-nccl-ib-timeout", "warning"),
        ("NCCL_ALGO=Ring", "env-nccl-debugging", "warning"),
        ("NCCL_ALGO=^NVLS", "env-nccl-debugging", "warning"),
        ("NCCL_PXN_DISABLE=1", "env-nccl-debugging", "warning"),
        ("NCCL_DEBUG=INFO", "env-nccl-log", "note"),
        ("NCCL_ASYNC_ERROR_HANDLING=1", "env-renamed", "warning"),
        ("NCCL_SOCKET_IFNAME=eth0", "env-nccl-socket-prefix", "note"),
        ("NCCL_IB_HCA=mlx5_1", "env-nccl-hca-prefix", "warning"),
        ("GLOO_SOCKET_IFNAME==eth0", "env-gloo-interface", "error"),
        ("ALLOW_EXTRA_ARGS=1", "env-allow-extra-args", "warning"),
        ("FI_EFA_USE_DEVICE_RDMA=1", "env-efa-default", "note"),
        ("FI_PROVIDER=efa", "env-efa-default", "note"),
        ("NCCL_IB_PCI_RELAXED_ORDERING=1", "env-nccl-default", "note"),
        ("DISABLE_VERSION_CHECK=1", "env-version-check", "note"),
        ("CUDA_LAUNCH_BLOCKING=1", "env-cuda-launch-blocking", "warning"),
        ("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128", "env-allocator-split", "note"),
    ],
)
def test_each_variable_gets_its_verdict(variable: str, rule: str, severity: str) -> None:
    ((name, finding),) = found(f"export {variable}").items()
    assert (name, finding.severity, finding.line) == (rule, severity, 1)


@pytest.mark.parametrize(
    "variable",
    [
        "NCCL_DEBUG=WARN",
        "NCCL_SOCKET_IFNAME==eth0",
        "NCCL_SOCKET_IFNAME=^docker,lo",
        "NCCL_SOCKET_IFNAME=$INTERFACE",
        "NCCL_IB_HCA==mlx5_1,mlx5_2",
        "NCCL_IB_HCA=mlx5",
        "NCCL_IB_DISABLE=$OFF",
        "NCCL_NET_PLUGIN=none",
        "NCCL_IB_TC=106",
        "NCCL_IB_SL=3",
        "NCCL_TOPO_FILE=/opt/microsoft/ndv5-topo.xml",
        "OFI_NCCL_PROTOCOL=RDMA",
        "GLOO_SOCKET_IFNAME=eth0",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "OMP_NUM_THREADS=8",
        "CUDA_DEVICE_MAX_CONNECTIONS=1",
        "TOKENIZERS_PARALLELISM=false",
        "ALLOW_EXTRA_ARGS=0",
    ],
)
def test_what_is_right_or_not_known_gives_nothing(variable: str) -> None:
    assert found(f"export {variable}") == {}


def test_the_fix_takes_the_line_out_or_sets_another_value() -> None:
    text = "export A=1\nexport NCCL_ALGO=Ring # faster\nexport NCCL_DEBUG=INFO\ntorchrun a.py\n"
    rules = found(text)
    assert "NCCL_ALGO" not in fixed(rules["env-nccl-debugging"])
    assert "export NCCL_DEBUG=WARN" in fixed(rules["env-nccl-log"])
    assert found("export NCCL_ALGO=Ring A=1")["env-nccl-debugging"].edits == ()


def test_what_googles_profile_sets_is_left_alone() -> None:
    """Its plugin ends a run in which one of them is missing or has another value."""
    profile = [
        "NCCL_SOCKET_IFNAME=eth0",
        "NCCL_CROSS_NIC=0",
        "NCCL_ALGO=Ring,Tree",
        "NCCL_PROTO=Simple,LL128",
        "NCCL_MIN_NCHANNELS=4",
        "NCCL_P2P_NET_CHUNKSIZE=524288",
        "NCCL_BUFFSIZE=8388608",
        "NCCL_NET_GDR_LEVEL=PIX",
        "NCCL_NVLS_ENABLE=0",
    ]
    lines = "\n".join(f"export {one}" for one in profile)
    assert found(f"{lines}\nexport NCCL_FASTRAK_NUM_FLOWS=2") == {}
    assert found(f"{lines}\nexport NCCL_GPUDIRECTTCPX_CTRL_DEV=eth0") == {}
    assert "env-nccl-debugging" in found("export NCCL_BUFFSIZE=8388608")
    assert "env-nccl-ib-disable" in found(f"{lines}\nexport NCCL_FASTRAK_NUM_FLOWS=2 NCCL_IB_DISABLE=1")


def test_loopback_between_nodes_is_an_error() -> None:
    text = "export NCCL_SOCKET_IFNAME=lo\ntorchrun --nnodes 2 --node_rank 0 --master_addr h a.py"
    assert found(text)["env-nccl-socket-interface"].severity == "error"


def test_a_token_in_a_file_is_named_and_never_shown() -> None:
    secret = "hf_abcdefghijklmnop"
    ((rule, finding),) = found(f"export HF_TOKEN={secret}").items()
    assert rule == "env-secret"
    assert secret not in f"{finding.what}{finding.why}{finding.remedy}{finding.edits}"
    assert found("export HF_TOKEN=$TOKEN WANDB_API_KEY=<your key> MS_TOKEN=your_token_here") == {}


def test_other_names_and_values_are_known_for_secrets_too() -> None:
    for text in ("OPENAI_KEY=abcdefghij", "https_proxy=http://me:hunter22@proxy:1", "X=ghp_" + "a" * 36):
        assert set(found(f"export {text}")) == {"env-secret"}
    assert found("export https_proxy=http://proxy:3128 CACHE_KEY=abcdefghij HF_TOKEN_PATH=/etc/hf_token") == {}


def test_every_verdict_in_the_data_can_be_told_and_has_a_source() -> None:
    catalog = json.loads(files("topoplan.catalog").joinpath("environment_variables.json").read_text(encoding="utf-8"))
    cases = [case for cases in catalog["variables"].values() for case in cases]
    for case in [*cases, catalog["debugging"]]:
        re.compile(case.get("pattern", ""))
        assert case["severity"] in ("error", "warning", "note")
        assert case["source"]
        assert "{" not in case["what"].format(name="N", value="V")
        assert case["remedy"]
    assert not set(catalog["debugging"]["names"]) & set(catalog["variables"])


def test_bundles_of_topoplan_give_nothing(tmp_path: Path) -> None:
    from dataclasses import replace

    from topoplan.specs.cluster import Fabric

    assert list(findings(read_setup(["generated/h100-4x8"], recognisers()))) == []
    for name, cluster in {
        "hosts": replace(CLUSTER, hosts=HOSTS),
        "ethernet": replace(CLUSTER, fabric=Fabric(kind="ethernet")),
        "roce": replace(CLUSTER, fabric=Fabric(kind="roce", traffic_class=106, service_level=3)),
        "efa": replace(CLUSTER, fabric=Fabric(kind="efa")),
        "tcpxo": replace(CLUSTER, hosts=HOSTS, fabric=Fabric(kind="tcpxo")),
        "topology": replace(CLUSTER, fabric=Fabric(topology_file="/opt/microsoft/ndv5-topo.xml")),
    }.items():
        spec, plan = make_spec_and_plan(cluster=cluster)
        write_bundle(generate(spec, plan), tmp_path / name)
        assert list(findings(read_setup([str(tmp_path / name)], recognisers()))) == []
