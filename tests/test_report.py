"""The report of a run: everything in it follows from the run's own files, and what cannot be shown
is said or refused.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from quietgrad.accounting import attack_success, epsilon, trade_off
from quietgrad.beside import AdaptiveClipping
from quietgrad.events import PoissonGaussian, RandomizedClipping, SideRelease
from quietgrad.ledger import LedgerWriter, SessionStart
from quietgrad.report.run.facts import RunFacts, read_run
from quietgrad.report.run.report import card_of, page_of
from quietgrad.report.run.statement import statement
from quietgrad.report.words import in_words, right_guesses
from quietgrad.schedules import Course, StepSettings

EVENT = PoissonGaussian(1.5, 0.1, 40)
CONFIG = """[model]
name = "packaged:minilm"
head = "layers"
tune = "head"
[data]
source = "<b>reviews.csv</b>"
[training]
steps = 40
expected_batch_size = 100
"""


def write_run(
    path: Path,
    releases: int = 40,
    source: str = "entropy",
    event: PoissonGaussian = EVENT,
    course: Course | None = None,
    source_name: str = "keyed",
    **result: Any,
) -> Path:
    path.mkdir()
    (path / "config.toml").write_text(CONFIG)
    facts = {"planned_steps": 40, "delta": 1e-4, "dataset_size": 1000, "max_grad_norm": 1.0}
    with LedgerWriter(path / "ledger.jsonl") as ledger:
        said = {"neighbouring": "add-remove", "noise_source": source_name}
        ledger.mechanism(event, course, **facts, **said)
        ledger.session(SessionStart(0, "a" * 32, "b" * 32, source))
        for step in range(releases):
            ledger.release(step, None if course is None else course.at(step))
    lines = [{"step": s, "validation_accuracy": 0.5 + s / 100} for s in (10, 20)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"s')
    if result:
        (path / "result.json").write_text(json.dumps(result))
    return path


FINISHED = {
    "private": True,
    "metrics": {"accuracy": 0.7543, "validation_accuracy": 0.76},
    "metric": "accuracy",
    "records": {"train": 1000, "validation": 50, "test": 60},
    "scored_records": {"validation": 47, "test": 60},
    "epsilon": 0.1,  # a lie: the ledger is what counts
    "delta": 1e-4,
}


class Outside(HTMLParser):
    """What a page would fetch or run, and tags that were left open."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "path", "rect", "line", "use", "br"):
            self.open.append(tag)
        if tag in ("script", "link", "img", "iframe", "object"):
            self.found.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not str(value).startswith("#"):
                self.found.append(f"{name}={value}")
            if name.startswith("on"):
                self.found.append(name)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()
        elif tag not in ("path", "rect", "line", "use"):
            self.found.append(f"stray </{tag}>")


def rows(facts: RunFacts) -> dict[str, str]:
    return dict(statement(facts))


def test_the_statement_is_the_ledgers(tmp_path: Path) -> None:
    facts = read_run(write_run(tmp_path / "run", **FINISHED))
    spent = epsilon(EVENT, 1e-4)
    said = float(re.findall(r"\((\d+\.\d+), ", rows(facts)["Claim"])[0])
    assert spent <= said <= spent + 1e-4 and said > 0.1  # never what result.json says
    last = json.loads((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[-1])
    assert rows(facts)["Ledger"].endswith(last["chain"])
    assert "40 releases in 42 lines" in rows(facts)["Ledger"]
    for word in ("rate 0.1", "from 1,000 records"):
        assert word in rows(facts)["Sampling"]
    assert "multiplier 1.5000" in rows(facts)["Noise"] and "Philox" in rows(facts)["Noise"]
    assert "operating system's entropy" in rows(facts)["Seed policy"]
    assert "0.1 of 1/N" in rows(facts)["Delta"]


def test_the_statement_says_that_lengths_are_estimated(tmp_path: Path) -> None:
    exact = rows(read_run(write_run(tmp_path / "exact")))["Clipping"]
    assert "an upper bound of its length" in exact and "random" not in exact
    sketched = replace(EVENT, clipping=RandomizedClipping(32, "convex"))
    found = rows(read_run(write_run(tmp_path / "sketched", event=sketched)))["Clipping"]
    assert "estimated at random (k = 32)" in found and "convex envelope" in found
    assert "upper bound" not in found


def test_an_unfinished_run_says_what_it_has_spent(tmp_path: Path) -> None:
    facts = read_run(write_run(tmp_path / "run", releases=12))
    assert facts.epsilon == epsilon(EVENT.after(12), 1e-4) and not facts.finished
    assert "over all 12 releases of 40 planned" in rows(facts)["Claim"]
    page = page_of(facts)
    assert "not finished, 12 of 40 steps" in page and "validation accuracy so far" in page


def test_what_an_attacker_can_do_is_the_trade_offs() -> None:
    """Guessing right: no threshold on the curve gives more; and in words it is rounded up."""
    best = right_guesses(EVENT)
    rates = [i / 400 for i in range(401)]
    by_curve = max(1 - (a + b) / 2 for a, b in zip(rates, trade_off(EVENT, rates), strict=True))
    assert by_curve <= best + 1e-9 and best == pytest.approx(by_curve, abs=2e-3)
    assert f"at most {math.ceil(100 * best)} times" in in_words(EVENT, "add-remove")
    assert 0.5 < best < 0.9
    assert "user" in in_words(EVENT, "add-remove-user")


def test_the_page_stands_alone_and_escapes_what_it_is_given(tmp_path: Path) -> None:
    page = page_of(read_run(write_run(tmp_path / "run", **FINISHED)))
    outside = Outside()
    outside.feed(page)
    assert outside.found == [] and outside.open == []
    assert page.count("<svg") == 2 and "url(http" not in page and "@import" not in page
    assert "<b>reviews" not in page and "&lt;b&gt;reviews.csv" in page
    assert "validation 47 of 50, test 60" in page
    hits = math.ceil(1000 * attack_success(EVENT, 0.01) - 1e-9) / 10
    assert f"finds at most {hits:g} in 100" in page and "Signature" in page
    assert "#0102" not in page and "var(--claim)" in page and "prefers-color-scheme: dark" in page


def test_public_records_are_said_to_be(tmp_path: Path) -> None:
    public = FINISHED | {"data_declared_public": True}
    page = page_of(read_run(write_run(tmp_path / "run", source="public seed", **public)))
    assert "protects nobody" in page and "nobody is protected" in page


def test_a_run_without_privacy_claims_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.toml").write_text(CONFIG)
    (path / "result.json").write_text(json.dumps(FINISHED | {"private": False, "epsilon": None}))
    facts = read_run(path)
    assert list(rows(facts)) == ["Claim"] and rows(facts)["Claim"].startswith("None")
    page = page_of(facts)
    assert "Signature" not in page and "a run without privacy" in page
    given_up = write_run(tmp_path / "other", **FINISHED)
    with LedgerWriter(given_up / "ledger.jsonl", resume=True) as ledger:
        ledger.not_private("a look inside")
    assert read_run(given_up).epsilon is None
    assert "a look inside" in rows(read_run(given_up))["Claim"]


def audit_of(event: PoissonGaussian, **more: Any) -> dict[str, Any]:
    point = {"false_positive": 0.2, "false_positive_limits": [0.1, 0.3]}
    point |= {"false_negative": 0.7, "false_negative_limits": [0.6, 0.8]}
    said = {"event": event.to_json(), "points": [point], "lower_bound": 0.3, "canaries": 100}
    return said | {"verdict": "Not refuted: this attack shows ...", "refuted": False} | more


def test_an_audit_is_drawn_where_it_is_of_this_mechanism(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", **FINISHED)
    (path / "audit.json").write_text(json.dumps(audit_of(PoissonGaussian(1.52, 0.099, 40))))
    page = page_of(read_run(path))
    assert "the audit&#39;s attack" in page or "the audit's attack" in page
    assert "with 100 canaries" in page and "Not refuted" in page
    other = tmp_path / "audit.json"
    other.write_text(json.dumps(audit_of(PoissonGaussian(1.5, 0.1, 41))))
    with pytest.raises(ValueError, match=r"--audit=.* its steps is 41, the run's 40"):
        read_run(path, other)
    other.write_text("{}")
    with pytest.raises(ValueError, match="is not what `quietgrad audit --json` prints"):
        read_run(path, other)
    with pytest.raises(ValueError, match=r"none\.json': no such file"):
        read_run(path, tmp_path / "none.json")


def test_the_card_keeps_its_head_and_has_the_whole_statement(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", **FINISHED)
    (path / "model").mkdir()
    old = "---\ntags:\n- quietgrad\n---\n# Trained\n\n## Loading\n\nso\n\n## Privacy\n\n- old\n"
    (path / "model" / "README.md").write_text(old)
    card = card_of(read_run(path))
    assert card.startswith(old.partition("- old")[0]) and "- old" not in card
    for what, text in statement(read_run(path)):
        assert f"| {what} | {text}" in card


def test_a_base_model_is_assumed_innocent_only_where_there_is_one(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", **FINISHED)
    said = "The base model did not learn from the training records"
    assert said in page_of(read_run(path))
    random = CONFIG.replace("packaged:minilm", "cnn:groupnorm")
    (path / "config.toml").write_text(random)
    assert said not in page_of(read_run(path))
    (path / "config.toml").write_text(random.replace("tune", 'weights = "w"\ntune'))
    assert said in page_of(read_run(path))


FORECAST = {
    "engine": "book-keeping: one backward pass",
    "cached_frozen_layers": True,
    "predicted_seconds": 400.2,
    "predicted_memory_mib": 774.6,
    "layers": [
        {"shape": "64 x 128", "count": 2, "estimator": "ghost", "kept": False},
        {"shape": "8 x 576", "count": 60, "estimator": "materialized", "kept": True},
    ],
}


def test_what_ran_says_engine_time_and_memory_as_they_were_expected(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", **FINISHED)
    without = page_of(read_run(path))
    assert "expected for weights" not in without and "how gradients are measured" not in without
    (path / "forecast.json").write_text(json.dumps(FORECAST))
    facts = read_run(path)
    page, card = page_of(facts), card_of(facts)
    assert "<td>64 x 128</td>" in page and "| 64 x 128 | ghost | 2 |" in card
    for text in (page, card):
        assert "one backward pass; frozen layers run once a record" in text
        assert "about 7 min expected" in text and "about 775 MiB expected" in text
        assert "materialized, kept for the sum" in text
        assert text.count("is not kept, as it tells of private batch sizes") == 2
    assert card.index("## Privacy") < card.index("## What ran")


@pytest.mark.parametrize(
    ("model", "source", "told"),
    [
        ("/home/ann/models/tiny", "/home/ann/qa.jsonl", ["tiny, head mean", "qa.jsonl"]),
        ("image:/home/ann/vit", "../ann/photos", ["image:vit", "photos"]),
        ("some-org/model", "some-org/data:en", ["some-org/model, head mean", "some-org/data:en"]),
        ("packaged:minilm", "packaged:tweets", ["packaged:minilm, head mean", "packaged:tweets"]),
    ],
)
def test_what_ran_names_no_path_of_the_machine(
    tmp_path: Path, model: str, source: str, told: list[str]
) -> None:
    path = write_run(tmp_path / "run", **FINISHED)
    (path / "config.toml").write_text(
        f'[model]\nname = "{model}"\nhead = "mean"\n[data]\nsource = "{source}"\n'
    )
    facts = read_run(path)
    assert "ann/" not in card_of(facts) + page_of(facts)
    assert f"| Model | {told[0]} |" in card_of(facts) and f"| Data | {told[1]} |" in card_of(facts)


def test_what_ran_gives_a_language_model_no_head(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", **FINISHED)
    (path / "config.toml").write_text(
        '[model]\nname = "some-org/llama"\nhead = "mean"\ntune = "lora"\n'
        '[task]\nkind = "generate"\n'
    )
    card = card_of(read_run(path))
    assert "| Model | some-org/llama |" in card and "head" not in card.partition("## What ran")[2]


def test_it_does_not_say_that_a_norm_stayed_which_changed(tmp_path: Path) -> None:
    """One that follows a noisy count, and one by a schedule, were told as the first step's."""
    plain = write_run(tmp_path / "plain", **FINISHED)
    assert "gradient is cut to length 1, by" in card_of(read_run(plain))
    count = SideRelease(AdaptiveClipping.name, 10.0)
    adapted = write_run(tmp_path / "adapted", event=replace(EVENT, beside=(count,)), **FINISHED)
    course = Course.of(StepSettings(1.5, 0.1, norm) for norm in (1.0, 0.5, 0.25))
    scheduled = write_run(tmp_path / "scheduled", 3, course=course, **FINISHED)
    for path, cut, ran in (
        (adapted, "1 in the first step and then follows the noisy count", "then by a noisy count"),
        (scheduled, "between 0.25 and 1 that was fixed for each step", "0.25 to 1, by a schedule"),
    ):
        facts = read_run(path)
        for text in (card_of(facts), page_of(facts)):
            assert "cut to length 1" not in text and cut in text and ran in text


def test_the_statement_names_the_stream_that_ran(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", source_name="secure", **FINISHED)
    assert "a cryptographic stream (AES-256)" in card_of(read_run(path))  # as noise/sources has it


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        read_run(tmp_path / "nothing")
    path = write_run(tmp_path / "run", **FINISHED)
    lines = (path / "ledger.jsonl").read_text().splitlines()
    (path / "ledger.jsonl").write_text("\n".join(lines[:-3]) + "\n")
    with pytest.raises(ValueError, match="was shortened"):
        read_run(path)
    # Lost, it is not made up for by what the result says (here less than the ledger).
    (path / "ledger.jsonl").unlink()
    with pytest.raises(ValueError, match="the result of a private run and not its ledger"):
        read_run(path)
    chosen = {"distribution": "geometric", "mean_runs": 4.0, "candidates": 2}
    (path / "result.json").write_text(json.dumps(FINISHED | {"selection": chosen}))
    assert read_run(path).epsilon == FINISHED["epsilon"]  # of the best of several, which has none
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.toml").write_text(CONFIG)
    with pytest.raises(ValueError, match="nothing was released or measured"):
        read_run(empty)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "run", **FINISHED)

    def command(*arguments: object) -> tuple[int, str, str]:
        from quietgrad.cli import main

        monkeypatch.setattr(sys, "argv", ["quietgrad", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    run: Callable[..., tuple[int, str, str]] = command
    code, out, err = run(path, "--html", tmp_path / "r.html", "--card", tmp_path / "r.md", "--json")
    said = json.loads(out)
    assert (code, err) == (0, "") and said["epsilon"] == epsilon(EVENT, 1e-4)
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert said["fingerprint"] in (tmp_path / "r.md").read_text()
    code, out, err = run(path)
    assert code == 0 and "Fingerprint" in out
    code, out, err = run(path, "--html", tmp_path / "r.pdf")
    assert code == 2 and "must end in .html" in err
    ledger = path / "ledger.jsonl"
    held = ledger.read_bytes()
    code, out, err = run(path, "--card", ledger)  # before: written over
    assert code == 2 and "must end in .md" in err and ledger.read_bytes() == held
    assert run(path, "--html", tmp_path / "r.html", "--card", tmp_path / "r.md")[0] == 0  # anew
    for option, name in (("--html", "index.html"), ("--card", "README.md")):
        (tmp_path / name).write_text("of somebody else")
        code, out, err = run(path, option, tmp_path / name)
        assert code == 2 and "is there already, and quietgrad did not write it" in err
        assert (tmp_path / name).read_text() == "of somebody else"
    code, out, err = run(tmp_path / "nowhere")
    assert code == 2 and "RUN_DIR" in err


def test_a_comparison_is_one_page() -> None:
    from quietgrad.report.comparison import Series, markdown
    from quietgrad.report.comparison import rows as compared
    from quietgrad.report.sides import comparison_page

    def series(end: float) -> Series:
        curves = {seed: [(10, 0.5), (20, end + seed / 100)] for seed in (0, 1, 2)}
        return Series(0.1, curves, {seed: end + seed / 100 for seed in curves})

    chosen = {1.0: {"plain": series(0.7), "<i>new</i>": series(0.74)}, 8.0: {"plain": series(0.8)}}
    table = compared(chosen, "plain", [0.9])
    page = comparison_page(
        "Two ways", {"tuned": table}, {"tuned": chosen}, [0.9], ["Add up."], "2 are missing."
    )
    outside = Outside()
    outside.feed(page)
    assert outside.found == [] and outside.open == [] and page.count("<svg") == 1
    assert "&lt;i&gt;new" in page and "<i>new" not in page and "2 are missing." in page
    for cell in ("0.7500 \u00b1 0.0248", "+0.0400", "Add up."):
        assert cell in page
    assert "0.7500 \u00b1 0.0248" in markdown(table, [0.9])
    assert "best for it on validation records" in page and "the same learning rate" not in page
    nameless = comparison_page("", {"tuned": table}, {"tuned": chosen}, [0.9], ["Add up."])
    assert "<h1>Variants side by side</h1>" in nameless and "<h1>Two ways</h1>" in page
