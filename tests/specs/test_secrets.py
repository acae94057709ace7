from typing import Any

import pytest

from topoplan.specs.secrets import is_secret, is_secret_name, secrets_in
from topoplan.trainers.llamafactory.key_list import known_keys, plain_keys
from topoplan.trainers.swift.arguments import COMMANDS, arguments_of


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "hf_token", "WANDB_API_KEY", "wandbApiKey", "OPENAI_KEY", "GITHUB_PAT", "DB_PASS", "DB_PWD"),
        *("MY_PASSWORD", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AZURE_STORAGE_CONNECTION_STRING", "SENTRY_DSN"),
        *("SLACK_WEBHOOK", "SLACK_WEBHOOK_URL", "SSH_PRIVATE_KEY", "hub_token", "token", "api_key"),
    ],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret_name(name)
    assert is_secret(name, "x")


@pytest.mark.parametrize(
    "name",
    [
        *("TOKENIZERS_PARALLELISM", "NCCL_IB_PKEY", "max_new_tokens", "pad_token", "eos_token", "image_token"),
        *("dataset_key", "prompt_key", "HF_TOKEN_PATH", "PWD", "OLDPWD", "GIT_ASKPASS", "SSH_AUTH_SOCK", "PUBLIC_KEY"),
        *("HF_HUB_DISABLE_IMPLICIT_TOKEN", "FORWARD_PASS", "file_pat", "NCCL_SOCKET_IFNAME"),
    ],
)
def test_names_that_only_sound_so_are_none(name: str) -> None:
    assert not is_secret_name(name)


def test_of_the_keys_of_the_trainers_only_these_are_secrets() -> None:
    names = {*known_keys(), *plain_keys(), *(name for command in COMMANDS for name in arguments_of(command).types)}
    assert {name.removeprefix("no_") for name in names if is_secret_name(name)} == {
        *("hf_hub_token", "ms_hub_token", "om_hub_token", "hub_token", "push_to_hub_token"),
        *("swanlab_api_key", "swanlab_token", "swanlab_secret", "swanlab_webhook_url"),
        *("swanlab_lark_secret", "swanlab_lark_webhook_url"),
    }


@pytest.mark.parametrize(
    "value",
    [
        *(
            "hf_" + "a" * 34,
            "ghp_" + "a" * 36,
            "AKIA" + "A" * 16,
            "sk-ant-api03-abcdefghijklmnop",
            "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0.abc",
        ),
        *("http://user:pw@proxy:3128", "socks5://:pw@proxy:1", "postgresql://me:pw@db/runs"),
        *("Server=db;Password=abcdefgh;", "AccountName=a;AccountKey=abcdefghij==", "https://x/y?token=abcdefgh123"),
        *("https://hooks.slack.com/services/T00/B00/XXXX", "https://open.feishu.cn/open-apis/bot/v2/hook/0123-4567"),
        "-----BEGIN OPENSSH PRIVATE KEY-----",
    ],
)
def test_values_that_are_secrets_are_known_under_any_name(value: str) -> None:
    assert is_secret("X", value)


@pytest.mark.parametrize(
    "value",
    [
        *(
            "http://proxy:3128",
            "postgresql://u:${PW}@h",
            "ssh://git@host:22/x",
            "git@github.com:a/b",
            "https://h:1/a@b",
        ),
        *("/data/model.json", "=eth0", "expandable_segments:True", "s3://bucket/a:b@c", "token", 7, True, None, 0.5),
    ],
)
def test_other_values_are_none(value: Any) -> None:
    assert not is_secret("X", value)


@pytest.mark.parametrize("value", ["1", "false", "", 16, True, None, "<|endoftext|>", "/etc/gcp.json"])
def test_switches_and_the_like_are_none_under_any_name(value: Any) -> None:
    assert not is_secret("HF_TOKEN", value)


def test_nested_keys_are_looked_at_too() -> None:
    block = {"monitor": {"args": [{"api_key": "x"}, {"proxy": "http://u:p@h"}]}, "eos_token": "</s>", "lr": 1e-5}
    assert list(secrets_in(block)) == [("monitor", "args", 0, "api_key"), ("monitor", "args", 1, "proxy")]
