"""Which parts of a document are configuration, and which are illustration."""

from hypothesis import given
from hypothesis import strategies as st

from topoplan.reading.markdown import is_markdown, markdown_parts
from topoplan.reading.parts import Part
from topoplan.reading.recognizer import keys_of
from topoplan.trainers.recognizers import recognizers

KEYS = keys_of(recognizers())


def parts(text: str) -> tuple[Part, ...]:
    return markdown_parts(text, KEYS, name="page.md")


WHOLE = "```yaml\nmodel_name_or_path: org/a\nstage: sft\n```\n"


def test_a_fence_keeps_the_line_of_each_of_its_lines() -> None:
    (part,) = parts("# Title\n\n" + WHOLE)
    assert (part.kind, part.text, part.lines) == ("yaml", "model_name_or_path: org/a\nstage: sft", (4, 5))
    assert part.place(2) == "page.md:5"


def test_fences_with_tildes_indentation_quotes_and_without_an_end_are_read() -> None:
    (tilde,) = parts("~~~~yml\nmodel_name_or_path: a\nstage: sft\n~~~\nseed: 1\n~~~~\n")
    assert tilde.text.endswith("seed: 1")
    (indented,) = parts("- so:\n  ```yaml\n  model_name_or_path: a\n  stage: sft\n  ```\n")
    assert indented.text == "model_name_or_path: a\nstage: sft"
    (quoted,) = parts("> - first:\n>   ```bash\n>   export PYTORCH_CUDA_ALLOC_CONF=a\n>   ```\n> more\n")
    assert (quoted.kind, quoted.text, quoted.lines) == ("shell", "export PYTORCH_CUDA_ALLOC_CONF=a", (3,))
    (unclosed,) = parts("```yaml\nmodel_name_or_path: a\nstage: sft\n")
    assert unclosed.text.endswith("stage: sft")


def test_the_prompt_of_a_console_is_taken_off() -> None:
    (part,) = parts("```console\n$ torchrun --nnodes 2 train.py\n(env) me@host:~/x$ torchrun a.py\n```\n")
    assert part.text == "torchrun --nnodes 2 train.py\ntorchrun a.py"


def test_a_fence_without_a_language_is_known_by_what_it_holds() -> None:
    found = parts(
        '```\ntorchrun --nnodes 2 a.py\n```\n```\n{"zero_optimization": {"stage": 2}}\n```\n```\nsome text\n```\n'
    )
    assert {part.kind for part in found} == {"shell", "json"}


def test_a_copied_page_has_a_language_line_and_a_copy_line_in_front_of_the_code() -> None:
    (part,) = parts("Intro\n\nyaml\nCopy code\n# first model_name_or_path: org/a stage: sft seed: 1\n\nMore.\n")
    assert part.unfolded
    assert part.text == "# first\nmodel_name_or_path: org/a\nstage: sft\nseed: 1"
    assert part.lines == (5, 5, 5, 5)


def test_json_and_commands_without_a_fence_are_found() -> None:
    text = 'Use this:\n\n{\n  "zero_optimization": {\n    "stage": 3\n  }\n}\n\nthen\n\n'
    text += "torchrun \\\n  --nnodes 2 a.py\n\ntorchrun starts them.\n"
    document, command = parts(text)
    assert (document.kind, document.lines[0]) == ("json", 3)
    assert (command.kind, command.text, command.lines) == ("shell", "torchrun \\\n  --nnodes 2 a.py", (11, 12))


def test_a_few_keys_beside_a_whole_configuration_are_an_illustration() -> None:
    part, piece = parts(WHOLE + "The differences:\n```yaml\nstage: pt\ncutoff_len: 1\n```\n")
    assert "org/a" in part.text
    assert (part.label, part.is_excerpt) == ("yaml block 1", False)
    assert (piece.label, piece.is_excerpt) == ("yaml block 2", True)


def test_without_a_whole_configuration_the_fragments_are_taken() -> None:
    (part,) = parts("```yaml\ntensor_model_parallel_size: 4\nsequence_parallel: true\n```\n")
    assert part.kind == "yaml"


def test_the_same_variable_again_shows_alternatives() -> None:
    assert parts("```bash\nexport CUDA_VISIBLE_DEVICES=0\nexport CUDA_VISIBLE_DEVICES=1\n```\n") == ()
    assert len(parts("```bash\nexport CUDA_VISIBLE_DEVICES=0\nexport A=1\n```\n")) == 1


def test_what_says_that_something_is_left_out_is_an_illustration() -> None:
    assert parts("```bash\ntorchrun --nnodes=4 ... train.py\n```\n") == ()
    assert parts('```json\n{\n  ...\n  "zero_optimization": {}\n}\n```\n') == ()


def test_options_without_a_command_are_an_illustration() -> None:
    assert parts("```bash\n# larger\n--deepspeed zero3\n```\n") == ()


HEADINGS = """# The command

### `CUDA_VISIBLE_DEVICES=0,1`
```bash
export CUDA_VISIBLE_DEVICES=3
```
### `--nproc_per_node=2`
### `--no_python`
```bash
torchrun --nproc_per_node=2 train.py
torchrun --nproc_per_node=2 --no_python swift sft
```
#### `--model org/a`
#### `--dataset 'x#1'`
```bash
--dataset 'y' 'z'
```
## Questions
Try `--deepspeed zero3`.
"""


def test_a_command_explained_in_headings_is_put_together_from_them() -> None:
    (part,) = parts(HEADINGS)
    assert part.text == (
        "CUDA_VISIBLE_DEVICES=0,1 \\\ntorchrun \\\n--nproc_per_node=2 \\\n--no_python \\\nswift sft \\\n"
        "--model org/a \\\n--dataset 'x#1'"
    )
    assert part.lines == (3, 11, 7, 8, 11, 13, 14)


def test_headings_explain_a_command_that_stands_there_whole() -> None:
    whole = "```bash\nswift sft --model org/b\n```\n"
    (part,) = parts(whole + HEADINGS)
    assert part.text == "swift sft --model org/b"


def test_prose_is_no_document_of_ours_and_holds_nothing() -> None:
    assert parts("Training a large model needs memory.\n\n- torchrun helps\n") == ()
    assert is_markdown("# A\n```\nx\n```\n")
    assert not is_markdown("stage: sft\n# a comment\n")


@given(st.text(alphabet=st.sampled_from("`~#>{} \n-=yamlbshtorchrunexport:A1"), max_size=300))
def test_any_text_is_read(text: str) -> None:
    lines = len(text.splitlines())
    for part in parts(text):
        assert len(part.lines) == len(part.text.split("\n"))
        assert all(1 <= line <= lines for line in part.lines)
