"""What a run with correlated noise keeps between sessions: its mixing matrix, and while it lasts the secret roots of its streams."""

from __future__ import annotations

from pathlib import Path

from quietgrad.noise.mixing import MixingMatrix, load_mixing, save_mixing
from quietgrad.plan import PrivacyPlan, PrivateRun
from quietgrad.training.run_dir import RunDir


def start_private(plan: PrivacyPlan, run_dir: RunDir) -> PrivateRun:
    """Starts the plan, or goes on with it: correlated noise exactly where it was, as long as the keys are there (or a seed is given)."""
    # A choice of one band is kept too: found again, within a limit of time, it could come out differently. A matrix without a ledger is of a start that released nothing.
    if plan.mixing is not None and not run_dir.ledger.exists():
        save_mixing(plan.mixing, run_dir.mixing)
        draw_choice(plan, run_dir.bands_figure)
    return plan.start(run_dir.ledger, run_dir.noise_keys)


def saved_mixing(run_dir: RunDir) -> MixingMatrix | None:
    """The mixing matrix that a run began with, bit by bit; None where there is none."""
    return load_mixing(run_dir.mixing) if run_dir.mixing.exists() else None


def draw_choice(plan: PrivacyPlan, path: Path) -> None:
    """The figure that explains the number of bands, where it was chosen here."""
    if plan.band_choice is None:
        return
    from quietgrad.report.bands import bands_figure

    tried = plan.band_choice.candidates
    bands_figure(
        [c.bands for c in tried],
        [c.noise_multiplier for c in tried],
        [c.mixing.objective for c in tried],
        plan.band_choice.chosen.bands,
        path,
    )


def forget_keys(run_dir: RunDir) -> None:
    """Removes the secret once no release is left that needs it."""
    run_dir.noise_keys.unlink(missing_ok=True)
