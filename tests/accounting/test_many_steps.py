"""Numbers of steps that nobody makes: a zero too many, or six."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from scipy import special

from quietgrad import PrivacyConfig
from quietgrad.accounting import epsilon, noise_multiplier
from quietgrad.events import MOST_STEPS, EventSequence, PoissonGaussian

LIMITED = """
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    from quietgrad.accounting import epsilon
    from quietgrad.events import PoissonGaussian
    print(epsilon(PoissonGaussian({sigma}, 1.0, {steps}), 1e-6))
"""


def of_gaussian(mu: float, delta: float) -> float:
    """Epsilon of one Gaussian mechanism, between which and the same with more delta it is."""
    return mu**2 / 2 - mu * float(special.ndtri(delta))


@pytest.mark.skipif(sys.platform != "linux", reason="its limits on memory")
@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_a_hundred_million_steps_are_accounted_for_in_bounded_memory(sigma: float) -> None:
    # Before: a MemoryError, for dp-accounting's ends of the sum lie where there is no mass.
    steps = 10**8
    code = textwrap.dedent(LIMITED.format(sigma=sigma, steps=steps))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-300:]
    mu = steps**0.5 / sigma
    assert 0.999 * of_gaussian(mu, 1e-6) < float(done.stdout) < 1.05 * of_gaussian(mu, 1e-6)


def test_the_most_steps_are_a_bound_of_the_rest() -> None:
    most = epsilon(PoissonGaussian(1000.0, 1.0, MOST_STEPS), 1e-6)
    mu = MOST_STEPS**0.5 / 1000.0
    assert 0.999 * of_gaussian(mu, 1e-6) < most < 1.05 * of_gaussian(mu, 1e-6)


@pytest.mark.skipif(sys.platform != "linux", reason="its limits on memory")
def test_numbers_beside_some_steps_are_counted_in_bounded_memory() -> None:
    # Before: arrays of as many entries as steps, 30 GB of them.
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
        from quietgrad.accounting.beside import split_by_side_releases
        from quietgrad.events import MOST_STEPS, PoissonGaussian, SideRelease
        beside = (SideRelease("loss", 30.0, 2), SideRelease("count", 20.0, 3))
        event = PoissonGaussian(5.0, 1e-6, MOST_STEPS, beside=beside)
        print(*(phase.steps for phase in split_by_side_releases(event)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-300:]
    both, loss, count = ((MOST_STEPS - 1) // every + 1 for every in (6, 2, 3))
    alone = [loss - both, count - both, both]
    assert [int(n) for n in done.stdout.split()] == [MOST_STEPS - sum(alone), *alone]


@pytest.mark.parametrize("steps", [MOST_STEPS + 1, 10**12, 10**300])
def test_more_are_refused_before_any_work(steps: int) -> None:
    said = f"steps={steps} is above 1,000,000,000, the most that are accounted for"
    with pytest.raises(ValueError, match=said):
        PoissonGaussian(1.0, 0.01, steps)
    with pytest.raises(ValueError, match=said):
        noise_multiplier(2.0, 1e-5, sample_rate=0.01, steps=steps)
    for known in ({"noise_multiplier": 1.0}, {"target_epsilon": 2.0}):
        config = PrivacyConfig(expected_batch_size=20, steps=steps, **known)
        with pytest.raises(ValueError, match=said):
            config.build(1000)


def test_phases_that_are_more_together_are_refused_too() -> None:
    half = PoissonGaussian(1.0, 0.01, MOST_STEPS // 2 + 1)
    with pytest.raises(ValueError, match="is above 1,000,000,000"):
        epsilon(EventSequence((half, half)), 1e-6)
