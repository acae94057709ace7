import json

from tests.cli.conftest import Cli


def test_models_json_is_a_list_of_objects(cli: Cli) -> None:
    models = json.loads(cli("show", "models", "--json").out)
    assert all(isinstance(model["parameters"], int) for model in models)
    assert {"Qwen/Qwen3-8B": 8_190_735_360}.items() <= {model["name"]: model["parameters"] for model in models}.items()


def test_gpus_json_is_a_list_of_objects(cli: Cli) -> None:
    gpus = json.loads(cli("show", "gpus", "--json").out)
    assert all({"name", "memory_bytes", "bf16_flops", "memory_bytes_per_s"} <= set(gpu) for gpu in gpus)


def test_tables_for_people(cli: Cli) -> None:
    assert "Qwen/Qwen3-8B" in cli("show", "models").out
    assert "h100-sxm-80gb" in cli("show", "gpus").out
