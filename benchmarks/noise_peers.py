"""The noise multiplier that each library's own accountant asks for, at one epsilon.

    PYTHONPATH=FOLDER python benchmarks/noise_peers.py

FOLDER holds JAX-Privacy (the head of ``clipping_peers_jax.py`` says how); without it its rows are
left as they were. The setting is that of docs/hutchpp_envelope.md: 1225 records, expected batch 64,
200 steps, epsilon 0.7, delta 1e-5, Poisson sampling, add or remove one record. Results:
benchmarks/results/noise_peers.json, which ``scripts/peers_figure.py`` draws.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from importlib.metadata import version
from pathlib import Path

from quietgrad import Clipping, PrivacyConfig

RESULTS = Path(__file__).parent / "results" / "noise_peers.json"
RECORDS, BATCH, STEPS, EPSILON, DELTA = 1225, 64, 200, 0.7, 1e-5
TOLERANCE = 1e-3  # of epsilon (Opacus), of the multiplier (JAX-Privacy)


def quietgrad(clipping: Clipping) -> float:
    config = PrivacyConfig(
        target_epsilon=EPSILON, target_delta=DELTA, expected_batch_size=BATCH, steps=STEPS,
        clipping=clipping,
    )  # fmt: skip
    return float(config.build(RECORDS).noise_multiplier)


def opacus(accountant: str) -> float:
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the largest order
        return float(
            get_noise_multiplier(
                target_epsilon=EPSILON, target_delta=DELTA, sample_rate=BATCH / RECORDS,
                steps=STEPS, accountant=accountant, epsilon_tolerance=TOLERANCE,
            )
        )  # fmt: skip


def jax_privacy(kind: str) -> float:
    from jax_privacy.accounting import accountants, analysis, calibrate

    made = {"pld": accountants.PldAccountantConfig, "rdp": accountants.RdpAccountantConfig}[kind]()
    return float(
        calibrate.calibrate_noise_multiplier(
            target_epsilon=EPSILON, target_delta=DELTA, num_updates=STEPS, num_samples=RECORDS,
            batch_sizes=BATCH, accountant=analysis.DpsgdTrainingAccountant(made), tol=TOLERANCE,
        )
    )  # fmt: skip


def main() -> None:
    """See the top of this file."""
    known = json.loads(RESULTS.read_text())["noise_multipliers"] if RESULTS.is_file() else {}
    found = {
        "quietgrad": quietgrad(Clipping("exact")),
        "quietgrad-hutch++-32": quietgrad(Clipping("hutch++", 32)),
        "quietgrad-hutch-32": quietgrad(Clipping("hutch", 32)),
        "opacus-prv": opacus("prv"),
        "opacus-rdp": opacus("rdp"),
    }
    packages = {name: version(name) for name in ("quietgrad", "opacus", "dp-accounting")}
    with contextlib.suppress(ImportError):
        found |= {f"jax-privacy-{kind}": jax_privacy(kind) for kind in ("pld", "rdp")}
        packages["jax-privacy"] = version("jax-privacy")
    setting = {"records": RECORDS, "expected_batch_size": BATCH, "steps": STEPS}
    setting |= {"epsilon": EPSILON, "delta": DELTA, "tolerance": TOLERANCE}
    record = {"setting": setting, "packages": packages, "noise_multipliers": known | found}
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    for name, value in record["noise_multipliers"].items():
        print(f"{name:24s} {value:.4f}")


if __name__ == "__main__":
    main()
