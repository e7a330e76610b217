"""Which tests a quick run leaves out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPORT = """<testsuites><testsuite>
<testcase classname="tests.a.test_b" name="test_c[1]" file="tests/a/test_b.py" time="2.04" />
<testcase classname="tests.a.test_b.TestD" name="test_e" file="tests/a/test_b.py" time="1.5" />
<testcase classname="tests.a.test_b" name="test_f" file="tests/a/test_b.py" time="0.2" />
</testsuite></testsuites>"""


def test_a_report_becomes_the_list_of_long_tests(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "tests").mkdir()
    script, report = tmp_path / "scripts" / "times_of_tests.py", tmp_path / "times.xml"
    script.write_bytes((ROOT / "scripts" / "times_of_tests.py").read_bytes())
    report.write_text(REPORT)
    done = subprocess.run(
        [sys.executable, str(script), str(report)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("2 tests")
    assert json.loads((tmp_path / "tests" / "times.json").read_text()) == {
        "tests/a/test_b.py::TestD::test_e": 1.5,
        "tests/a/test_b.py::test_c[1]": 2.04,
    }


def test_every_listed_test_is_in_a_file_that_exists() -> None:
    times = json.loads((ROOT / "tests" / "times.json").read_text(encoding="utf-8"))
    assert len(times) > 30
    gone = {
        name.partition("::")[0] for name in times if not (ROOT / name.partition("::")[0]).exists()
    }
    assert gone == set()


def test_long_tests_are_marked_but_for_those_that_catch_a_broken_mechanism(
    request: object,
) -> None:
    collect = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "long"]
    found = subprocess.run(
        [*collect, "tests/auditing", "tests/accounting"],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
    ).stdout  # fmt: skip
    assert "::test_" in found
    assert "test_too_little_noise_is_refuted" not in found


def test_a_slow_machine_runs_the_quick_tests(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import tests_for_this_machine as machine
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    times = json.loads((ROOT / "tests" / "times.json").read_text(encoding="utf-8"))
    names = machine.sample_of(times)
    assert len(names) >= machine.TRIED
    assert len({name.split("/")[1] for name in names}) > 5  # rooms
    assert machine.still_there([*names[:2], f"{names[0]}_that_is_gone"]) == names[:2]
    # The first of a file made what the others use, which are run alone here.
    here = {name: 3.0 * times[name] for name in names} | {names[0]: 60.0, names[1]: 50.0}
    assert abs(machine.slower_by(times, here) - 3.0) < 1e-9
    assert machine.minutes_of_all(times, 3.0) > 60 > machine.minutes_of_all(times, 1.0)
