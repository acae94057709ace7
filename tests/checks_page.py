"""docs/checks.md: every rule of `topoplan check`, from the tables that say what it says."""

import re
from collections import Counter
from itertools import groupby
from string import Formatter

from topoplan.lint.rules.registry import all_rules, further_rules
from topoplan.reading.rules import Rule

_HEAD = """# What `topoplan check` looks for

Made by `make readme` from the tables of the rules; what stands in *italics* is filled in. `error`: it will not start,
or trains something else than is written; `warning`: it works, worse than it could or only by luck; `note`: worth
knowing. What is so at some versions of a package is judged by the version that `software` of the spec, a lock file
beside the file, `pip install` in a script or the environment names.

Each rule has its heading here (`checks.md#launch-nested-torchrun`). `--select` and `--ignore` take its name, or how
names begin: `launch`.
"""


def checks_page() -> str:
    """The whole page."""
    rules = sorted((*all_rules(), *further_rules()), key=lambda rule: (rule.reads, rule.id))
    parts = [_HEAD]
    for reads, of_place in groupby(rules, key=lambda rule: rule.reads):
        here = list(of_place)
        shared, _ = Counter(rule.source for rule in here).most_common(1)[0]
        parts.append(f"## {reads[0].upper()}{reads[1:]}\n")
        if shared:
            parts.append(f"Sources, unless another is given: {shared}.\n")
        for rule_id, texts in groupby(here, key=lambda rule: rule.id):
            lines = dict.fromkeys(f"- {_text(rule, shared)}\n" for rule in texts)
            parts.append(f"### {rule_id}\n\n{''.join(lines)}")
    return "\n".join(parts)


def _text(rule: Rule, shared: str) -> str:
    said = [f"**{rule.level}**: {_filled(rule.what)}."]
    said += [f"At {_filled(rule.holds)}; a note where no version is named."] if rule.holds else []
    said += [f"Why: {_filled(rule.why)}."] if rule.why else []
    said += [f"Remedy: {_filled(rule.remedy)}."] if rule.remedy else []
    said += [f"Source: {rule.source}."] if rule.source not in ("", shared, rule.why) else []
    return " ".join(said)


def _filled(template: str) -> str:
    """A template with its fields in italics, and nothing else that Markdown would take for a mark."""
    pieces = [(text, name) for text, name, *_ in Formatter().parse(template)]
    marks = re.compile(r"[*<\[]|__")
    return "".join(marks.sub(r"\\\g<0>", text) + (f"*{name}*" if name else "") for text, name in pieces)
