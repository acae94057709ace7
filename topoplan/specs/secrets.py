"""Detect secrets, by the name of a variable or key or by the value itself. No secret is ever written to a file.

This is a heuristic, to protect people who put a secret where it gets copied and shared. It is broad, because a leaked
token has to be revoked; harmless names (`eos_token`, `prompt_key`) are recognized by their words, and switches by
their values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.specs.source import KeyPath

NEVER_WRITTEN = "a token or password is never written to a file"
REMEDY = (
    "name the variable that holds it under `secrets` in the spec, as in `secrets: [HF_TOKEN]`: `topoplan launch` takes"
    " its value from your environment and hands it over, into no file"
)

# Patterns are kept as text, because `re` compiles and caches each on first use.
_ANYWHERE = r"SECRET|PASSW(?:OR)?D|PASSPHRASE|CREDENTIAL|WEBHOOK|API_?KEY|(?:^|_)(?:ACCESS|PRIVATE|AUTH)_?KEY"
_AT_THE_END = r"(?:^|_)(?:TOKEN|DSN)$|_CONN(?:ECTION)?_STR(?:ING)?$|_(?:PASS|PWD)$"
_OF_A_VARIABLE = r"_(?:KEY|PAT)$"
"""For names in capitals only: configuration keys with these endings name columns and patterns."""
_WHERE_IT_IS = r"_(?:FILE|PATH|DIR|NAME|LENGTH|LEN|TYPE|SIZE|ENV|VAR)$"
_HARMLESS = (
    r"(?:^|_)(?:PAD|EOS|BOS|UNK|SEP|CLS|MASK|EOD|EOT|EOM|IMAGE|VIDEO|AUDIO|MEDIA|MM|STOP|START|END|BEGIN|SPECIAL|THINK|TOOL"
    r"|PER|NEXT|NEW|PROMPT|RESPONSE|FIRST|LAST|SPLIT|REPLACE|PLACEHOLDER|VISION|IMPLICIT"
    r"|PUBLIC|PARTITION|CACHE|SORT|PRIMARY|GROUP|FORWARD|BACKWARD|SINGLE)_(?:TOKEN|KEY|PASS|PAT)$"
)
"""Tokens of a text, keys of a table, passes over data."""
_SWITCH = r"(?i)|\d{1,3}|true|false|yes|no|on|off|none|null|auto|<.*>|\[.*\]|~?/\S*\.\w{1,6}"
"""Values that are not secrets whatever their name: switches, counts, special tokens, file paths."""

_VALUE = (
    r"(?<![A-Za-z0-9_-])(?:"
    r"hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{22,}|glpat-[\w-]{20,}|A(?:KIA|SIA)[A-Z0-9]{16}"
    r"|sk-[\w-]{20,}|xox[abeprs]-[\w-]{10,}|AIza[\w-]{35}|nvapi-[\w-]{40,}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,}"
    r"|dckr_pat_[\w-]{20,}|wandb_v\d_\w{40,}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+"
    r")|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|[A-Za-z][A-Za-z0-9+.-]*://[^\s/:@]*:(?![*$<{])[^\s/@]+@"
    r"|(?i:(?:^|[;&?\s])(?:password|pwd|accountkey|sharedaccesskey|sharedaccesssignature|access_token|api_?key)="
    r"(?![*$<{])[^;&\s]{8,})"
    r"|(?i:[?&](?:key|token|sig|signature|x-amz-signature)=(?![*$<{])[^&\s]{8,})"
    r"|(?i:https://(?:hooks\.slack\.com/services|(?:\w+\.)?discord(?:app)?\.com/api/webhooks|open\.(?:feishu\.cn|larksuite\.com)"
    r"/open-apis/bot/v2/hook|[\w.-]+\.webhook\.office\.com/webhook)/\S{8,})"
)
"""Tokens in their issuers' formats, private keys, URLs and connection strings with a password, webhooks."""


def is_secret_name(name: str) -> bool:
    """Return whether a variable or key of that name holds a secret, unlike `num_tokens` and `NCCL_IB_PKEY`."""
    word = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]", "_", name).upper()
    if re.search(_WHERE_IT_IS, word) or re.search(_HARMLESS, word):
        return False
    variable = name.upper() == name and re.search(_OF_A_VARIABLE, word)
    return bool(re.search(_ANYWHERE, word) or re.search(_AT_THE_END, word) or variable)


def is_secret(name: str, value: object) -> bool:
    """Return whether a value looks like a secret, by its name or by itself."""
    if value is None or isinstance(value, bool | float) or not isinstance(value, str | int):
        return False
    text = str(value).strip()
    return (is_secret_name(name) and not re.fullmatch(_SWITCH, text)) or re.search(_VALUE, text) is not None


def secrets_in(block: Mapping[str, Any]) -> Iterator[KeyPath]:
    """Yield the paths of values that look like secrets, including nested ones."""
    yield from _within("", block, ())


def _within(name: str, value: Any, path: KeyPath) -> Iterator[KeyPath]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _within(str(key), item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _within(name, item, (*path, index))
    elif is_secret(name, value):
        yield path
