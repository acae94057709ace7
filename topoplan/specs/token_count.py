"""Count the tokens of a text: with the model's own tokenizer if available, otherwise from its bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from topoplan.errors import SpecError
from topoplan.specs.source import is_there, shown_path
from topoplan.units import quote

BYTES_PER_TOKEN = 4.3
"""UTF-8 bytes per token. Counted over the demonstration data of LLaMA-Factory and Python code with the tokenizers of
Qwen3, Llama 3 and DeepSeek-V3: English 4.6 to 4.9, code 4.3 to 4.7, JSON tool calls 3.9 to 4.5, Chinese 3.7 to 5.0.
tiktoken's README says "about 4 bytes"."""
BYTES_PER_TOKEN_ERROR = 0.2
"""All of these are within a fifth of BYTES_PER_TOKEN on average; a single sample may be off by several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounter:
    """A method of counting the tokens of texts."""

    count: Callable[[Sequence[str]], list[int]]
    rule: str
    """The method in words, for messages."""
    error: float
    """Possible relative error of the mean."""
    measured_bytes: int
    """File size above which only a sample of the records is measured."""


def token_counter(tokenizer: Path | None) -> TokenCounter:
    """Return a counter using a tokenizer.json if it and the package `tokenizers` are available, otherwise BY_BYTES."""
    if tokenizer is None or not is_there(tokenizer, Path.is_file):
        return BY_BYTES
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return BY_BYTES
    try:
        model = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the package raises bare exceptions
        raise SpecError(f"is not a tokenizer: {quote(str(error))}", where=shown_path(tokenizer)) from None

    def count(texts: Sequence[str]) -> list[int]:
        return [len(encoded.ids) for encoded in model.encode_batch(list(texts), add_special_tokens=False)]

    return TokenCounter(count=count, rule="counted with the model's tokenizer", error=0.0, measured_bytes=1 << 24)


def _by_bytes(texts: Sequence[str]) -> list[int]:
    sizes = (len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass")) for text in texts)
    return [math.ceil(size / BYTES_PER_TOKEN) for size in sizes]


BY_BYTES = TokenCounter(
    count=_by_bytes,
    rule=f"estimated at {BYTES_PER_TOKEN} bytes a token, {BYTES_PER_TOKEN_ERROR:.0%} either way",
    error=BYTES_PER_TOKEN_ERROR,
    measured_bytes=1 << 27,
)
