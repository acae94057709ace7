"""Record topoplan's answers at full precision and compare two recordings, to show that a change moves nothing.

    python tests/frozen.py write before.jsonl runs.jsonl ...    # run documents too, as `topoplan predict` reads them
    python tests/frozen.py write after.jsonl runs.jsonl ...
    python tests/frozen.py compare before.jsonl after.jsonl --moved 'predict .*zero3.* memory'

Each line is one field of one answer: the question, the path of the field, its value. Floats may differ by a relative
1e-9; fields whose line matches a pattern of `--moved` may have any value, and are counted.
"""

import argparse
import contextlib
import io
import json
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from topoplan.cli.main import main as topoplan_main
from topoplan.planner import view

ROOT = Path(__file__).parent.parent
SPECS = ROOT / "cluster_specs"
TOLERANCE = 1e-9
LARGE = ("b200-128x8-deepseek-v3", "h200-16x8-qwen3-235b")
"""Specs whose searches take seconds: only their rankings and their best plan are recorded."""


def answers(run_files: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """Yield each question with its answer as JSON."""
    for file in run_files:
        for line in _call("predict", str(file), "--json").splitlines():
            answer = json.loads(line)
            yield f"predict {answer.get('id')}", answer
    for spec in sorted(SPECS.glob("*.yaml")):
        yield from _answers_of_spec(spec)
    yield from _answers_of_runs(run_files)


def _answers_of_spec(spec: Path) -> Iterator[tuple[str, Any]]:
    name, path = spec.stem, str(spec)
    yield f"rank {name}", _json("rank", path, "--top", "30")
    if name in LARGE:
        yield f"explain {name}", _json("explain", path)
        return
    yield f"rank all {name}", _json("rank", path, "--backend", "all", "--top", "30")
    for verb in ("explain", "timeline", "topology"):
        yield f"{verb} {name}", _json(verb, path)
    for backend in ("deepspeed", "fsdp2"):
        for verb in ("explain", "timeline"):
            yield f"{verb} {backend} {name}", _json(verb, path, "--backend", backend)
    with tempfile.TemporaryDirectory() as directory:
        _call("generate", path, "-o", directory)
        for file in sorted(Path(directory).iterdir()):
            if file.is_file() and not file.name.startswith("."):
                yield f"bundle {name} {file.name}", file.read_text(encoding="utf-8").replace(directory, "OUT")


def _answers_of_runs(run_files: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """Yield the complete account of every tenth run."""
    for file in run_files:
        for line in file.read_text(encoding="utf-8").splitlines()[::10]:
            with tempfile.NamedTemporaryFile("w", suffix=".json") as one:
                one.write(line)
                one.flush()
                yield f"explain {json.loads(line).get('id')}", _json("explain", "--run", one.name)


def _json(*arguments: str) -> Any:
    text = _call(*arguments, "--json")
    try:
        return json.loads(text)
    except ValueError:
        return text


def _call(*arguments: str) -> str:
    """Return what a verb prints, or if it refuses, its message on standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        topoplan_main([*arguments])
    return out.getvalue() or err.getvalue()


def _fields(answer: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(answer, dict):
        for key, value in answer.items():
            yield from _fields(value, f"{path}.{key}")
    elif isinstance(answer, list):
        for index, value in enumerate(answer):
            yield from _fields(value, f"{path}[{index}]")
    else:
        yield path, answer


def write(target: Path, run_files: Sequence[Path]) -> None:
    """Write all answers, one field per line."""
    view._SIGNIFICANT_DIGITS = 17
    with target.open("w", encoding="utf-8") as file:
        for asked, answer in answers(run_files):
            for path, value in _fields(answer):
                file.write(json.dumps([asked, path, value], ensure_ascii=False) + "\n")


def compare(before: Path, after: Path, moved: Sequence[str]) -> int:
    """Print the differences that `moved` does not cover; return 1 if there are any."""
    old, new = _read(before), _read(after)
    wrong, allowed = [], 0
    for place in dict.fromkeys((*old, *new)):
        missing = object()
        a, b = old.get(place, missing), new.get(place, missing)
        if _same(a, b):
            continue
        if any(re.search(pattern, " ".join(place)) for pattern in moved):
            allowed += 1
        else:
            wrong.append((place, "nothing" if a is missing else a, "nothing" if b is missing else b))
    for place, a, b in wrong[:200]:
        sys.stdout.write(f"{' '.join(place)}: {str(a)[:100]} -> {str(b)[:100]}\n")
    sys.stdout.write(f"{len(old)} fields; {allowed} moved as said; {len(wrong)} differ\n")
    return int(bool(wrong))


def _read(file: Path) -> dict[tuple[str, str], Any]:
    rows = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    return {(asked, path): value for asked, path, value in rows}


def _same(a: Any, b: Any) -> bool:
    if type(a) is float and type(b) is float:
        return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=0.0) or a == b
    return bool(a == b)


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    writing = verbs.add_parser("write", help="freeze what is answered now")
    writing.add_argument("target", type=Path)
    writing.add_argument("runs", type=Path, nargs="*", help="run documents, a line each")
    comparing = verbs.add_parser("compare", help="hold one state against another")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--moved", action="append", default=[], help="pattern of fields that may differ")
    given = parser.parse_args()
    if given.verb == "compare":
        return compare(given.before, given.after, given.moved)
    write(given.target, given.runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
