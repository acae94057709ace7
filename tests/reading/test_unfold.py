"""Line breaks restored in text that lost them."""

from hypothesis import given
from hypothesis import strategies as st

from topoplan.reading.recognizer import keys_of
from topoplan.reading.unfold import lines_of_unfolded, unfold_shell, unfold_yaml
from topoplan.specs.source import parse_source
from topoplan.trainers.recognizers import recognizers

KEYS = keys_of(recognizers())

FOLDED = (
    "# === model === model_name_or_path: org/some-8B dataset: mine template: qwen3 cutoff_len: 4096 "
    "# === training === learning_rate: 2e-5 evaluation_strategy: no # or steps load_best_model_at_end: false "
    "output_dir: saves/a # where tensor_model_parallel_size: 4 # four ways "
    "# 40GB card: use selective # recompute_granularity: selective # 32GB card: use full # recompute_granularity: full"
)


def test_every_key_of_a_folded_file_comes_out_with_its_value() -> None:
    unfolded = unfold_yaml(FOLDED, KEYS)
    assert unfolded is not None
    assert parse_source(unfolded, name="x").data == {
        "model_name_or_path": "org/some-8B",
        "dataset": "mine",
        "template": "qwen3",
        "cutoff_len": 4096,
        "learning_rate": 2e-5,
        "evaluation_strategy": "no",
        "load_best_model_at_end": False,
        "output_dir": "saves/a",
        "tensor_model_parallel_size": 4,
    }


def test_a_key_directly_behind_the_hash_stays_commented_out() -> None:
    unfolded = unfold_yaml(FOLDED, KEYS) or ""
    assert "\n# recompute_granularity: selective\n" in unfolded


def test_no_character_but_blanks_is_added_or_lost() -> None:
    assert "".join((unfold_yaml(FOLDED, KEYS) or "").split()) == "".join(FOLDED.split())


def test_a_file_with_its_line_breaks_is_left_alone() -> None:
    text = "# set recompute_granularity: full if cutoff_len: 8192 does not fit\nstage: sft\ntemplate: qwen3\nseed: 1\n"
    assert unfold_yaml(text, KEYS) is None


def test_keys_in_quotes_and_brackets_are_not_split() -> None:
    unfolded = unfold_yaml("system: 'say: this' lr_scheduler_kwargs: {min_lr: 1, num_cycles: 2} seed: 3", KEYS)
    assert unfolded == "system: 'say: this'\nlr_scheduler_kwargs: {min_lr: 1, num_cycles: 2}\nseed: 3"


def test_folded_exports_and_commands_come_out_a_line_each() -> None:
    folded = (
        "export A=1 # first export B=2 # on node 0: torchrun \\ --nnodes=2 \\ $(which llamafactory-cli) train a.yaml"
    )
    assert unfold_shell(folded) == (
        "export A=1  # first\nexport B=2  # on node 0:\n"
        "torchrun \\\n--nnodes=2 \\\n$(which llamafactory-cli) train a.yaml"
    )


def test_a_script_with_its_line_breaks_is_left_alone() -> None:
    assert unfold_shell("export A=1\ntorchrun \\\n  --nnodes 2 a.py\n") is None


def test_each_new_line_knows_the_line_it_comes_from() -> None:
    lines = ["stage: sft seed: 1", "", "template: a packing: true"]
    unfolded = unfold_yaml("\n".join(lines), KEYS) or ""
    assert lines_of_unfolded(unfolded, lines, [10, 11, 12]) == (10, 10, 12, 12)


@given(st.text(alphabet=st.sampled_from("ab_: #'\"\\{}\n-export="), max_size=200))
def test_unfolding_adds_and_loses_blanks_only(text: str) -> None:
    for unfolded in (unfold_yaml(text, KEYS), unfold_shell(text)):
        if unfolded is not None:
            assert "".join(unfolded.split()) == "".join(text.split())
