"""Searches in a comparison: studies that stop and resume anywhere, what reaches the runs, and a
small real search.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from searches import LEARNING_RATE, NORMS, ONE_METHOD, RATES, ROOT, table

from quietgrad.comparing.comparison import (
    chosen_run,
    open_runs,
    read_results,
    run_comparison,
    runs_left,
)
from quietgrad.comparing.search import propose
from quietgrad.comparing.table import Comparison, Run, load_comparison
from quietgrad.denoising import PersistentAmplification

WriteComparison = Callable[..., Path]


@pytest.fixture
def write_comparison(pictures: Path, tmp_path: Path) -> WriteComparison:
    def write(search: str = "", name: str = "comparison", **changed: Any) -> Path:
        values: dict[str, Any] = {
            "results": f"{name}.jsonl", "figure": f"{name}.png", "epsilons": [4.0], "seeds": 3,
            "tuning_seeds": 2,
            "eval_every": 2,
        } | changed  # fmt: skip
        path = tmp_path / f"{name}.toml"
        path.write_text(
            "\n".join(
                [
                    "[comparison]",
                    *(f"{k} = {json.dumps(v)}" for k, v in values.items()),
                    '[variants.baseline]\n[variants.denoised]\ndenoising.method = "persistent"',
                    search or f"[search]\ntrials = 3\nstartup = 2\n{RATES}\n{NORMS}\n{ONE_METHOD}",
                    '[model]\nname = "features:random"\ntune = "head"',
                    f"[data]\npublic = true\nsource = {json.dumps(str(pictures))}\nimage_size = "
                    "8\nvalidation_fraction = 0.3",
                    '[optimizer]\nname = "sgd"\nmomentum = 0.5',
                    '[training]\nexpected_batch_size = 24\nsteps = 4\nprecision = "float32"',
                ]
            )
            + "\n"
        )
        return path

    return write


@pytest.mark.parametrize(
    ("extra", "changed", "message"),
    [
        ("", {"learning_rates": [0.1], "protocol_rate": 0.1},
         r"are a grid, and \[search\] takes its place"),
        ("", {"learning_rates": [1e-3]}, r"are a grid, and \[search\] takes its place"),
        ("", {"protocol_rate": 1e-3}, r"are a grid, and \[search\] takes its place"),
        ('[search.ranges."model.lora_rank"]\nlow = 2\nhigh = 8', {},
         '"model.lora_rank" cannot vary'),
        ('[search.ranges."data.image_size"]\nchoices = [8, 16]', {},
         '"data.image_size" cannot vary'),
        ('[search.ranges."training.seed"]\nlow = 1\nhigh = 9', {}, '"training.seed" cannot vary'),
        ('[search.ranges."privacy.target_epsilon"]\nlow = 1.0\nhigh = 8.0', {},
         '"privacy.target_epsilon" cannot vary'),
        ('[search.ranges."privacy.target_delta"]\nlow = 0.1\nhigh = 0.2', {},
         '"privacy.target_delta" cannot vary'),
        ('[search.ranges."privacy.noise_multiplier"]\nlow = 1.0\nhigh = 2.0', {},
         '"privacy.noise_multiplier" cannot'),
        ('[search.ranges."speed"]\nlow = 1.0\nhigh = 2.0', {}, '"speed" cannot vary'),
        ('[search.ranges."optimizer.speed"]\nlow = 1.0\nhigh = 2.0', {},
         "unknown key optimizer.speed"),
        ('[search.ranges."denoising.kappa"]\nlow = 0.5\nhigh = 2.0\nvariants = ["denoised"]', {},
         "denoising.kappa=0.5"),
        ('[search.ranges."denoising.kappa"]\nlow = 1.0\nhigh = 2.0', {},
         "no key of denoising.method='none'"),
        ('[search.ranges."denoising.method"]\nchoices = ["publish", "none"]', {},
         "denoising.method='publish'"),
        ('[search.ranges."noise.bands"]\nlow = 1\nhigh = 4\nvariants = ["denoise"]', {},
         "'denoise', which is no"),
        ('[search.ranges."noise.bands"]\nlow = 4\nhigh = 1', {}, "low < high"),
    ],
)  # fmt: skip
def test_bad_searches_are_refused_before_any_work(
    write_comparison: WriteComparison, extra: str, changed: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_comparison(write_comparison(f"[search]\ntrials = 3\n{RATES}\n{extra}", **changed))


def test_a_search_without_learning_rates_is_refused(
    quietgrad: Any, write_comparison: WriteComparison
) -> None:
    code, _, err = quietgrad("compare", write_comparison(f"[search]\ntrials = 3\n{NORMS}"))
    assert code == 2 and 'has no "optimizer.learning_rate"' in err and err.count("\n") == 1


def line_of(comparison: Comparison, run: Run) -> dict[str, Any]:
    """A finished run that nobody trained: better near a rate of 0.1 and at large norms, and
    different by seed.
    """
    norm = dict(run.settings).get("privacy.max_grad_norm", 1.0)
    score = math.exp(-(math.log10(run.rate / 0.1) ** 2)) * norm / (1 + norm) + 0.5 * math.sin(
        90 * run.rate + run.seed
    )
    return run.record() | {
        "key": comparison.key_of(run),
        "curve": [[2, 0.5], [4, score]],
        "test": score,
    }


def append(comparison: Comparison, run: Run) -> None:
    with comparison.results.open("a") as file:
        file.write(json.dumps(line_of(comparison, run)) + "\n")


def test_however_a_search_is_stopped_its_trials_are_the_same(
    write_comparison: WriteComparison,
) -> None:
    search = f"[search]\ntrials = 5\nstartup = 2\n{RATES}\n{NORMS}\n{ONE_METHOD}"
    rng = np.random.default_rng(0)
    made = []
    for attempt in range(3):
        comparison = load_comparison(write_comparison(search, f"attempt{attempt}"))
        left = runs_left(comparison, {})
        assert left == 2 * (5 * 2 + 1)
        while todo := open_runs(comparison, read_results(comparison)):
            # One run at a time, in any order, each time read from the file: as if the process had
            # died after it.
            append(comparison, todo[0 if attempt == 0 else rng.integers(len(todo))])
            left -= 1
            assert runs_left(comparison, read_results(comparison)) == left
        assert left == 0
        made.append(set(read_results(comparison)))
    assert made[0] == made[1] == made[2]


def test_every_variant_gets_as_many_trials_and_its_best_gets_the_other_seeds(
    write_comparison: WriteComparison,
) -> None:
    comparison = load_comparison(write_comparison(epsilons=[2.0, 4.0]))
    while todo := open_runs(comparison, read_results(comparison)):
        assert {run.trial for run in todo} <= {0, 1, 2}
        append(comparison, todo[0])
    results = read_results(comparison)
    for variant in ("baseline", "denoised"):
        for epsilon in (2.0, 4.0):
            runs = [run for run in results if (run.variant, run.epsilon) == (variant, epsilon)]
            assert sorted((run.trial, run.seed) for run in runs if run.seed < 2) == [
                (trial, seed) for trial in range(3) for seed in range(2)
            ]
            final = {(r.trial, r.seed): results[r]["curve"][-1][1] for r in runs}
            means = {trial: (final[trial, 0] + final[trial, 1]) / 2 for trial in range(3)}
            best = max(means, key=means.__getitem__)
            assert [run.trial for run in runs if run.seed == 2] == [best]
            chosen = chosen_run(comparison, results, variant, epsilon)
            assert (
                chosen is not None
                and (chosen.trial, chosen.seed) == (best, 0)
                and chosen in results
            )
            assert ("denoising.kappa" in dict(chosen.settings)) == (variant == "denoised")
    some = {run: record for run, record in results.items() if run.trial != 2}
    assert chosen_run(comparison, some, "baseline", 2.0) is None


def test_settings_reach_the_configuration_of_their_run(write_comparison: WriteComparison) -> None:
    comparison = load_comparison(write_comparison())
    run = Run(
        "denoised", 4.0, 0.25, 1, (("denoising.kappa", 1.5), ("privacy.max_grad_norm", 0.3)), 2
    )
    config = comparison.config_of(run)
    assert config.denoising == PersistentAmplification(kappa=1.5)
    assert (config.privacy.max_grad_norm, config.privacy.target_epsilon) == (0.3, 4.0)
    assert (config.optimizer.learning_rate, config.training.seed) == (0.25, 1)
    other = Run(
        "denoised", 4.0, 0.25, 1, (("denoising.kappa", 1.5), ("privacy.max_grad_norm", 0.4)), 2
    )
    assert comparison.key_of(run) != comparison.key_of(other)
    assert Run.of(json.loads(json.dumps(run.record()))) == run


class Stopped(Exception):
    pass


def facts(comparison: Comparison) -> dict[Run, tuple]:
    """What does not depend on how fast the machine is."""
    return {
        run: (r["curve"], r["test"], r["noise_multiplier"])
        for run, r in read_results(comparison).items()
    }


def test_a_real_search_stops_resumes_is_shared_and_reported(
    quietgrad: Any, write_comparison: WriteComparison
) -> None:
    whole = load_comparison(write_comparison(name="whole", tuning_seeds=1, seeds=2))
    made: list[Run] = []
    run_comparison(whole, lambda run, record, left: made.append(run))
    assert len(made) == len(set(made)) == 2 * (3 + 1) and runs_left(whole, read_results(whole)) == 0
    for line in map(json.loads, whole.results.read_text().splitlines()):
        wanted = {"privacy.max_grad_norm"} | (
            {"denoising.kappa"} if line["variant"] == "denoised" else set()
        )
        assert set(dict(line["settings"])) == wanted and line["trial"] in (0, 1, 2)
    # Learning rates and clipping norms of the random trials are shared, and differ from trial to
    # trial.
    shared = [
        {(r.trial, r.rate) for r in made if r.variant == v and r.trial < 2}
        for v in ("baseline", "denoised")
    ]
    assert shared[0] == shared[1] and len({rate for _, rate in shared[0]}) == 2

    stopped = load_comparison(write_comparison(name="stopped", tuning_seeds=1, seeds=2))

    def stop(run: Run, record: dict[str, Any], left: int) -> None:
        if len(stopped.results.read_text().splitlines()) in (1, 4):
            raise Stopped

    for lines in (1, 4):
        with pytest.raises(Stopped):
            run_comparison(stopped, stop)
        assert len(read_results(stopped)) == lines
    code, out, _ = quietgrad("compare", stopped.path, "--report", "--json")
    report = json.loads(out)
    assert code == 0 and report["missing_runs"] == 4 and len(read_results(stopped)) == 4
    run_comparison(stopped, stop)
    assert facts(stopped) == facts(whole)

    parts = load_comparison(write_comparison(name="parts", tuning_seeds=1, seeds=2))
    for shard in ((0, 2), (1, 2)):
        run_comparison(parts, lambda run, record, left: None, shard)
        assert len({run.variant for run in read_results(parts)}) == shard[0] + 1
    assert facts(parts) == facts(whole) and runs_left(parts, read_results(parts)) == 0

    code, out, _ = quietgrad("compare", whole.path, "--report", "--json")
    report = json.loads(out)
    assert code == 0 and report["missing_runs"] == 0 and set(report["tables"]) == {"tuned"}
    assert Path(report["figure"]).read_bytes().startswith(b"\x89PNG")
    rows = report["tables"]["tuned"].splitlines()[2:]
    for variant, row in zip(("baseline", "denoised"), rows, strict=True):
        best = chosen_run(whole, read_results(whole), variant, 4.0)
        assert best is not None
        found = ", ".join(f"{k.rpartition('.')[2]} {v:g}" for k, v in best.settings)
        assert (
            f"| 4 | {variant} | {best.rate:g}, {found} | 2 | " in row and "max_grad_norm" in found
        )
    code, out, _ = quietgrad("compare", whole.path, "--report")
    assert code == 0 and rows[0] in out and rows[1] in out


def test_lines_of_a_grid_are_as_before_and_no_trials(write_comparison: WriteComparison) -> None:
    grid = load_comparison(write_comparison("[privacy]", learning_rates=[1e-3, 1e-2]))
    run = open_runs(grid, {})[0]
    assert set(run.record()) == {"variant", "epsilon", "rate", "seed"}
    append(grid, run)
    assert read_results(grid) == {run: line_of(grid, run)} and runs_left(grid, {run: {}}) == 7
    searched = load_comparison(write_comparison())  # the same results file
    assert read_results(searched) == {} and grid.results == searched.results
    trial = open_runs(searched, {})[0]
    append(searched, trial)
    assert set(read_results(searched)) == {trial} and set(read_results(grid)) == {run}


@pytest.mark.parametrize("recipe", ["noisecurve_search", "noisecurve_convex"])
def test_committed_searches_go_on_from_their_results(recipe: str) -> None:
    comparison = load_comparison(ROOT / "recipes" / f"{recipe}.toml")
    lines = [json.loads(line) for line in comparison.results.read_text().splitlines()]
    assert lines and set(read_results(comparison)) == {Run.of(line) for line in lines}


@pytest.mark.parametrize("recipe", ["denoising_public_head", "noisecurve", "noisecurve_more"])
def test_results_of_before_there_were_searches_are_still_those_of_their_recipe(recipe: str) -> None:
    comparison = load_comparison(ROOT / "recipes" / f"{recipe}.toml")
    lines = [json.loads(line) for line in comparison.results.read_text().splitlines()]
    assert lines and not any({"settings", "trial"} & set(line) for line in lines)
    assert set(read_results(comparison)) == {Run.of(line) for line in lines}


def test_without_optuna_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"pip install 'quietgrad\[search\]'"):
        propose(table(LEARNING_RATE), "other", [])
