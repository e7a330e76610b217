"""The contract of a run under attack: settings that contradict each other, seeds that can be
guessed or come twice, epsilons that say less than was spent.
"""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks.contract import RECORDS, at, loss, model_of, opened, plan_of
from quietgrad import PrivacyConfig
from quietgrad.accounting.rounding import round_up, round_up_to
from quietgrad.ledger.chain import count_path
from quietgrad.plan import seeds
from quietgrad.plan.seeds import require_secret_seed

# Settings that contradict each other


def config_of(tmp_path: Path, text: str, *overrides: str) -> Any:
    from quietgrad.training.settings.config import load_config

    path = tmp_path / "config.toml"
    path.write_text(text)
    return load_config(path, overrides)


ONE_OF = {
    ("privacy", "target_epsilon", "noise_multiplier"): (3.0, 0.05),
    ("training", "steps", "epochs"): (100, 3.0),
}


@pytest.mark.parametrize(("names", "values"), ONE_OF.items(), ids=[names[1] for names in ONE_OF])
def test_two_alternatives_are_refused_wherever_they_stand(
    names: tuple[str, str, str], values: tuple[float, float], tmp_path: Path
) -> None:
    # `--set target_epsilon=3 --set noise_multiplier=0.05` ran at epsilon 476.
    table, one, other = names
    both = rf"{table}\.{one}={values[0]} and {table}\.{other}={values[1]} are both given"
    for order in (1, -1):
        with pytest.raises(ValueError, match=both + " with --set"):
            config_of(
                tmp_path, "", *[f"{one}={values[0]}", f"{table}.{other}={values[1]}"][::order]
            )
    file = f"[{table}]\n{one} = {values[0]}\n{other} = {values[1]}\n"
    for overrides in (
        (),
        (f"{one}=7",),
        ("training.eval_every=3",),
    ):  # an override does not settle what a file says twice
        with pytest.raises(ValueError, match=both + " in the file"):
            config_of(tmp_path, file, *overrides)


@pytest.mark.parametrize(("names", "values"), ONE_OF.items(), ids=[names[1] for names in ONE_OF])
def test_an_override_takes_the_place_of_the_files_alternative(
    names: tuple[str, str, str], values: tuple[float, float], tmp_path: Path
) -> None:
    table, one, other = names
    for given, value, wanted in ((one, values[0], other), (other, values[1], one)):
        found = config_of(tmp_path, f"[{table}]\n{given} = {value}\n", f"{wanted}=5")
        assert (
            getattr(getattr(found, table), wanted) == 5
            and getattr(getattr(found, table), given) is None
        )


def test_one_setting_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--set gives training\.steps twice, as 3 and as 9"):
        config_of(tmp_path, "", "steps=3", "training.steps=9")
    assert config_of(tmp_path, "", "steps=3", "training.steps=3").training.steps == 3


def test_tables_built_by_hand_are_checked_too() -> None:
    from quietgrad.training.settings.config import TrainConfig
    from quietgrad.training.settings.tables import PrivacyTable

    with pytest.raises(ValueError, match="both given"):
        TrainConfig(privacy=PrivacyTable(target_epsilon=3.0, noise_multiplier=0.05))


@pytest.mark.parametrize("delta", [1 / RECORDS, 0.5, 0.9])
def test_no_epsilon_is_shown_for_a_delta_that_admits_publishing_records(
    delta: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from quietgrad.cli import main

    with pytest.raises(ValueError, match=rf"target_delta={delta} is not below"):
        plan_of(target_delta=delta)
    ledger = tmp_path / "ledger.jsonl"
    plan_of().start(ledger).close()
    sizes = [
        "--dataset-size",
        str(RECORDS),
        "--batch-size",
        "12",
        "--steps",
        "8",
        "--delta",
        str(delta),
    ]
    for arguments in (
        ["calibrate", "--epsilon", "3", *sizes],
        ["epsilon", "--noise-multiplier", "1.2", *sizes],
        ["epsilon", "--ledger", str(ledger), "--delta", str(delta)],
    ):
        monkeypatch.setattr("sys.argv", ["quietgrad", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        assert ended.value.code == 2 and not shown.out
        assert f"delta={delta} is not below 1/{RECORDS}" in shown.err


# Seeds


# drawn once: names of tests must not change from process to process
LONG = "4f1d8e03b7a62c95d0e4718a3bc9f256"


@pytest.mark.parametrize(
    "seed",
    [
        0,
        42,
        2**31,
        2**64,
        2**127 - 1,
        int(LONG, 16),  # of 127 bits
        2**127,
        "2a",
        "0" * 32,
        "a" * 32,
        "deadbeef" * 3,
        "0123456789abcdef" * 2,
        "fedcba9876543210" * 3,
        "02468ace13579bdf" * 2,
        "0123456789abcdef" + "fedcba9876543210",
        "42526565540636150102361340410513",  # seven different digits
        (LONG[:16]) * 2,
        (LONG[:12]) * 3,
        f"{7:032x}",
    ],
)
def test_short_and_typed_seeds_are_refused_where_data_are_private(seed: int | str) -> None:
    with pytest.raises(
        ValueError, match=r"so it could be guessed.*secrets\.token_hex\(16\).*data_are_public"
    ) as refused:
        plan_of(seed=seed)
    assert (
        str(seed) not in str(refused.value).replace("128", "").replace("16", "")
        or len(str(seed)) < 2
    )
    plan_of(seed=seed, data_are_public=True)


@pytest.mark.parametrize(
    "seed",
    [
        LONG,
        LONG.upper(),
        LONG + LONG[::-1],
        LONG + "0",
        int("9" + LONG[1:], 16),
        int("c" + LONG[:0:-1], 16),
    ],
)
def test_drawn_seeds_of_128_bits_are_taken(seed: int | str) -> None:
    require_secret_seed(seed)
    assert str(seed) not in repr(plan_of(seed=seed))  # and stay out of what is printed


@pytest.mark.parametrize(
    ("seed", "error"),
    [
        ("x" * 32, ValueError),
        ("", ValueError),
        (-1, ValueError),
        (1.5, TypeError),
        (True, TypeError),
        (b"1" * 32, TypeError),
    ],
)
def test_what_is_no_seed_is_refused(seed: Any, error: type[Exception]) -> None:
    for public in (False, True):
        with pytest.raises(error, match="seed"):
            plan_of(seed=seed, data_are_public=public)


def test_a_string_is_the_number_that_it_writes() -> None:
    number = int(LONG, 16) | 1 << 127
    first = plan_of(seed=number, data_are_public=True).start()
    second = plan_of(seed=f"{number:x}", data_are_public=True).start()
    assert np.array_equal(next(first.batches()), next(second.batches()))


def test_two_starts_with_one_seed_are_refused() -> None:
    seed = secrets.token_hex(16)
    plan_of(seed=seed).start()
    for again in (seed, seed.upper(), int(seed, 16)):
        other = {"seed": again, "noise_multiplier": 9.0}
        if isinstance(again, int) and again < 2**127:
            continue  # the number of a seed that begins with small digits is refused by itself
        with pytest.raises(ValueError, match="this seed has started a run already"):
            plan_of(**other).start()
    plan_of(seed=secrets.token_hex(16)).start()


def test_an_older_copy_of_its_ledger_does_not_go_on_with_a_seed(tmp_path: Path) -> None:
    # The releases that the copy does not know of would be drawn for once more.
    seed, ledger = secrets.token_hex(16), tmp_path / "ledger.jsonl"
    counts, model = count_path(ledger), model_of()
    with plan_of(seed=seed).start(ledger) as private:
        for step, indices in enumerate(private.batches(3)):
            private.backward(model, loss, at(indices))
            if step == 1:
                older = ledger.read_bytes(), counts.read_bytes()
    newest = ledger.read_bytes(), counts.read_bytes()
    ledger.write_bytes(older[0])
    counts.write_bytes(older[1])
    with pytest.raises(ValueError, match="fewer releases than were made with this seed"):
        plan_of(seed=seed).start(ledger)
    ledger.write_bytes(newest[0])
    counts.write_bytes(newest[1])
    with plan_of(seed=seed).start(ledger) as private:
        assert private.released == 3


def test_an_older_copy_is_known_by_what_its_ledger_held_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The releases were made by another process, and this one has seen their ledger."""
    seed, ledger = secrets.token_hex(16), tmp_path / "ledger.jsonl"
    with plan_of(seed=seed).start(ledger) as private:
        for step, indices in enumerate(private.batches(2)):
            private.backward(model_of(), loss, at(indices))
            if not step:
                older = ledger.read_bytes(), count_path(ledger).read_bytes()
    monkeypatch.setattr(seeds, "_uses", {})
    plan_of(seed=seed).start(ledger).close()
    ledger.write_bytes(older[0])
    count_path(ledger).write_bytes(older[1])
    with pytest.raises(ValueError, match="fewer releases than were made with this seed"):
        plan_of(seed=seed).start(ledger)


def test_a_seeds_run_goes_on_with_its_own_ledger_only(tmp_path: Path) -> None:
    seed, ledger = secrets.token_hex(16), tmp_path / "ledger.jsonl"
    with plan_of(seed=seed).start(ledger) as private:
        private.step(model_of(), loss, at(next(private.batches())))
    with plan_of(seed=seed).start(ledger) as private:
        assert private.released == 1
        private.step(model_of(), loss, at(next(private.batches())))
    for other in (None, tmp_path / "other.jsonl"):
        with pytest.raises(ValueError, match="this seed has started a run already"):
            plan_of(seed=seed).start(other)
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(ValueError):  # the ledger's own checks may see it first
        plan_of(seed=seed).start(ledger)
    ledger.unlink()
    with pytest.raises(ValueError):
        plan_of(seed=seed).start(ledger)


def test_public_data_may_use_a_seed_again_and_the_ledger_says_so(tmp_path: Path) -> None:
    from quietgrad.ledger import read_ledger

    drawn = []
    for i in range(2):
        with plan_of(seed=1, data_are_public=True).start(tmp_path / f"{i}.jsonl") as private:
            drawn.append(next(private.batches()))
    assert np.array_equal(*drawn)
    assert read_ledger(tmp_path / "0.jsonl").header["data_declared_public"] is True
    plan_of().start(tmp_path / "2.jsonl").close()
    assert read_ledger(tmp_path / "2.jsonl").header["data_declared_public"] is False
    with pytest.raises(ValueError, match="data_declared_public"):  # a declaration is not taken back
        plan_of(seed=secrets.token_hex(16)).start(tmp_path / "0.jsonl")


# What is printed


@pytest.mark.grid(10, "numbers times places where they are shown")
@pytest.mark.parametrize(
    "value", [0.0, 1e-9, 0.12345, 1.00001, 1.0, 2.0, 4.99999999, 476.0312, 1e6 + 1e-7, math.inf]
)
@pytest.mark.parametrize("digits", [0, 2, 3, 4])
def test_printed_epsilons_are_never_below_the_computed_ones(value: float, digits: int) -> None:
    shown = float(round_up(value, digits))
    assert shown >= value
    assert math.isinf(value) or shown - value < 10.0**-digits * 1.0001
    assert float(round_up_to(value, 3)) >= value
    # Rounding to nearest would not do.
    assert value != 1.00001 or float(f"{value:.{digits}f}") < value


def test_a_delta_that_has_few_digits_is_printed_as_it_is() -> None:
    assert [round_up_to(v, 6) for v in (1e-5, 0.001, 0.01)] == ["1e-5", "0.001", "0.01"]


@pytest.mark.parametrize("scalar", [np.float16, np.float32, np.float64])
def test_noise_is_not_rounded_to_the_type_of_the_clipping_norm(scalar: type) -> None:
    """Before: with a float16 of 6e-8 no noise was added, at a printed epsilon."""
    clip = scalar(6e-8)
    plan = PrivacyConfig(
        noise_multiplier=0.45, max_grad_norm=clip, expected_batch_size=6, steps=2
    ).build(60)
    run = plan.start()
    indices = next(run.batches())
    gradients = {"w": torch.zeros(len(indices), 50)}
    noisy = run.release(run.contribution(gradients, len(indices)))
    assert noisy.noise_std == 0.45 * float(clip)
    assert float(noisy.gradients["w"].abs().min()) > 0
    assert type(plan.max_grad_norm) is float


@pytest.mark.parametrize("clip", [1e-24, 1e-44, 1e16])
def test_clipping_norms_beyond_float32_are_refused(clip: float) -> None:
    """Before: 1.28 C at 1e-26, and sum and noise all zero at 1e-46."""
    with pytest.raises(ValueError, match=re.escape(f"max_grad_norm={clip!r} must be in 1e-15")):
        PrivacyConfig(
            noise_multiplier=1.0, max_grad_norm=clip, expected_batch_size=6, steps=2
        ).build(60)


def test_a_run_s_plan_is_not_replaced() -> None:
    """Before: epsilon was that of the new plan, and the noise that of the old one."""
    private, indices = opened()
    private.release(private.clip(model_of(), loss, at(indices)))
    with pytest.raises(AttributeError):
        private.plan = plan_of(noise_multiplier=50.0)  # type: ignore[misc]
    assert private.plan.event.after(1) == plan_of().event.after(1)


CONFIDENTIAL = [(torch.full((2,), 77.25), "diagnosis of bob") for _ in range(60)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda of: of.build(CONFIDENTIAL), r"dataset_size=<list> is no number.*len\(dataset\)"),
        (lambda of: of.build(CONFIDENTIAL[0][0]), "dataset_size=<Tensor> is no number"),
        (lambda of: of.build(60).start().loader(CONFIDENTIAL, steps=CONFIDENTIAL), "steps=<list>"),
        (lambda of: next(of.build(60).start().batches(CONFIDENTIAL)), "steps=<list> must be a"),
        (lambda of: replace(of, steps=CONFIDENTIAL).build(60), "steps=<list> must be a whole"),
        (lambda of: replace(of, max_grad_norm=CONFIDENTIAL).build(60), "max_grad_norm=<list>"),
    ],
)
def test_records_in_the_place_of_their_number_are_not_told(given: Any, said: str) -> None:
    """Before: the message was the whole data set."""
    config = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=6, steps=2)
    with pytest.raises((TypeError, ValueError), match=said) as refused:
        given(config)
    assert "77" not in str(refused.value) and "bob" not in str(refused.value)
