"""`topoplan check` on the command line."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Cli
from tests.reading.setups import FULL_YAML
from topoplan.bundle.bundle import generate
from topoplan.bundle.write import write_bundle
from topoplan.cli.main import main
from topoplan.layout.ids import layout_of_id
from topoplan.planner.predict import predict
from topoplan.specs.load import load_spec

CLUSTER = "cluster_specs/h100-4x8.yaml"


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.yaml"
    path.write_text(FULL_YAML)
    return path


def test_the_articles_scheme_is_told_what_to_change(cli: Cli, train: Path) -> None:
    result = cli("check", train, "--cluster", CLUSTER)

    assert "[plan-slower]" in result.out
    assert "remedy: set tensor_model_parallel_size: 2" in result.out
    assert result.err == ""


def test_keys_of_the_cluster_and_the_margin_count(cli: Cli, train: Path) -> None:
    small = cli("check", train, "--cluster", CLUSTER, "--set", "gpu=l40s-48gb", "--set", "nvlink_bandwidth=null")
    assert "l40s-48gb" in small.out
    tight = cli("check", train, "--cluster", "cluster_specs/a100-40g-4x8.yaml", "--margin", "40%")
    assert tight.code == 1
    assert "[plan-does-not-fit]" in tight.out


def test_a_cluster_can_be_said_in_options(cli: Cli, train: Path) -> None:
    said = " ".join(cli("check", train, "--gpu", "h100", "--nodes", "4").out.split())
    assert "on h100-sxm-80gb-4x8, 4 x 8 h100-sxm-80gb: " in said
    assert "- assumed, as usual for machines with h100-sxm-80gb: 8 GPUs per node, " in said


def test_rank_says_once_how_long_the_samples_of_a_file_are(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Path(CLUSTER).resolve()
    monkeypatch.chdir(tmp_path)
    Path("train.yaml").write_text(FULL_YAML.replace("Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-8B"))
    words = ("rank", cluster, "--job", "train.yaml", "--pin", "tp=4,pp=1", "--top", "1")
    assumed = "every sequence is assumed to be cutoff_len long"
    assert assumed in cli(*words).out
    said = cli(*words, "--set", "lengths={512: 1000, 1024: 300}").out
    assert "lengths: 1,300 samples" in said
    assert assumed not in said


INTERLEAVED = "tp1-pp4-vpp4-dp4-mbs1-sel-layernorm+moe_act-ends3+1"
OF_EXPERTS = ("--gpu", "h200", "--nodes", "2")
SOFTWARE = ("--set", 'software={megatron-core: "0.16.1"}')


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of ms-swift without interleaving, whose scripts take any supported megatron-core."""
    bundle = tmp_path_factory.mktemp("made") / "safe"
    job = ["--model", "Qwen/Qwen3-30B-A3B", "--seq-len", "8k", "--batch", "64", "--set", "dataset=org/d"]
    plan = ["--trainer", "swift", "--plan", "tp1-pp4-dp4-mbs1-sel-layernorm-ends12+10", "-o", str(bundle)]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["generate", *OF_EXPERTS, *job, *plan])
    return bundle


@pytest.fixture
def experts(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that bundle, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(made, "safe"))


def test_a_better_plan_has_its_risks_beside_it_and_a_bundle_the_commands_that_write_it(cli: Cli, experts: Path) -> None:
    said = " ".join(cli("check", experts, *OF_EXPERTS).out.split())
    assert f"{INTERLEAVED} instead of" in said
    assert "its risks: tight, caveat, unproven; vpp > 1 needs megatron-core >=0.18,<0.20, on Python 3.12" in said
    assert said.count("vpp > 1 needs") == 1
    assert "risk unproven tight, caveat, unproven" in said
    assert "virtual_pipeline_model_parallel_size" not in said
    words = said.split("remedy: `")[1].split("`")
    for command in (words[0], words[2]):
        result = cli(*shlex.split(command)[1:])
        assert result.code == 0, result.err
    assert f"Plan {INTERLEAVED}" in result.out
    document = json.loads(cli("check", experts, *OF_EXPERTS, "--json").out)
    (one,) = document["predictions"]
    assert one["tags_of_best"] == ["tight", "caveat", "unproven"]
    assert one["caveats_of_best"][0].startswith("vpp > 1 needs")


def test_a_version_of_a_script_is_not_said_to_be_that_of_the_spec(cli: Cli, train: Path) -> None:
    pipeline = "pipeline_model_parallel_size: 2\nvirtual_pipeline_model_parallel_size: 2\n"
    train.write_text(FULL_YAML.replace("pipeline_model_parallel_size: 1\n", pipeline))
    script = train.with_name("run.sh")
    script.write_text("pip install megatron-core==0.16.1\nexport USE_MCA=1\nllamafactory-cli train train.yaml\n")
    said = " ".join(cli("check", script, train, "--gpu", "h100", "--nodes", "4").out.split())
    assert "megatron-core 0.16.1 is installed here (vpp > 1)" in said
    assert "the hosts have 0.16.1" in said
    assert "of the spec has" not in said


@pytest.mark.parametrize("how", ["software", "pin"])
def test_the_best_plan_is_one_that_the_stated_versions_run(cli: Cli, experts: Path, how: str) -> None:
    (experts / "install.sh").write_text("pip install megatron-core==0.16.1\n")
    (one,) = json.loads(
        cli("check", experts / "train.yaml", *OF_EXPERTS, "--json", *SOFTWARE).out
        if how == "software"
        else cli("check", experts / "train.yaml", experts / "install.sh", *OF_EXPERTS, "--json").out
    )["predictions"]
    assert one["best"]["layout"]["vpp"] == 1
    assert one["caveats_of_best"] == []


def test_a_fault_that_the_versions_of_a_bundle_let_in_is_found_once_its_layout_is_edited(
    cli: Cli, experts: Path
) -> None:
    rule, pipeline = "fault-interleaving-frees-early", "pipeline_model_parallel_size: 4\n"
    assert rule not in cli("check", experts).out
    train = (experts / "train.yaml").read_text()
    split = "Et*3|(t*3|)*6t*4|t*4|(t*3|)*6tL"
    edited = train.replace(pipeline, f"{pipeline}virtual_{pipeline}").replace("Et*12|t*13|t*13|t*10L", split)
    (experts / "train.yaml").write_text(edited)
    for options, level in (((), "warning"), (OF_EXPERTS, "warning"), ((*OF_EXPERTS, *SOFTWARE), "error")):
        found = json.loads(cli("check", experts, *options, "--json").out)["findings"]
        assert [one["severity"] for one in found if one["rule"] == rule] == [level]
    newer = ("--set", 'software={megatron-core: "0.18.2"}')
    assert rule not in cli("check", experts, *OF_EXPERTS, *newer).out
    # The scripts of a bundle that was planned with interleaving refuse the affected versions.
    assert cli("init", "--from", experts, "-o", "spec.yaml").code == 0
    planned = load_spec("spec.yaml")
    layout = layout_of_id(INTERLEAVED, planned.model.num_layers) | {"backend": "megatron"}
    write_bundle(generate(planned, predict(planned, layout)), Path("new"))
    assert rule not in cli("check", "new").out


ZERO = "model_name_or_path: Qwen/Qwen2.5-32B-Instruct\nstage: sft\ndo_train: true\nfinetuning_type: full\n\
deepspeed: z3.json\ntemplate: qwen\ndataset: mine\ncutoff_len: 16384\noutput_dir: saves\nbf16: true\n\
per_device_train_batch_size: 2\ngradient_accumulation_steps: 2\n"


@pytest.fixture
def too_large(tmp_path: Path) -> list[Path]:
    """A job that does not fit on two nodes, and the script that starts it on them."""
    (tmp_path / "zero.yaml").write_text(ZERO)
    stage = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}
    batch = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    (tmp_path / "z3.json").write_text(json.dumps(stage | batch))
    script = "NNODES=2 NODE_RANK=0 MASTER_ADDR=a MASTER_PORT=29500 FORCE_TORCHRUN=1 llamafactory-cli train zero.yaml\n"
    (tmp_path / "run.sh").write_text(script)
    return [tmp_path / name for name in ("run.sh", "zero.yaml", "z3.json")]


def test_what_does_not_fit_is_told_the_least_change_and_the_next_command(cli: Cli, too_large: list[Path]) -> None:
    shown = cli("check", *too_large, "--gpu", "a100-sxm-80gb").out
    found = " ".join(shown.split())
    # The command says how many machines there are.
    assert "on a100-sxm-80gb-2x8, 2 x 8 a100-sxm-80gb" in found
    assert "launch-other-cluster" not in found
    assert "zero3-dp16-mbs1-full-liger fits on these GPUs: set per_device_train_batch_size: 1" in found
    assert "enable_liger_kernel: true" in found
    (following,) = [line for line in shown.splitlines() if line.startswith("Next  topoplan generate ")]
    assert "--gpu a100-sxm-80gb --nodes 2 --job" in following
    words = following.split()[2:]
    assert cli(*words, "-o", too_large[0].parent / "bundle").code == 0


def test_a_command_for_other_machines_than_the_options_name_is_found(cli: Cli, train: Path, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"NNODES=2 NODE_RANK=0 MASTER_ADDR=a MASTER_PORT=29500 FORCE_TORCHRUN=1 llamafactory-cli train {train.name}\n"
    )
    assert "[launch-other-cluster]" in cli("check", script, train, "--gpu", "h100", "--nodes", "4").out


ON_MEGATRON = (
    "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\ndo_train: true\ndataset: mine\ntemplate: qwen3_nothink\n"
    "cutoff_len: 4096\noutput_dir: a\nbf16: true\ntensor_model_parallel_size: 8\n"
)
SWIFT_MEGATRON = (
    "NNODES=2 NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --dataset /data/a.jsonl --micro_batch_size 1"
    " --global_batch_size 64 --tensor_model_parallel_size 16"
)

ON_DEEPSPEED = (
    "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen3-8B --dataset /data/a.jsonl --tuner_type full --deepspeed zero3"
    " --torch_dtype bfloat16 --gradient_accumulation_steps 8\n"
)


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        # Nothing of the layout counts: one that the GPUs do not divide into, or that no plan may have.
        (
            "run.sh",
            SWIFT_MEGATRON + " --pipeline_model_parallel_size 3 --max_length 4096\n",
            ("--gpu", "h100", "--nodes", "2"),
        ),
        # The data set is on the nodes alone, and the length of samples comes from an option.
        ("run.sh", ON_DEEPSPEED, ("--gpu", "h100", "--seq-len", "4096")),
        # The command uses a part of the cluster.
        ("run.sh", SWIFT_MEGATRON.replace("=8", "=4") + " --max_length 4096\n", ("--gpu", "h100", "--nodes", "4")),
        ("run.sh", SWIFT_MEGATRON.replace("=2", "=1") + " --max_length 4096\n", ("--cluster", CLUSTER)),
        ("train.yaml", ON_MEGATRON.replace("Qwen/", "/x/Qwen-"), ("--cluster", CLUSTER, "--model", "Qwen/Qwen3-4B")),
    ],
    ids=["not dividing", "on the nodes", "a part", "of a spec", "a model"],
)
def test_the_next_command_that_is_printed_runs(
    cli: Cli, tmp_path: Path, name: str, text: str, options: tuple[str, ...]
) -> None:
    (tmp_path / name).write_text(text)
    shown = cli("check", tmp_path / name, *options).out
    (following,) = [line for line in shown.splitlines() if line.startswith("Next  topoplan generate ")]
    result = cli(*shlex.split(following)[2:], "-o", tmp_path / "bundle")
    assert (result.code, result.err) == (0, "")


def test_without_a_cluster_it_says_how_to_learn_whether_a_job_fits(cli: Cli, train: Path) -> None:
    words = "--gpu NAME --nodes N, or --cluster SPEC, adds whether it fits"
    assert words in cli("check", train).out
    assert words not in cli("check", train, "--gpu", "h100", "--nodes", "4").out


def test_a_model_can_be_named_for_a_path_that_says_nothing(cli: Cli, train: Path) -> None:
    train.write_text(FULL_YAML.replace("Qwen/Qwen3-VL-8B-Instruct", "/data/final"))
    assert "not predicted" in cli("check", train, "--cluster", CLUSTER).out
    assert "tp4 pp1 dp8" in cli("check", train, "--cluster", CLUSTER, "--model", "Qwen/Qwen3-VL-8B-Instruct").out


@pytest.mark.parametrize("content", [b"", b"\0\1\2", b"a: [", b"x" * 1_000_001, b"- " * 60 + b"a\n"])
def test_files_that_cannot_be_read_end_with_2_and_one_message(cli: Cli, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train.yaml"
    path.write_bytes(content)
    result = cli("check", path)

    assert result.code == 2
    assert result.err.startswith(f"topoplan: {path}")
    assert result.err.count("\n") == 1
    assert result.out == ""


def test_force_alone_changes_nothing(cli: Cli, train: Path, tmp_path: Path) -> None:
    cli("check", train, "--force")

    assert [path.name for path in tmp_path.iterdir()] == ["train.yaml"]


@pytest.mark.parametrize("directory", ["generated/h100-4x8", ""])
def test_our_own_bundles_have_no_errors_and_no_warnings(cli: Cli, tmp_path: Path, directory: str) -> None:
    if not directory:
        spec = load_spec(CLUSTER)
        directory = str(tmp_path / "fresh")
        write_bundle(
            generate(spec, predict(spec, {"tp": 2, "micro_batch_size": 2, "sequence_parallel": False})), Path(directory)
        )
    view = json.loads(cli("check", directory, "--cluster", CLUSTER, "--json").out)

    assert {one["rule"] for one in view["findings"]} <= {"bundle-version", "bundle-to-fill-in"}
    assert view["predictions"][0]["speed_of_best"] == pytest.approx(1.0)


def test_the_same_input_gives_the_same_output(cli: Cli, train: Path) -> None:
    first, second = (cli("check", train, "--cluster", CLUSTER, "--set", "nodes=1", "--json").out for _ in range(2))

    assert first == second


SWIFT = (
    "NPROC_PER_NODE={gpus} swift sft --model Qwen/Qwen3-30B-A3B --tuner_type full --dataset a --deepspeed zero2"
    " --gradient_checkpointing true --torch_dtype bfloat16\n"
)


def test_a_script_that_does_not_fit_ends_with_1_and_says_what_would(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SWIFT.format(gpus=5))
    result = cli("check", script, "--cluster", "cluster_specs/a100-1x8.yaml", "--json")
    view = json.loads(result.out)

    assert result.code == 1
    assert [one["rule"] for one in view["findings"] if one["severity"] == "error"] == ["plan-does-not-fit"]
    (prediction,) = view["predictions"]
    assert prediction["plan"]["id"] == "zero2-dp5-mbs1-full"
    assert [way["change"].partition(" ")[0] for way in prediction["would_fit"]] == ["with", "with", "on"]


def test_a_length_can_be_given_where_the_files_have_none(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SWIFT.format(gpus=8))
    usual, longer = (
        cli("check", script, "--cluster", "cluster_specs/a100-1x8.yaml", *options).out
        for options in ((), ("--seq-len", "8192"))
    )

    assert "taken are 2,048 tokens" in usual
    assert "taken are 8,192 tokens" in longer


FAULTY = "export NCCL_DEBUG=INFO\ntorchrun --nproc_pre_node 8 b.py\n"


@pytest.mark.parametrize(
    ("options", "code", "rules"),
    [
        ((), 1, ["launch-unknown-option", "env-nccl-log"]),
        (("--select", "env"), 0, ["env-nccl-log"]),
        (("--ignore", "launch-unknown-option"), 0, ["env-nccl-log"]),
    ],
)
def test_rules_are_chosen_and_the_exit_code_follows(
    cli: Cli, tmp_path: Path, options: tuple[str, ...], code: int, rules: list[str]
) -> None:
    (tmp_path / "run.sh").write_text(FAULTY)
    result = cli("check", tmp_path / "run.sh", *options, "--format", "json")

    view = json.loads(result.out)
    assert (result.code, [one["rule"] for one in view["findings"]]) == (code, rules)
    assert view["ignored"] == 2 - len(rules)
    assert view["findings"][0]["docs"] == f"docs/checks.md#{rules[0]}"


def test_other_programs_get_their_form(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(FAULTY)
    github = cli("check", tmp_path / "run.sh", "--format", "github")
    assert (github.code, [line.partition(" ")[0] for line in github.out.splitlines()]) == (1, ["::error", "::notice"])
    results = json.loads(cli("check", tmp_path / "run.sh", "--format", "sarif").out)["runs"][0]["results"]
    assert [one["level"] for one in results] == ["error", "note"]
    assert cli("check", tmp_path / "run.sh", "--format", "sarif", "--json").code == 2


def test_the_hook_of_pre_commit_is_a_call_of_ours(cli: Cli, tmp_path: Path) -> None:
    (hook,) = yaml.safe_load(Path(".pre-commit-hooks.yaml").read_text())
    (tmp_path / "run.sh").write_text(FAULTY)
    program, *words = hook["entry"].split()
    assert (program, hook["id"], hook["language"]) == ("topoplan", "topoplan-check", "python")
    assert cli(*words, tmp_path / "run.sh").code == 1


def test_a_command_that_is_cut_off_is_predicted_only_when_it_is_whole_again(cli: Cli, tmp_path: Path) -> None:
    script, copy = tmp_path / "run.sh", tmp_path / "run.fixed.sh"
    script.write_text(
        "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen3-14B --tuner_type full --torch_dtype bfloat16 \\\n"
        "  --dataset a --gradient_checkpointing true\n"
        "  --max_len 1024 --save_stepz 100 --deepspeed zero3\n"
    )
    alone = cli("check", script, "--gpu", "h100", "--ignore", "swift")
    assert "[shell-broken-continuation]" in alone.out
    assert "does not fit" not in alone.out
    assert f"{script}: not predicted: its command is cut off before line 3." in " ".join(alone.out.split())
    assert "Next" not in alone.out

    mended = cli("check", script, "--gpu", "h100", "--fix")
    assert "--save_stepz is not an argument of `swift sft`" in " ".join(mended.out.split())
    (following,) = [line for line in mended.out.splitlines() if line.startswith("Next  ")]
    assert f" --job {copy} " in following

    # argparse takes the beginning of a name for the whole.
    whole = cli("check", copy, "--gpu", "h100", "--select", "plan", "--json")
    (prediction,) = json.loads(whole.out)["predictions"]
    assert (prediction["job"]["seq_len"], prediction["plan"]["layout"]["backend"]) == (1024, "deepspeed")
