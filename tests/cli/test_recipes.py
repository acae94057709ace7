import json

from tests.cli.conftest import Cli

ASK = ("show", "recipes", "--gpu", "a100-sxm-80gb", "--model")


def test_csv_of_short_names_is_as_the_published_tables_are(cli: Cli) -> None:
    result = cli(*ASK, "Qwen3-0.6B,Qwen/Qwen3-4B", "--gpus", "2", "--context", "20480,4096", "--csv")
    assert result.code == 0, result.err
    assert result.out == (
        "gpus,max_model_len,model,cell\n"
        "2,4096,Qwen3-0.6B,vanilla\n"
        "2,4096,Qwen3-4B,vanilla\n"
        "2,20480,Qwen3-0.6B,vanilla\n"
        "2,20480,Qwen3-4B,SP=2\n"
    )


def test_without_contexts_they_go_on_until_nothing_fits(cli: Cli) -> None:
    result = cli(*ASK, "Qwen3-0.6B", "--gpus", "1,2", "--json")
    assert result.code == 0, result.err
    cells = json.loads(result.out)["cells"]
    for gpus in (1, 2):
        assert [cell["fits"] for cell in cells if cell["gpus"] == gpus].index(False) == (
            sum(cell["gpus"] == gpus for cell in cells) - 1
        )


def test_people_get_a_table(cli: Cli) -> None:
    result = cli(*ASK, "Qwen3-0.6B", "--gpus", "6", "--context", "4096..8192")
    assert result.code == 0, result.err
    assert "6 GPUs, a100-sxm-80gb" in result.out
    assert "8,192" in result.out
