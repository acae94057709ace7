"""The table of verbs: present and former names, what each does, and an example.

Help, shell completion, old names and docs/verbs.md are generated from this table. The options of a verb are the
parameters of its function, in the module of its first word: `runs status` is `status` in `cli/runs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb of the command line."""

    name: str
    """The words to type; `runs status` is listed under `runs`."""
    group: str
    """Heading in the help."""
    summary: str
    """A sentence that fits on an 80-column line after the name."""
    example: str
    """An example of what to type after `topoplan`."""
    short: str = ""
    """An unlisted short name, which is accepted too."""
    was: str = ""
    """A former name, which still works and points to the present one."""

    @property
    def parent(self) -> str:
        """The parent verb, such as `runs` for `runs status`."""
        return self.name.rpartition(" ")[0]

    @property
    def word(self) -> str:
        """The last word, such as `status` for `runs status`."""
        return self.name.rpartition(" ")[2]


SHOW = "show"
"""The only verb that does nothing without a second word."""

VERBS = (
    Verb(
        "rank",
        "Plan",
        "Rank the layouts of a job by predicted speed.",
        "rank --gpu h100 --model Qwen/Qwen3-8B --seq-len 4k --batch 64",
    ),
    Verb(
        "what-if",
        "Plan",
        "Show how the best plan moves when the spec changes.",
        "what-if cluster.yaml --set nodes=2,4,8",
    ),
    Verb("size", "Plan", "Find the fewest nodes that do a job in time.", "size cluster.yaml --max-hours 24"),
    Verb("predict", "Plan", "Predict memory and step time of given layouts.", "predict runs.jsonl"),
    Verb(
        "explain",
        "Look",
        "Show where time and memory of a plan go, or how two plans differ.",
        "explain cluster.yaml --plan 1 --versus 2",
    ),
    Verb(
        "timeline",
        "Look",
        "Show what each part of the machine does in a plan's step.",
        "timeline cluster.yaml --plan 2",
    ),
    Verb(
        "topology",
        "Look",
        "Draw the machines and their network, and what a plan asks of them.",
        "topology cluster.yaml --plan 1 -o groups.svg",
    ),
    Verb("page", "Look", "Look at plans in a browser, and change the question.", "page cluster.yaml"),
    Verb(
        "init",
        "Write",
        "Write a spec, from answers, options, hosts, or files of a job.",
        "init --gpu h100 --model Qwen/Qwen3-8B --seq-len 4k --batch 64",
    ),
    Verb(
        "probe",
        "Write",
        "Read machines over SSH, and write the spec of their cluster.",
        "probe node0 node1 -o cluster.yaml",
    ),
    Verb(
        "generate",
        "Write",
        "Write the files that start a plan: the bundle.",
        "generate cluster.yaml --plan 1 -o bundle",
    ),
    Verb(
        "check",
        "Check",
        "Check files and commands of a job: what fails, is ignored, or fits.",
        "check train.yaml --cluster cluster.yaml",
    ),
    Verb(
        "preflight", "Check", "Check hosts over SSH for what would stop or slow a run down.", "preflight cluster.yaml"
    ),
    Verb("validate", "Check", "Grade predictions against measured runs.", "validate runs.jsonl --rows"),
    Verb("launch", "Launch", "Start a bundle on its hosts, and follow it to its end.", "launch bundle"),
    Verb("runs", "Launch", "List your runs; with status, logs, attach or stop, manage one.", "runs"),
    Verb("runs status", "Launch", "Show the state of a run on its hosts.", "runs status", short="status"),
    Verb("runs logs", "Launch", "Print what the nodes of a run have written.", "runs logs -f --node 0", short="logs"),
    Verb("runs attach", "Launch", "Watch a run until it ends.", "runs attach", short="attach"),
    Verb("runs stop", "Launch", "End what a run started on its hosts, and nothing else.", "runs stop", short="stop"),
    Verb(
        "calibrate",
        "Learn",
        "Learn the constants of a cluster from the logs of its runs.",
        "calibrate trainer_log.jsonl --spec bundle -o profile.yaml",
    ),
    Verb(
        "tune",
        "Learn",
        "Find the best plan by short trials on your own hosts.",
        "tune cluster.yaml --plans 4 --steps 20",
    ),
    Verb(
        "measure",
        "Learn",
        "Time kernels and collectives on real machines, for calibrate.",
        "measure cluster.yaml -o measured.json",
    ),
    Verb(SHOW, "About", "Show what topoplan knows: gpus, models, profile, recipes, schema.", "show gpus"),
    Verb("show gpus", "About", "List the GPUs that can be named in a spec.", "show gpus", was="gpus"),
    Verb("show models", "About", "List the models that can be named in a spec.", "show models --json", was="models"),
    Verb(
        "show profile",
        "About",
        "Show the measured constants behind the predictions for a GPU.",
        "show profile h100-sxm-80gb",
        was="profile",
    ),
    Verb(
        "show recipes",
        "About",
        "Show what RL (Trinity-RFT) takes to train at long contexts.",
        "show recipes --model Qwen/Qwen3-8B --gpu h20-sxm-96gb",
        was="table",
    ),
    Verb("show schema", "About", "Print the JSON Schema of the spec file.", "show schema", was="schema"),
    Verb("version", "About", "Print the version.", "version"),
)
"""All verbs, in the order of the help."""


def below(parent: str) -> list[Verb]:
    """Return the verbs listed under `topoplan`, or under one of its verbs."""
    return [verb for verb in VERBS if verb.parent == parent]


def meant(words: Sequence[str]) -> Verb | None:
    """Return the verb that a command line begins with, or None."""
    verb = named("", words[0]) if words else None
    return (named(verb.name, words[1]) or verb) if verb and len(words) > 1 else verb


def named(parent: str, word: str) -> Verb | None:
    """Return the verb of a word under `parent`, by its name, short name or former name."""
    other = (verb for verb in VERBS if not parent and word and word in (verb.short, verb.was))
    return next((verb for verb in below(parent) if verb.word == word), None) or next(other, None)
