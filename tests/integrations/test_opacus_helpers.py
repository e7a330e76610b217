"""Modules of Opacus beside its engine: what they compute is Opacus' own, or their import says what
there is instead.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import opacus
import opacus.accountants.analysis.gdp as theirs_gdp
import opacus.utils.tensor_utils as theirs
import pytest
import torch

from quietgrad.accounting import epsilon
from quietgrad.events import PoissonGaussian
from quietgrad.integrations.opacus.accountants.analysis import gdp
from quietgrad.integrations.opacus.utils import tensor_utils

ROOT = "quietgrad.integrations.opacus"


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("padding", [(0, 0), (2, 1), "valid"])
@pytest.mark.parametrize(("stride", "dilation"), [((1, 1), (1, 1)), ((2, 3), (1, 1))])
def test_patches_of_images(padding: Any, stride: Any, dilation: Any) -> None:
    asked = {"kernel_size": (3, 2), "padding": padding, "stride": stride, "dilation": dilation}
    x = drawn(2, 3, 7, 8)
    assert torch.equal(tensor_utils.unfold2d(x, **asked), theirs.unfold2d(x, **asked))


def test_patches_of_images_as_torch_has_them() -> None:
    """With a dilation: Opacus' own takes a number of places of its own then."""
    x = drawn(2, 3, 9, 8)
    found = tensor_utils.unfold2d(x, kernel_size=(3, 2), padding=(1, 0), stride=2, dilation=2)
    expected = torch.nn.functional.unfold(x, (3, 2), dilation=2, padding=(1, 0), stride=2)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("padding", [0, (1, 0, 2), "same", "valid"])
@pytest.mark.parametrize("dilation", [1, (1, 2, 1)])
def test_patches_of_volumes(padding: Any, dilation: Any) -> None:
    asked = {"kernel_size": (2, 3, 2), "padding": padding, "stride": 1, "dilation": dilation}
    x = drawn(2, 2, 5, 6, 5)
    assert torch.equal(tensor_utils.unfold3d(x, **asked), theirs.unfold3d(x, **asked))
    with pytest.raises(ValueError, match="tensor has 4 dimensions"):
        tensor_utils.unfold3d(x[0], **asked)


def test_same_padding_of_images_keeps_their_size() -> None:
    found = tensor_utils.unfold2d(
        drawn(1, 1, 5, 6), kernel_size=(4, 3), padding="same", stride=1, dilation=1
    )
    assert found.shape == (1, 12, 30)


def test_norms_and_sums_of_rows() -> None:
    pairs = [("a", drawn(3, 2, 4)), ("b", drawn(3, 5))]
    for flat in (True, False):
        ours, other = (m.calc_sample_norms(pairs, flat=flat) for m in (tensor_utils, theirs))
        torch.testing.assert_close(ours, other)
    for n in (1, 2, 3):
        x = drawn(2, 3, 4, 5)
        torch.testing.assert_close(
            tensor_utils.sum_over_all_but_batch_and_last_n(x, n),
            theirs.sum_over_all_but_batch_and_last_n(x, n),
        )


@pytest.mark.parametrize("mu", [0.05, 0.7, 3.0, 12.0, 50.0])
def test_gaussian_differential_privacy_is_exact(mu: float) -> None:
    for eps in (0.0, 0.3, 2.0, 40.0, 2000.0):
        expected = theirs_gdp.delta_eps_mu(eps=eps, mu=mu) if eps < 500 else 0.0
        assert gdp.delta_eps_mu(eps=eps, mu=mu) == pytest.approx(expected, rel=1e-8, abs=1e-14)
    found = gdp.eps_from_mu(mu=mu, delta=1e-5)
    assert gdp.delta_eps_mu(eps=found, mu=mu) <= 1e-5  # rounded up
    if mu < 20:  # Opacus looks up to 500
        assert found == pytest.approx(theirs_gdp.eps_from_mu(mu=mu, delta=1e-5), rel=2e-3)


def test_epsilon_of_subsampled_runs_is_a_bound() -> None:
    """Where the limit theorem's number lies below the true one."""
    run = {"steps": 20, "noise_multiplier": 0.6, "sample_rate": 0.05, "delta": 1e-5}
    found = gdp.compute_eps_poisson(**run)  # type: ignore[arg-type]
    assert found == epsilon(PoissonGaussian(0.6, 0.05, 20), 1e-5)
    assert theirs_gdp.compute_eps_poisson(**run) < found  # type: ignore[arg-type]


@pytest.mark.parametrize("mu", [0.0, -1.0, math.inf, math.nan])
def test_no_mu(mu: float) -> None:
    with pytest.raises(ValueError, match=r"mu=.* must be above 0"):
        gdp.delta_eps_mu(eps=1.0, mu=mu)


def test_a_mu_without_privacy_and_one_with_a_delta_that_is_enough() -> None:
    assert gdp.eps_from_mu(mu=100.0, delta=1e-5) > 5000
    with pytest.raises(ValueError, match="delta"):
        gdp.eps_from_mu(mu=1.0, delta=1.0)
    assert gdp.eps_from_mu(mu=1e-3, delta=0.5) == 0.0


@pytest.mark.parametrize(
    ("module", "name", "remedy"),
    [
        ("accountants.analysis.gdp", "compute_mu_poisson", "compute_eps_poisson"),
        ("accountants.analysis.gdp", "compute_eps_uniform", "draw Poisson batches"),
        ("accountants.analysis.prv", "Domain", r"create_accountant\('prv'\)"),
        ("accountants.analysis.prv", "compose_heterogeneous", "dp_accounting.pld"),
        ("utils.per_sample_gradients_utils", "compute_opacus_grad_sample", "torch.func.vmap"),
        ("utils.fsdp_utils", "FSDP2Wrapper", "fully_shard"),
        ("optimizers", "AdaClipDPOptimizer", "quietgrad.beside.AdaptiveClipping"),
        ("optimizers", "DistributedDPOptimizer", "many_processes"),
        ("optimizers", "get_optimizer_class", "make_private"),
        ("grad_sample", "wrap_model", "make_private"),
        ("grad_sample", "compute_linear_grad_sample", "autograd's"),
        ("layers", "SequenceBias", "torch's own layers"),
        ("data_loader", "wrap_collate_with_empty", "the loader of make_private itself"),
        ("distributed", "average_gradients", "many_processes"),
        ("utils.batch_memory_manager", "BatchSplittingSampler", "BatchMemoryManager cuts"),
        ("utils.uniform_sampler", "DistributedUniformWithReplacementSampler", "many_processes"),
        ("accountants.registry", "register_accountant", "own accountant alone"),
    ],
)
def test_what_is_not_offered_is_said_at_its_import(module: str, name: str, remedy: str) -> None:
    importlib.import_module(f"opacus.{module}")  # is there
    loaded = importlib.import_module(f"{ROOT}.{module}")
    with pytest.raises(ImportError, match=remedy):
        exec(f"from {ROOT}.{module} import {name}")
    assert not hasattr(loaded, "no_name_at_all")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("optimizers.perlayeroptimizer", "DPPerLayerOptimizer"),
        ("optimizers.optimizer_fast_gradient_clipping", "DPOptimizerFastGradientClipping"),
        (
            "grad_sample.grad_sample_module_fast_gradient_clipping",
            "GradSampleModuleFastGradientClipping",
        ),
        ("accountants.registry", "create_accountant"),
        ("utils.adaptive_clipping.adaptive_clipping_utils", "PrivacyEngineAdaptiveClipping"),
        ("validators.errors", "UnsupportableModuleError"),
        ("validators.errors", "NotYetSupportedModuleError"),
    ],
)
def test_places_that_scripts_import_from(module: str, name: str) -> None:
    for package in ("opacus", ROOT):
        assert hasattr(importlib.import_module(f"{package}.{module}"), name)


def _public(module: ModuleType) -> Iterator[str]:
    """Names that a script may import from a module: of its functions and classes."""
    listed = hasattr(module, "__all__")
    for name in getattr(module, "__all__", vars(module)):
        own = getattr(module, name, None)
        offered = inspect.isclass(own) or inspect.isfunction(own)
        if offered and name[0] != "_" and (listed or own.__module__ == module.__name__):
            yield name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "module",
    [
        found.name.removeprefix("opacus.")
        for found in pkgutil.walk_packages(opacus.__path__, "opacus.")
        if "tests" not in found.name.split(".")
    ],
)
def test_every_import_of_opacus_works_or_says_what_there_is_instead(module: str) -> None:
    theirs_whole = importlib.import_module(f"opacus.{module}")
    try:
        ours = importlib.import_module(f"{ROOT}.{module}")
    except ModuleNotFoundError as refused:
        package, _, last = f"{ROOT}.{module}".rpartition(".")
        assert str(refused).startswith(f"{package} has no {last!r}: ")
        return
    for name in _public(theirs_whole):
        try:
            getattr(ours, name)
        except ImportError as refused:
            assert str(refused).startswith(f"{ours.__name__} has no {name!r}: ")


def test_a_module_that_nobody_has_is_not_found_in_pythons_words() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module(f"{ROOT}.nowhere")
