"""R of Hutch++ for given squared singular values, drawn as the estimator draws it."""

import numpy as np


def ratios(spectrum, k, draws, rng):
    """[draws] values of R for one parameter; ``spectrum``: [D] squared singular values."""
    spectrum = np.asarray(spectrum, dtype=float)
    roots = np.sqrt(spectrum / spectrum.sum())
    rank = roots.size
    if k >= rank:
        return np.ones(draws)
    found = []
    for start in range(0, draws, block := max(1, 2_000_000 // (rank * k))):
        shape = (min(block, draws - start), rank, k)
        basis = np.linalg.qr(roots[:, None] * rng.standard_normal(shape))[0]
        tail = roots[:, None] * rng.standard_normal(shape) / np.sqrt(k)
        tail -= basis @ (basis.transpose(0, 2, 1) @ tail)
        head = ((roots[:, None] * basis) ** 2).sum(axis=(1, 2))
        found.append(head + (tail**2).sum(axis=(1, 2)))
    return np.concatenate(found)


def mixed_ratios(layers, k, draws, rng):
    """[draws] values of R of a record: ``layers`` are (share, spectrum); what the shares leave is
    exact.
    """
    total = np.full(draws, 1.0 - sum(share for share, _ in layers))
    for share, spectrum in layers:
        total += share * ratios(spectrum, k, draws, rng)
    return total
