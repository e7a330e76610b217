"""``quietgrad compare``: runs, resumes, tunes, and reports what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quietgrad.cli.progress.lines import Lines
from quietgrad.comparing.comparison import best_rate, open_runs, read_results
from quietgrad.comparing.runner import ComparisonRunner
from quietgrad.comparing.table import Run, load_comparison
from quietgrad.report.comparison import Interval, Series, markdown, rows, steps_to

WriteComparison = Callable[..., Path]
SAME = "the_same_as_the_baseline_by_another_name"


@pytest.fixture
def write_comparison(tiny_bert: Path, csv_file: Path, tmp_path: Path) -> WriteComparison:
    def write(extra: str = "", **changed: Any) -> Path:
        table = {
            "epsilons": [2.0, 8.0], "seeds": 3, "tuning_seeds": 2, "learning_rates": [1e-3, 1e-2],
            "protocol_rate": 1e-3,
            "head_rate": 2.0, "eval_every": 2, "title": "tiny",
        } | changed  # fmt: skip
        lines = ["[comparison]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
        lines += [
            "[variants.baseline]",
            "[variants.paper]",
            'denoising.method = "published"',
            extra,
        ]
        lines += [
            "[model]",
            f"name = {json.dumps(str(tiny_bert))}",
            "lora_rank = 2",
            "max_length = 16",
        ]
        lines += [
            "[data]",
            "public = true",
            f"source = {json.dumps(str(csv_file))}",
            "validation_fraction = 0.2",
            "test_fraction = 0.2",
        ]
        lines += ["[training]", "expected_batch_size = 24", "steps = 4", 'precision = "float32"']
        path = tmp_path / "comparison.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def test_from_runs_to_table_and_figure(quietgrad: Any, write_comparison: WriteComparison) -> None:
    path = write_comparison(epsilons=[2.0], seeds=2, tuning_seeds=1)
    code, out, err = quietgrad("compare", path, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["missing_runs"] == 0 and "the runs add up" in report["guarantee"]
    assert Path(report["figure"]).read_bytes().startswith(b"\x89PNG")
    assert set(report["tables"]) == {"one rate", "tuned"}
    assert report["tables"]["tuned"].count("\n") == 3  # two lines of head, two variants

    comparison = load_comparison(path)
    results = read_results(comparison)
    grid = 2 * 2  # of variants and rates, with one seed to tune by
    best = {v: best_rate(comparison, results, v, 2.0) for v in ("baseline", "paper")}
    assert len(results) == grid + sum(len({rate, 1e-3}) for rate in best.values())
    for record in results.values():
        assert [step for step, _ in record["curve"]] == [2, 4]
    # Nothing is run twice.
    before = comparison.results.read_bytes()
    assert quietgrad("compare", path, "--json")[0] == 0
    assert comparison.results.read_bytes() == before


def test_it_says_how_far_it_is_without_a_terminal(
    quietgrad: Any, write_comparison: WriteComparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lines, "EVERY", 0.0)
    path = write_comparison(epsilons=[2.0], seeds=1, tuning_seeds=1, learning_rates=[1e-3])
    code, out, err = quietgrad("compare", path)
    lines = out.splitlines()
    assert code == 0 and err == "" and lines[1].startswith("reading ")
    assert [line for line in lines if line.startswith("comparing, step ")] == [
        f"comparing, step {step}/8 (run {1 + (step > 4)} of 2), about 1 min left"
        for step in range(2, 9)
    ]


def test_a_line_that_a_kill_cut_off_is_run_again(
    quietgrad: Any, write_comparison: WriteComparison
) -> None:
    """Before: an error of JSON's, at every start, until somebody mended the file by hand."""
    path = write_comparison(epsilons=[2.0], seeds=1, tuning_seeds=1, learning_rates=[1e-3])
    comparison = load_comparison(path)
    assert quietgrad("compare", path, "--json")[0] == 0
    whole = comparison.results.read_text()
    comparison.results.write_text(whole[:-40])
    assert len(read_results(comparison)) == 1
    code, out, err = quietgrad("compare", path, "--json")
    assert code == 0 and json.loads(out)["missing_runs"] == 0, err
    assert len(comparison.results.read_text().splitlines()) == 3
    assert len(read_results(comparison)) == 2


def test_two_shards_make_each_run_once(quietgrad: Any, write_comparison: WriteComparison) -> None:
    path = write_comparison(epsilons=[2.0], seeds=1, tuning_seeds=1)
    made = []
    for shard in ("0/2", "1/2"):
        assert quietgrad("compare", path, "--shard", shard, "--json")[0] == 0
        made.append(len(read_results(load_comparison(path))))
    lines = load_comparison(path).results.read_text().splitlines()
    assert made[-1] == len(lines) == 4


def test_distinct_counts_equal_inputs_once(
    quietgrad: Any, write_comparison: WriteComparison, csv_file: Path, tmp_path: Path
) -> None:
    """Evaluated on one of each, and runs of the other protocol are not taken for it."""
    lines = csv_file.read_text().splitlines()
    repeated = tmp_path / "repeated.csv"
    repeated.write_text("\n".join([*lines, *lines[1:41]]) + "\n")  # 40 records a second time

    def write(**table: Any) -> Path:
        path = write_comparison(**table)
        path.write_text(path.read_text().replace(str(csv_file), str(repeated)))
        return path

    few: dict[str, Any] = {
        "epsilons": [2.0],
        "seeds": 1,
        "tuning_seeds": 1,
        "learning_rates": [1e-3],
    }
    path = write(**few)
    code, out, _ = quietgrad("compare", path, "--json")
    assert code == 0 and set(json.loads(out)["tables"]) == {
        "one rate"
    }  # one rate leaves nothing to tune
    everything = read_results(load_comparison(path))
    path = write(**few, distinct=True)
    comparison = load_comparison(path)
    assert len(open_runs(comparison, read_results(comparison))) == 2
    bench = ComparisonRunner(comparison)
    for name, kept in bench.counted.items():
        part = getattr(bench.prepared, name)
        inputs = [
            tuple(part.collate(np.array([i]), torch.device("cpu"))["input_ids"][0].tolist())
            for i in range(len(part))
        ]
        assert len(set(inputs)) == len({inputs[i] for i in kept}) == len(kept) < len(part)
    run = next(iter(everything))
    found = bench.train(run)
    for value, count in (
        (found["curve"][-1][1], bench.counted["validation"]),
        (found["test"], bench.counted["test"]),
    ):
        assert value * len(count) == pytest.approx(round(value * len(count)), abs=1e-6)
    with pytest.raises(ValueError, match=r"comparison\.distinct=1 must be true or false"):
        load_comparison(write(**few, distinct=1))


def test_seeds_pair_the_variants(quietgrad: Any, write_comparison: WriteComparison) -> None:
    """A variant that changes nothing gives the baseline's curve, seed by seed."""
    path = write_comparison(
        f'[variants.{SAME}]\ndenoising.method = "none"',
        epsilons=[2.0],
        seeds=2,
        learning_rates=[1e-3],
    )
    code, _, err = quietgrad("compare", path, "--json")
    told = [line for line in err.splitlines() if line.startswith((SAME, "baseline, "))]
    # One line a run, however long a variant's name is.
    assert code == 0 and len(told) == 4
    left = r"; \d+ runs? left, beside any that scores will choose"
    assert all(re.search(left + "$", line) for line in told)
    results = read_results(load_comparison(path))
    for run, record in results.items():
        if run.variant == SAME:
            assert (
                record["curve"]
                == results[Run("baseline", run.epsilon, run.rate, run.seed)]["curve"]
            )


def test_a_picture_of_somebody_elses_stays(
    quietgrad: Any, write_comparison: WriteComparison
) -> None:
    path = write_comparison(epsilons=[2.0], seeds=1, tuning_seeds=1)
    figure = path.parent / "comparison.png"
    figure.write_bytes(b"\x89PNG of somebody else's")
    for option in ((), ("--report",)):
        code, _, err = quietgrad("compare", path, *option)
        assert code == 2 and "comparison.figure=" in err and "quietgrad did not write it" in err
    assert figure.read_bytes() == b"\x89PNG of somebody else's"
    figure.unlink()
    for option in ((), ("--report",)):
        assert quietgrad("compare", path, *option)[0] == 0


def test_changed_settings_are_run_again(quietgrad: Any, write_comparison: WriteComparison) -> None:
    path = write_comparison(epsilons=[2.0], seeds=1, tuning_seeds=1)
    assert quietgrad("compare", path, "--json")[0] == 0
    changed = write_comparison(epsilons=[2.0], seeds=1, tuning_seeds=1, head_rate=3.0)
    comparison = load_comparison(changed)
    assert len(open_runs(comparison, read_results(comparison))) == 4


@pytest.mark.parametrize(
    ("extra", "changed", "message"),
    [
        ("", {"protocol_rate": 0.5}, "protocol_rate=0.5"),
        ("", {"reference": "nobody"}, "reference='nobody'"),
        ("", {"seeds": 1}, "seeds"),
        ("", {"epsilons": [0.0]}, "epsilons"),
        ("", {"speed": 3}, "unknown key comparison.speed"),
        ("", {"eval_every": "often"}, "eval_every='often'"),
        ("[variants.odd]\nmodel.lora_rank = 4", {}, "variants.odd.model.lora_rank cannot vary"),
        ("[variants.odd]\nprivacy.enabled = false", {}, "privacy.enabled=false"),
        ('[variants.odd]\nmethod = "paper"', {}, "must be a key of a table"),
        ('[variants.odd]\ndenoising.methods = "published"', {}, "denoising.methods"),
        ('[variants.odd]\ndenoising.method = "papr"', {}, "denoising.method='papr'"),
    ],
)
def test_bad_comparisons(
    quietgrad: Any, write_comparison: WriteComparison, extra: str, changed: dict, message: str
) -> None:
    code, _, err = quietgrad("compare", write_comparison(extra, **changed))
    assert code == 2
    assert message in " ".join(err.split())


def test_a_page_that_cannot_be_written_is_refused_before_any_run(
    quietgrad: Any, write_comparison: WriteComparison, tmp_path: Path
) -> None:
    """It was refused after the last run."""
    path = write_comparison()
    for html, said in (("page.pdf", "must end in .html"), ("none/page.html", "no such folder")):
        code, _, err = quietgrad("compare", path, "--html", tmp_path / html)
        assert code == 2 and err.startswith("error: --html=") and said in err
    code, _, err = quietgrad("compare", path, "--accounted", "--html", tmp_path / "page.html")
    assert code == 2 and "with --accounted" in err and err.count("\n") == 1
    assert quietgrad("compare", path, "--shard", "2/2")[0] == 2
    assert not load_comparison(path).results.exists()


def test_a_single_run_is_no_comparison(quietgrad: Any, write_config: Any, settings: dict) -> None:
    code, _, err = quietgrad("compare", write_config(settings))
    assert code == 2 and "[comparison]" in err
    code, _, err = quietgrad("compare", "nowhere.toml")
    assert code == 2 and "no such file" in err


def test_bad_shards(quietgrad: Any, write_comparison: WriteComparison) -> None:
    for shard in ("2/2", "1", "a/b"):
        code, _, err = quietgrad("compare", write_comparison(), "--shard", shard)
        assert code == 2 and "--shard" in err


def test_steps_to_an_accuracy() -> None:
    curve = [(10, 0.5), (20, 0.6), (30, 0.55), (40, 0.8)]
    assert steps_to(curve, 0.4) == 10
    assert steps_to(curve, 0.55) == pytest.approx(15)
    assert steps_to(curve, 0.7) == pytest.approx(36)
    assert steps_to(curve, 0.9) is None


def test_rows_against_hand_computation() -> None:
    base = Series(1e-3, {0: [(10, 0.5), (20, 0.8)], 1: [(10, 0.5), (20, 0.8)]}, {0: 0.70, 1: 0.72})
    fast = Series(
        1e-2, {0: [(10, 0.76), (20, 0.8)], 1: [(10, 0.76), (20, 0.8)]}, {0: 0.71, 1: 0.75}
    )
    table = rows({3.0: {"fast": fast, "base": base}}, "base", [0.95])
    assert [r.variant for r in table] == ["base", "fast"]
    assert table[0].difference is None and table[1].difference is not None
    assert table[1].difference.mean == pytest.approx(0.02)
    assert table[1].difference.half == pytest.approx(
        12.706 * 0.01, rel=1e-3
    )  # t with one degree of freedom
    assert table[0].steps[0] == pytest.approx(10 + 10 * (0.76 - 0.5) / 0.3)
    assert table[1].steps == (10,) and table[1].speed_up[0] == pytest.approx(table[0].steps[0] / 10)  # type: ignore[operator]
    assert "| 3 | fast | 0.01 | 2 | 0.7300 ± " in markdown(table, [0.95])


def test_one_seed_has_no_interval() -> None:
    assert f"{Interval.of([0.5]):.3f}" == "0.500 (one seed)"
    assert f"{Interval.of([0.5, 0.6]):+.2f}" == "+0.55 ± 0.64"
