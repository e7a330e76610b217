"""``quietgrad audit``: the configured training with canaries, its table, its figure, and what it
refuses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quietgrad.cli.progress.lines import Lines

Run = Callable[..., tuple[int, str, str]]
Write = Callable[[dict[str, Any]], Path]


@pytest.fixture
def config(settings: dict[str, Any], write_config: Write) -> Path:
    return write_config(settings | {"model.tune": "head", "training.steps": 4})


@pytest.mark.grid(2, "kinds of canaries times norms")
@pytest.mark.parametrize("kind", ["gradient", "input"])
@pytest.mark.parametrize(
    "extra", [(), ("--set", "clipping.estimator=hutch")], ids=["exact", "hutch"]
)
def test_it_prints_one_object_and_draws_a_figure(
    quietgrad: Run, config: Path, tmp_path: Path, kind: str, extra: tuple[str, ...]
) -> None:
    figure = tmp_path / "audit.png"
    code, out, err = quietgrad(
        "audit",
        config,
        "--kind",
        kind,
        "--canaries",
        16,
        "--figure",
        figure,
        "--json",
        "--confidence",
        1 - 1e-7,
        *extra,
    )
    assert code == 0, err
    record = json.loads(out)
    assert record["kind"] == kind and record["canaries"] == 16 and record["attack"] == "one run"
    assert record["claimed_epsilon"] == pytest.approx(4.0, abs=1e-2) and not record["refuted"]
    assert record["records"] == 80  # the plan is for 16 more
    assert {f["released"] for f in record["findings"]} == {"releases", "weights"}
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "run").exists()  # no model, no ledger


def test_settings_that_change_are_audited(quietgrad: Run, config: Path, tmp_path: Path) -> None:
    code, out, err = quietgrad(
        "audit", config, "--canaries", 16, "--figure", tmp_path / "a.png", "--confidence",
        1 - 1e-7, "--set", 'schedules.noise={shape = "linear", first = 2.0, last = 1.0}'
    )  # fmt: skip
    assert code == 0, err
    assert " to " in out.partition("noise multiplier")[2].partition(",")[0]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_says_what_an_audit_cannot_show(
    quietgrad: Run, config: Path, tmp_path: Path
) -> None:
    code, out, err = quietgrad(
        "audit", config, "--canaries", 10, "--figure", tmp_path / "a.png", "--set",
        "denoising.method=published", "--set", "noise.method=banded", "--set", "noise.bands=2"
    )  # fmt: skip
    assert code == 0, err
    text = " ".join(out.split())
    for words in (
        "no proof",
        "must not be published",
        "denoised releases",
        "2 bands",
        "Lower bounds on epsilon",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kind", "loss"), "--kind='loss'"),
        (("--canaries", "1"), "canaries=1"),
        (("--canaries", "100000"), "canaries=100000 exceeds the"),
        (
            ("--kind", "input", "--canaries", "30"),
            "canaries=30 exceeds the 27 public validation records",
        ),
        (("--confidence", "2"), "confidence=2.0"),
        # Before anything else is looked at.
        (("--confidence", "0.2", "--set", "privacy.enabled=false"), "confidence=0.2 must be in"),
        (("--figure", "audit.pdf"), "must end in .png"),
        (("--figure", "no/such/folder.png"), "no such folder"),
        (("--set", "privacy.enabled=false"), "no epsilon to audit"),
    ],
)
def test_what_it_refuses(
    quietgrad: Run, config: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = quietgrad("audit", config, *arguments)
    assert code != 0 and message in err


def test_it_says_how_far_it_is_without_a_terminal(
    quietgrad: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lines, "EVERY", 0.0)
    code, out, err = quietgrad("audit", config, "--canaries", 16, "--figure", tmp_path / "a.png")
    assert code == 0 and err == ""
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[:5]] == [
        "quietgrad", "reading", "calibrating", "loading", "looking"
    ]  # fmt: skip
    far = [line for line in lines if line.startswith("training with canaries, step ")]
    assert len(far) == 3 and far[0].endswith("step 2/4, about 1 min left")
