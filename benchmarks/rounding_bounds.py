"""By how much certified bounds lengthen norms on the models of ``clipping_peers.py``: whole-model
bound over estimate.

    python benchmarks/rounding_bounds.py [--regimes bert-32 ...] [--estimators exact hutch hutch++]
                                         [--output benchmarks/results/rounding_bounds.json]

An exactly measured norm is enlarged by 2^-10 whatever its bound; an example whose bound is above
that is measured again as its own gradient ("doubtful"). A sketched norm is enlarged by the larger
of the two.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from clipping_peers import REGIMES, build, per_example_loss

from quietgrad.clipping import Clipper
from quietgrad.clipping.norms.rounding import SHARE, Norms, NormSums


def bounds(regime: str, estimator: str) -> dict[str, float]:
    """Largest bound over estimate of a batch, what norms are enlarged by, and the share of doubtful
    examples.
    """
    seen: list[Norms] = []
    original = NormSums.norms

    def noting(sums: NormSums) -> Norms:
        seen.append(original(sums))
        return seen[-1]

    NormSums.norms = noting  # type: ignore[method-assign]
    try:
        model, batch = build(regime)
        bound = Clipper(1e-3, estimator).bind(model, per_example_loss)  # type: ignore[arg-type]
        bound.clip(batch, step=0)
        seen.clear()
        bound.clip(batch, step=2)  # not a guarded release: the batch alone
    finally:
        NormSums.norms = original  # type: ignore[method-assign]
    ratio = torch.cat([(one.certified / one.estimate).amax(0) for one in seen]) - 1.0
    sketched = estimator.startswith("hutch")
    return {
        "largest_bound": float(ratio.max()),
        "largest_enlargement": max(SHARE, float(ratio.max())) if sketched else SHARE,
        "doubtful": 0.0 if sketched else float((ratio > SHARE).double().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [name for name in REGIMES if name != "llama-4096"]
    parser.add_argument("--regimes", nargs="+", default=known, choices=list(REGIMES))
    parser.add_argument("--estimators", nargs="+", default=["exact", "hutch", "hutch++"])
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/rounding_bounds.json")
    )
    arguments = parser.parse_args()
    report: dict[str, Any] = {"share": SHARE, "torch": torch.__version__, "regimes": {}}
    for regime in arguments.regimes:
        for estimator in arguments.estimators:
            entry = bounds(regime, estimator)
            report["regimes"].setdefault(regime, {})[estimator] = entry
            print(
                f"{regime:12s} {estimator:8s} "
                + "  ".join(f"{k} {v:.1e}" for k, v in entry.items()),
                flush=True,
            )
    arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
