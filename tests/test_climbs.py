"""The path of a spec, from its file to the table, goes down the floors."""

import subprocess
import sys

from tests.climbs import ROOT, climbs, floor

MOST = 8
"""Four climbs of the search and its table, and those of what `rank` adds: the trainers' caveats on each plan, the
warnings of its files, which are generated for this, and the ways out."""


def test_a_ranking_seldom_climbs_back_up() -> None:
    """Uses a spec without a roomy plan, so that ways out are computed too."""
    command = [sys.executable, str(ROOT / "tests" / "climbs.py"), str(ROOT / "cluster_specs" / "a100-1x8.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *_, last = done.stdout.splitlines()
    files, found = (int(word) for word in last.split() if word.isdecimal())
    assert files > 50
    assert found <= MOST, done.stdout


def test_a_climb_is_a_step_to_a_higher_floor_with_what_is_looked_up_left_out() -> None:
    files = ["cli/rank.py", "specs/load.py", "planner/search.py", "operators/shard.py", "planner/rank.py"]
    assert climbs(files) == []
    assert climbs([*files, "engines/rule.py", "planner/explain.py"]) == [("engines/rule.py", "planner/explain.py")]
    assert floor("operators/shard.py") < floor("engines/rule.py") < floor("planner/rank.py")
