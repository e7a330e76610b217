"""``quietgrad plan --devices``, and what docs/many_devices.md shows of it."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scaling.steps import small_shape
from typer.testing import CliRunner

from quietgrad.cli.app import app
from quietgrad.clipping.clipper import Clipper
from quietgrad.scaling.paper.models import Tuning, paper_of_shape
from quietgrad.scaling.paper.shapes import shape_of
from quietgrad.scaling.ways import advice
from quietgrad.scaling.ways.devices import device_of
from quietgrad.scaling.ways.forecast import Asked, ways_of

PAGE = (Path(__file__).parents[2] / "docs" / "many_devices.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```sh\nquietgrad (.*?)\n```", PAGE, flags=re.DOTALL)


def asked(*words: str) -> dict[str, Any]:
    found = CliRunner().invoke(app, [*words, "--json"])
    assert found.exit_code == 0, found.output
    return dict(json.loads(found.stdout))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("model")
    small_shape(512, 64, 3, 128).config().save_pretrained(where)
    return str(where)


@pytest.fixture(scope="module")
def small(folder: str) -> dict[str, Any]:
    return asked(
        *("plan", "--devices", "4", "--device", "cpu", "--model", folder, "--length", "32"),
        *("--batch-size", "64", "--bands", "8", "--hours", "2"),
    )


def test_ways_say_whether_they_run(small: dict[str, Any]) -> None:
    ways = {way["way"]: way for way in small["ways"]}
    assert ways["replicas"]["runs"] == "runs today" and ways["replicas"]["fits"]
    assert ways["sharded"]["runs"].startswith("runs today, by training.sharded")
    for way in ways.values():
        most = sum(way["resident_bytes"].values()) + max(way["phase_bytes"].values())
        assert way["peak_bytes"] == most
        assert way["micro_batches"] * way["examples"] >= 16
    one, cut = ways["replicas"]["resident_bytes"], ways["sharded"]["resident_bytes"]
    assert cut["optimiser"] == pytest.approx(one["optimiser"] / 4)
    assert one["noise rows"] >= cut["noise rows"] > 0


def test_tables_price_bands_and_estimators(small: dict[str, Any]) -> None:
    rows = {row["bands"]: row for row in small["noise"]}
    assert rows[1]["rows_bytes"] == 0
    assert rows[16]["rows_bytes"] == pytest.approx(15 * rows[2]["rows_bytes"])
    assert rows[16]["regenerate_seconds"] > rows[16]["rows_seconds"] > rows[1]["rows_seconds"]
    norms = {(row["estimator"], row["sketch_dim"]): row for row in small["estimators"]}
    # With m of multiplications at k = 8, and r of reading: m + r, 4 m + r, 3 m + 2 r.
    few, many = norms["hutch", 8]["seconds"], norms["hutch", 32]["seconds"]
    made = (many - few) / 3
    assert 0 < made < few
    assert norms["hutch++", 8]["seconds"] == pytest.approx(2 * few + made)
    # The planner weighs stated speeds, the table those of the device.
    assert norms["exact", None]["seconds"] <= 1.01 * norms["ghost", None]["seconds"]
    best = next(way for way in small["ways"] if way["way"] == small["best"])
    assert small["in_hours"]["steps"] == int(7200 / best["step_seconds"])


def test_the_first_row_of_noise_is_that_of_the_ways(folder: str) -> None:
    """Where all devices share each record, too: weights cut by columns are drawn by whole rows."""
    shape, clipper = shape_of(folder), Clipper(1.0)

    def paper_of(examples: int, engine: Any, parts: int) -> Any:
        tuning = Tuning(dtype="float32", parts=parts)
        return paper_of_shape(shape, tuning, examples, 32, clipper, engine)

    asked = Asked(2, device_of("cpu"), 4, clipper, positions=32, parts=2)
    ways = ways_of(asked, paper_of)
    assert [way.parts for way in ways] == [1, 1, 2]
    for way in ways:
        first = advice.noise_table(asked, paper_of, way)[0]
        assert first["rows_seconds"] == pytest.approx(way.seconds["noise"]), way.name


def test_noise_is_planned_for_the_owner_of_most() -> None:
    """Of two replicas the second: the first one has the largest tensor, and sends as much."""
    shape, clipper = small_shape(64, 32, 1, 48), Clipper(1.0)

    def paper_of(examples: int, engine: Any, parts: int) -> Any:
        found = paper_of_shape(shape, Tuning(dtype="float32"), examples, 8, clipper, engine)
        sizes = (5000, 4000, 3000)
        like = zip(found.parameters, sizes, strict=False)
        return replace(found, parameters=tuple(replace(p, entries=n) for p, n in like))

    asked = Asked(2, device_of("cpu"), 4, clipper, bands=8)
    way = ways_of(asked, paper_of)[0]
    row = {row["bands"]: row for row in advice.noise_table(asked, paper_of, way)}[8]
    assert way.memory.resident["noise rows"] == 4 * 7 * 7000 == row["rows_bytes"]
    assert way.seconds["noise"] == pytest.approx(row["rows_seconds"])


def test_what_does_not_fit_is_said(folder: str) -> None:
    found = asked(
        *("plan", "--devices", "2", "--device", "cpu", "--model", folder, "--length", "32"),
        *("--batch-size", "1", "--bands", "60000"),
    )
    said = "\n".join(found["warnings"])
    assert "do not fit" in said and "noise rows" in said and "regenerate" in said
    assert "gives 1 of 2 devices no record" in said
    assert not found["ways"][0]["fits"] and found["ways"][0]["largest_physical_batch"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "llama-8b"], "--devices N"),
        (["--devices", "0", "--model", "llama-8b"], "devices=0"),
        (["--devices", "2", "--model", "llama-9b"], "llama-9b"),
        (["--devices", "2", "--model", "llama-8b", "--device", "h300"], "h300"),
        (["--devices", "2", "--lora", "4"], "--lora goes with --model"),
        (["--devices", "2", "--model", "llama-8b", "--set", "a=1"], "give one of them"),
        (["--devices", "2", "--model", "llama-8b", "--estimator", "hutch:x"], "hutch:x"),
        (["--devices", "2", "--model", "llama-8b", "--estimator", "hutch:"], "after its colon"),
        (["--devices", "2", "--model", "llama-8b", "--estimator", "hutch:²"], "after its colon"),
        (["--devices", "2", "--model", "llama-8b", "--estimator", "exact:8"], "does not take"),
        (["--devices", "2", "--model", "llama-8b", "--hours", "-1"], "hours=-1"),
        (["--devices", "2", "--model", "llama-8b", "--efficiency", "0"], "efficiency=0"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str) -> None:
    found = CliRunner().invoke(app, ["plan", *words])
    assert found.exit_code != 0
    assert isinstance(found.exception, ValueError) and message in str(found.exception)


def test_the_code_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(code, "docs/many_devices.md", "exec"), {"__name__": "page"})
    said = capsys.readouterr().out
    assert len(said.splitlines()) == 3
    assert f"```text\n{said}```" in PAGE


@pytest.mark.slow("two preparations of the packaged model")
def test_a_head_above_kept_states_is_planned_for_replicas_alone() -> None:
    """Shards run the frozen layers in every step; the small step would be no plan of theirs."""
    words = ("plan", "--devices", "2", "--device", "cpu")
    kept = asked(*words)
    assert [way["way"] for way in kept["ways"]] == ["replicas"]
    assert any("--set training.sharded=true" in line for line in kept["warnings"])
    run = asked(*words, "--set", "training.sharded=true")
    assert [way["way"] for way in run["ways"]] == ["replicas", "sharded"]
    assert run["ways"][1]["step_seconds"] > 1000 * kept["ways"][0]["step_seconds"]
    assert not any("training.sharded" in line for line in run["warnings"])


@pytest.mark.slow("SmolLM2 on paper: its clipping runs on shapes")
def test_the_small_command_of_the_page_runs() -> None:
    found = asked(*shlex.split(COMMANDS[0]))
    assert [way["fits"] for way in found["ways"]] == [True, True]


@pytest.mark.slow("a model of 70 billion parameters on paper, a minute")
def test_the_table_of_the_page_is_the_commands() -> None:
    found = asked(*shlex.split(COMMANDS[1]))
    for row in table(found):
        assert row in PAGE


def table(found: dict[str, Any]) -> list[str]:
    """Rows of the page's table."""

    def cells(name: str, values: list[str]) -> str:
        return f"| {name} | {' | '.join(values)} |"

    ways = found["ways"]
    gb = [
        cells(name, [f"{way['resident_bytes'][name] / 1e9:,.1f}" for way in ways])
        for name in ("parameters", "optimiser", "gradients", "noise rows")
    ]
    return [
        *gb,
        cells("most of a step", [f"{max(w['phase_bytes'].values()) / 1e9:,.1f}" for w in ways]),
        cells("most at once", [f"{way['peak_bytes'] / 1e9:,.1f}" for way in ways]),
        cells("GB sent a step", [f"{sum(w['sent_bytes'].values()) / 1e9:,.0f}" for w in ways]),
        cells("seconds a step", [f"{way['step_seconds']:,.0f}" for way in ways]),
    ]
