"""What the accountant refuses, and how it says so: every message names the argument and its value.
Also: no torch, and the command line.

Whole processes are started for imports and for exit codes; commands that only have to print run in
this process.
"""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from quietgrad.accounting import (
    attack_success,
    delta,
    epsilon,
    epsilon_report,
    noise_multiplier,
    renyi_epsilon,
    trade_off,
)
from quietgrad.cli.app import app
from quietgrad.events import (
    EventSequence,
    PoissonGaussian,
    RandomizedClipping,
    SensitivityClaim,
    event_from_json,
)

EVENT = PoissonGaussian(1.0, 0.1, 10)
SKETCHED = PoissonGaussian(1.0, 0.1, 10, RandomizedClipping(8))


def calibrate(**changes):
    return noise_multiplier(
        **{"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.1, "steps": 10} | changes
    )


REFUSED = [
    (lambda: RandomizedClipping(1), "sketch_dim", "1"),
    (lambda: RandomizedClipping(0), "sketch_dim", "0"),
    (lambda: RandomizedClipping(-3), "sketch_dim", "-3"),
    (lambda: RandomizedClipping(8.0), "sketch_dim", "8.0"),
    (lambda: RandomizedClipping(8.5), "sketch_dim", "8.5"),
    (lambda: RandomizedClipping(True), "sketch_dim", "True"),
    (lambda: RandomizedClipping("8"), "sketch_dim", "'8'"),
    (lambda: RandomizedClipping(8, "hutch"), "total_rank", "hutch"),
    (lambda: RandomizedClipping(8, "hutch", 0), "total_rank", "0"),
    (lambda: RandomizedClipping(8, "hutch", -1), "total_rank", "-1"),
    (lambda: RandomizedClipping(8, "hutch", 2.0), "total_rank", "2.0"),
    (lambda: RandomizedClipping(8, "mixed", 0), "total_rank", "0"),
    (lambda: RandomizedClipping(8, "hutchinson"), "envelope", "'hutchinson'"),
    (lambda: RandomizedClipping(8, None), "envelope", "None"),
    (lambda: PoissonGaussian(0.0, 0.1, 10), "noise_multiplier", "0.0"),
    (lambda: PoissonGaussian(-1.0, 0.1, 10), "noise_multiplier", "-1.0"),
    (lambda: PoissonGaussian(math.inf, 0.1, 10), "noise_multiplier", "inf"),
    (lambda: PoissonGaussian(math.nan, 0.1, 10), "noise_multiplier", "nan"),
    (lambda: PoissonGaussian(1.0, 0.0, 10), "sample_rate", "0.0"),
    (lambda: PoissonGaussian(1.0, -0.1, 10), "sample_rate", "-0.1"),
    (lambda: PoissonGaussian(1.0, 1.5, 10), "sample_rate", "1.5"),
    (lambda: PoissonGaussian(1.0, math.nan, 10), "sample_rate", "nan"),
    (lambda: PoissonGaussian(1.0, 0.1, 0), "steps", "0"),
    (lambda: PoissonGaussian(1.0, 0.1, 2.5), "steps", "2.5"),
    (lambda: PoissonGaussian(1.0, 0.1, 10, bands=0), "bands", "0"),
    (lambda: PoissonGaussian(1.0, 0.1, 10, bands=11), "bands", "11"),
    (lambda: PoissonGaussian(1.0, 0.1, 10, bands=1.5), "bands", "1.5"),
    (lambda: SensitivityClaim(0.0), "max_grad_norm", "0.0"),
    (lambda: epsilon(EVENT, 0.0), "delta", "0.0"),
    (lambda: epsilon(EVENT, 1.0), "delta", "1.0"),
    (lambda: epsilon(EVENT, -1e-5), "delta", "-1e-05"),
    (lambda: epsilon(EVENT, math.nan), "delta", "nan"),
    (lambda: delta(EVENT, -0.5), "epsilon", "-0.5"),
    (lambda: delta(EVENT, math.inf), "epsilon", "inf"),
    (lambda: trade_off(EVENT, [0.5, 1.5]), "false_positive_rates", "1.5"),
    (lambda: trade_off(EVENT, [math.nan]), "false_positive_rates", "nan"),
    (lambda: trade_off(EVENT, [0.5], "both"), "direction", "'both'"),
    (lambda: attack_success(EVENT, -0.1), "false_positive_rate", "-0.1"),
    (lambda: calibrate(target_epsilon=0.0), "target_epsilon", "0.0"),
    (lambda: calibrate(target_epsilon=-1.0), "target_epsilon", "-1.0"),
    (lambda: calibrate(target_epsilon=math.inf), "target_epsilon", "inf"),
    (lambda: calibrate(target_delta=2.0), "target_delta", "2.0"),
    (lambda: calibrate(sample_rate=1.01), "sample_rate", "1.01"),
    (lambda: calibrate(steps=0), "steps", "0"),
    (lambda: calibrate(bands=20), "bands", "20"),
]


@pytest.mark.parametrize(("call", "argument", "value"), REFUSED)
def test_message_names_argument_and_value(call, argument, value):
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert argument in str(caught.value)
    assert value in str(caught.value)


@pytest.mark.parametrize(
    "record", [{}, {"kind": "laplace"}, {"kind": "sequence", "events": [{"kind": "sequence"}]}]
)
def test_unknown_events_are_refused(record):
    with pytest.raises(ValueError, match="kind"):
        event_from_json(record)


@pytest.mark.parametrize("field", ["noise_multiplier", "sample_rate", "steps"])
def test_incomplete_events_are_refused(field):
    record = EVENT.to_json()
    del record[field]
    with pytest.raises(ValueError, match=field):
        event_from_json(record)


def test_an_empty_sequence_is_refused():
    with pytest.raises(ValueError, match="empty"):
        epsilon(EventSequence(()), 1e-5)


def test_unreachable_target_is_refused():
    """The message says what would help; no noise multiplier is returned that does not meet the
    target.
    """
    with pytest.raises(ValueError, match="target_epsilon=1e-12"):
        calibrate(target_epsilon=1e-12, target_delta=1e-13, sample_rate=1.0, steps=10_000)


@pytest.mark.parametrize("event", [SKETCHED, EventSequence((EVENT, SKETCHED))])
def test_renyi_accounting_of_sketches_is_refused_as_infinite(event):
    with pytest.raises(ValueError, match="infinite"):
        renyi_epsilon(event, 1e-5)


@pytest.mark.parametrize(
    ("event", "word"),
    [
        (PoissonGaussian(1.0, 0.1, 1, RandomizedClipping(2)), "sketch_dim=2"),
        (EVENT, "noise_multiplier"),
    ],
)
def test_infinite_epsilon_comes_with_a_reason(event, word):
    report = epsilon_report(event, 1e-25)
    assert math.isinf(report.epsilon)
    assert report.reason is not None and word in report.reason and "1e-25" in report.reason


def test_finite_epsilon_comes_with_its_discretisation():
    report = epsilon_report(EVENT, 1e-5)
    assert report.reason is None and report.epsilon == epsilon(EVENT, 1e-5) and report.delta == 1e-5
    assert 0 < report.discretisation.interval <= 0.005 and report.discretisation.mixture_bins == 1
    assert 0 < report.discretisation.tail_mass <= 1e-5 * 1e-3


def test_numpy_numbers_are_numbers():
    event = PoissonGaussian(np.float64(1.0), np.float32(0.5), np.int64(10))
    assert epsilon(event, np.float64(1e-5)) == pytest.approx(
        epsilon(PoissonGaussian(1.0, 0.5, 10), 1e-5), rel=1e-6
    )


def run_python(*arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=120
    )


def test_accounting_does_not_import_torch():
    code = (
        "import sys, quietgrad.accounting, quietgrad.cli.accounting, quietgrad.cli.app; "
        "print('torch' in sys.modules)"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


COMMAND = "from quietgrad.cli import main; main()"
SIZES = ["--dataset-size", "1225", "--batch-size", "64", "--steps", "200"]


def command(*arguments):
    """The record that a command prints with --json, run in this process."""
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_calibrate_as_a_process():
    done = run_python(
        "-W",
        "error",
        "-c",
        COMMAND,
        "calibrate",
        "--epsilon",
        "0.7",
        "--delta",
        "1e-5",
        *SIZES,
        "--json",
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["noise_multiplier"] == pytest.approx(3.991, abs=0.005)
    assert 0.69 <= record["epsilon"] <= 0.7 and record["delta"] == 1e-5
    assert record["neighbouring"] == "add-remove"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["calibrate", "--epsilon", "1", "--delta", "2", *SIZES], "delta=2.0"),
        (
            ["calibrate", "--epsilon", "1", "--delta", "1e-5", *SIZES, "--sketch-dim", "1"],
            "sketch_dim=1",
        ),
        (
            ["epsilon", "--noise-multiplier", "1", "--delta", "1e-5", "--steps", "10"],
            "--dataset-size",
        ),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(arguments, named):
    done = run_python("-c", COMMAND, *arguments)
    assert done.returncode == 2
    assert named in done.stderr and done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_unknown_option_has_exit_code_two():
    assert CliRunner().invoke(app, ["epsilon", "--sigma", "1"]).exit_code == 2


def test_epsilon_command():
    record = command("epsilon", "--noise-multiplier", "4", "--delta", "1e-5", *SIZES)
    assert record["noise_multiplier"] == 4.0 and record["delta"] == 1e-5
    assert (
        record["sample_rate"] == 64 / 1225
        and record["compositions"] == 200
        and record["bands"] == 1
    )
    assert record["neighbouring"] == "add-remove" and record["sampler"] == "poisson"
    assert record["epsilon"] == epsilon(PoissonGaussian(4.0, 64 / 1225, 200), 1e-5)


def test_bands_on_the_command_line():
    sizes = ["--dataset-size", "1225", "--batch-size", "64", "--steps", "201"]
    record = command(
        "epsilon", "--noise-multiplier", "8", "--delta", "1e-5", *sizes, "--bands", "4"
    )
    assert record["compositions"] == 51  # ceil(201 / 4)
    assert record["participation_rate"] == pytest.approx(4 * 64 / 1225)
    assert record["bands"] == 4 and record["sampler"] == "cyclic-poisson"


def test_sketches_on_the_command_line():
    record = command("calibrate", "--epsilon", "2", "--delta", "1e-5", *SIZES, "--sketch-dim", "32")
    assert (
        record["clipping"] == "randomized"
        and record["sketch_dim"] == 32
        and record["envelope"] == "mixed"
    )
    assert 1.99 <= record["epsilon"] <= 2.0 == record["target_epsilon"]


def test_infinite_epsilon_is_null_with_a_reason_on_the_command_line():
    record = command("epsilon", "--noise-multiplier", "1", "--delta", "1e-17", *SIZES)
    assert record["epsilon"] is None and "noise_multiplier" in record["reason"]


def test_tables_say_upper_bound_and_relation():
    result = CliRunner().invoke(
        app, ["epsilon", "--noise-multiplier", "4", "--delta", "1e-5", *SIZES]
    )
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert "upper bound" in text and "add or remove one record" in text
