"""Curvature of public data: products against the dense Hessian, Lanczos against a dense
decomposition, quadrature within its stated error, the tail's curve, provenance.

Statistical: the quadrature's estimates are held to 5 of their own standard errors over 24 probes
(false alarm below 1e-4 by Student's t), with fixed seeds.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import aslinearoperator
from torch import nn

from quietgrad.curvature import (
    CurvatureOperator,
    Spectrum,
    automatic_tail_index,
    extend_spectrum,
    load_spectrum,
    positive_part,
    top_eigenvalues,
)
from quietgrad.curvature.spectrum import record_hash
from quietgrad.training.tasks.images.models import SmallCnn
from quietgrad.training.tasks.records import classification_loss


def cross_entropies(model: nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(data["x"]), data["labels"], reduction="none")


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)).double()


def batch(examples: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(examples, 5, generator=generator, dtype=torch.float64),
        "labels": torch.randint(0, 3, (examples,), generator=generator),
    }


def cut(whole: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    return [
        {k: v[i : i + size] for k, v in whole.items()} for i in range(0, len(whole["labels"]), size)
    ]


def flat_loss(
    model: nn.Module, names: list[str], data: dict[str, torch.Tensor], per_output: bool = False
):
    parameters = dict(model.named_parameters())
    shapes = [(name, parameters[name].shape, parameters[name].numel()) for name in names]

    def function(theta: torch.Tensor) -> torch.Tensor:
        replaced, start = {}, 0
        for name, shape, size in shapes:
            replaced[name] = theta[start : start + size].reshape(shape)
            start += size
        logits = torch.func.functional_call(model, replaced, (data["x"],))
        return logits if per_output else F.cross_entropy(logits, data["labels"])

    theta = torch.cat([parameters[name].detach().reshape(-1) for name in names])
    return function, theta


def dense(operator: CurvatureOperator) -> np.ndarray:
    return np.stack([operator.matvec(e) for e in np.eye(operator.shape[0])], axis=1)


@pytest.mark.grid(4, "models times losses")
@pytest.mark.parametrize("size", [1, 5, 12])
@pytest.mark.parametrize("keep_graphs", [False, True])
@pytest.mark.parametrize("names", [None, ["0.weight", "3.bias"]])
def test_hessian_products_are_those_of_the_dense_hessian(
    size: int, keep_graphs: bool, names: list[str] | None
) -> None:
    model, data = mlp(), batch()
    every = [n for n, _ in model.named_parameters()] if names is None else names
    function, theta = flat_loss(model, every, data)
    expected = torch.autograd.functional.hessian(function, theta).numpy()
    operator = CurvatureOperator(
        model, cross_entropies, cut(data, size), parameters=names, keep_graphs=keep_graphs
    )
    np.testing.assert_allclose(dense(operator), expected, atol=1e-10)


@pytest.mark.parametrize("size", [4, 12])
def test_gauss_newton_products_leave_out_the_models_own_curvature(size: int) -> None:
    model, data = mlp(), batch()
    names = [n for n, _ in model.named_parameters()]
    outputs, theta = flat_loss(model, names, data, per_output=True)
    jacobian = torch.autograd.functional.jacobian(outputs, theta)  # [examples, classes, p]
    probabilities = outputs(theta).softmax(1)
    middle = torch.diag_embed(probabilities) - probabilities[:, :, None] * probabilities[:, None, :]
    expected = torch.einsum("ncp,ncd,ndq->pq", jacobian, middle, jacobian).numpy() / 12
    operator = CurvatureOperator(
        model,
        lambda m, b: m(b["x"]),
        cut(data, size),
        kind="gauss-newton",
        output_loss=lambda out, b: F.cross_entropy(out, b["labels"], reduction="none"),
    )
    found = dense(operator)
    np.testing.assert_allclose(found, expected, atol=1e-10)
    assert np.linalg.eigvalsh((found + found.T) / 2).min() > -1e-10
    function, _ = flat_loss(model, names, data)
    assert np.abs(found - torch.autograd.functional.hessian(function, theta).numpy()).max() > 1e-3


def test_a_parameter_without_influence_has_no_curvature() -> None:
    model = mlp()
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    operator = CurvatureOperator(model, cross_entropies, [batch()])
    vector = np.zeros(operator.shape[0])
    vector[:2] = 1.0  # the model's own parameters come first among the named ones
    assert operator.names[0] == "unused"
    assert np.abs(operator.matvec(vector)).max() == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "fisher"}, "kind='fisher'"),
        ({"parameters": ["nowhere"]}, "nowhere"),
        ({"batches": []}, "batches is empty"),
        ({"kind": "gauss-newton"}, "output_loss"),
    ],
)
def test_operators_refuse(changes: dict, message: str) -> None:
    arguments = {
        "model": mlp(),
        "per_example_loss": cross_entropies,
        "batches": [batch()],
    } | changes
    with pytest.raises(ValueError, match=message):
        CurvatureOperator(**arguments)


def test_a_loss_that_is_already_averaged_is_refused() -> None:
    operator = CurvatureOperator(
        mlp(), lambda m, b: F.cross_entropy(m(b["x"]), b["labels"]), [batch()]
    )
    with pytest.raises(ValueError, match="one value per example"):
        operator.matvec(np.ones(operator.shape[0]))


@pytest.mark.slow("ten seconds: a dense Hessian; random features have theirs in make test")
def test_lanczos_finds_the_top_of_a_cnns_hessian() -> None:
    torch.manual_seed(0)
    model = SmallCnn(1, 3, hidden=2)
    for p in model.features[3].parameters():  # keeps the dense Hessian small
        p.requires_grad_(False)
    for p in model.features[6].parameters():
        p.requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    data = {
        "pixels": torch.randn(20, 1, 8, 8, generator=generator),
        "labels": torch.randint(0, 3, (20,), generator=generator),
    }
    operator = CurvatureOperator(model, classification_loss, [data], keep_graphs=True)
    full = dense(operator)
    exact = np.sort(np.linalg.eigvalsh((full + full.T) / 2))[::-1]
    found = top_eigenvalues(operator, 40)
    np.testing.assert_allclose(found.values, exact[:40], rtol=1e-4, atol=1e-5 * exact[0])
    assert found.residuals.max() < 1e-4 * exact[0]
    assert found.products > 40


def random_symmetric(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = np.concatenate(
        [
            5 / np.arange(1, size // 2 + 1),
            np.zeros(size // 4),
            -rng.random(size - size // 2 - size // 4),
        ]
    )
    q, _ = np.linalg.qr(rng.standard_normal((size, size)))
    return (q * values) @ q.T, np.sort(values)[::-1]


def test_top_eigenvalues_are_algebraically_largest_and_seeded() -> None:
    matrix, values = random_symmetric(80, 0)
    found = top_eigenvalues(aslinearoperator(matrix), 10, tolerance=1e-9)
    np.testing.assert_allclose(found.values, values[:10], rtol=1e-8)
    again = top_eigenvalues(aslinearoperator(matrix), 10, tolerance=1e-9)
    np.testing.assert_array_equal(found.values, again.values)


def test_top_eigenvalues_refuse_more_than_there_are_and_say_when_not_converged() -> None:
    matrix, _ = random_symmetric(30, 0)
    with pytest.raises(ValueError, match="count=30"):
        top_eigenvalues(aslinearoperator(matrix), 30)
    rng = np.random.default_rng(0)
    close = np.diag(1 + 1e-9 * rng.random(400))
    with pytest.raises(RuntimeError, match="ask for fewer"):
        top_eigenvalues(aslinearoperator(close), 30, tolerance=1e-14, max_restarts=1)


def test_quadrature_measures_mass_and_count_within_its_error() -> None:
    matrix, values = random_symmetric(200, 1)
    found = positive_part(aslinearoperator(matrix), probes=24, steps=60, threshold=1e-2)
    mass = values[values > 0].sum()
    assert abs(found.mass - mass) < 5 * found.mass_error
    assert abs(found.count - (values > 1e-2).sum()) < 5 * found.count_error + 1
    assert abs(found.negative_mass - values[values < 0].sum()) < 0.2 * abs(values[values < 0].sum())
    # Wrong answers are outside: the sum of magnitudes, and half of the mass.
    assert abs(found.mass - np.abs(values).sum()) > 5 * found.mass_error
    assert abs(found.mass - mass / 2) > 5 * found.mass_error


def power_law(c: float, a: float, tail_index: int) -> np.ndarray:
    rank = np.arange(1, tail_index + 1)
    return 1e-6 * np.exp(c * (np.log(tail_index) - np.log(rank)) ** a)


HIDDEN_TAIL = 1e-12  # share of the mass below which rounding may hide where the tail ends


@settings(deadline=None, max_examples=25)
@given(
    c=st.floats(0.2, 2.0),
    a=st.floats(0.7, 1.6),
    tail_index=st.integers(300, 20_000),
    kept=st.integers(10, 200),
)
@example(
    c=2.0, a=1.599609375, tail_index=11958, kept=17
)  # the tail is 3e-14 of the mass: 0.0592 away, and now said
@example(
    c=1.9489362577134821, a=1.5079285916057934, tail_index=9876, kept=193
)  # 4e-16 of it: ten times too long
@example(
    c=1.7545521624420364, a=1.58307553605971, tail_index=16600, kept=192
)  # nothing of it at all
def test_the_tail_of_a_power_law_is_recovered(
    c: float, a: float, tail_index: int, kept: int
) -> None:
    exact = power_law(c, a, tail_index)
    found = extend_spectrum(exact[:kept], tail_index, 1e-6)
    usable = found > 2e-6
    np.testing.assert_allclose(found[usable], exact[usable], rtol=1e-3)
    assert len(found) == tail_index and (np.diff(found) <= 1e-12 * found[:-1]).all()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        index = automatic_tail_index(exact[:kept], math.fsum(exact), 10 * tail_index, 1e-6)
    if said:  # only where there is reason to
        assert "rounding hides the tail" in str(said[0].message)
        assert math.fsum(exact[kept:]) < HIDDEN_TAIL * math.fsum(exact)
    else:
        assert abs(np.log(index / tail_index)) < 0.06


@pytest.mark.parametrize("kept", [17, 40])
def test_a_tail_that_rounding_hides_is_said_to_be(kept: int) -> None:
    exact = power_law(2.0, 1.6, 11_958)
    with pytest.warns(UserWarning, match="set tail_index yourself"):
        automatic_tail_index(exact[:kept], math.fsum(exact), 119_580, 1e-6)
    assert automatic_tail_index(exact[:8], math.fsum(exact), 119_580, 1e-6) == pytest.approx(
        11_958, rel=0.05
    )


def test_the_automatic_index_stays_between_the_computed_ones_and_the_parameters() -> None:
    top = 1 / np.arange(1.0, 51.0)
    assert automatic_tail_index(top, 1e-3, 1000) == 51
    assert automatic_tail_index(top, 1e9, 1000) == 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 0.5], 100), "at least 3"),
        (([1.0, 0.5, -3.0, 0.0], 100), "at least 3"),
        (([1.0, 0.5, 0.3], 3), "tail_index=3"),
        (([1.0, np.nan, 0.3, 0.1], 100), "not finite"),
        (([1.0, 0.5, 0.3], 100, 0.0), "tail_value"),
    ],
)
def test_extension_refuses(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        extend_spectrum(*arguments)


def spectrum() -> Spectrum:
    top = 3 / np.arange(1.0, 21.0)
    return Spectrum(
        top,
        np.full(20, 1e-6),
        500,
        {"head.weight": (3, 4)},
        (record_hash(b"a"), record_hash(b"b")),
        1e-6,
        {"loss": "x"},
    )


def test_a_spectrum_is_read_back_as_written(tmp_path) -> None:
    one = spectrum()
    one.save(tmp_path / "s.npz")
    other = load_spectrum(tmp_path / "s.npz")
    np.testing.assert_array_equal(one.eigenvalues(), other.eigenvalues())
    assert (one.parameters, one.record_hashes, one.facts) == (
        other.parameters,
        other.record_hashes,
        other.facts,
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "s.npz"]
    (tmp_path / "bad.npz").write_bytes(b"no")
    for name in ("bad.npz", "none.npz"):
        with pytest.raises(ValueError, match=name):
            load_spectrum(tmp_path / name)


def test_a_spectrum_of_other_parameters_or_private_data_is_refused() -> None:
    one = spectrum()
    one.require_same_parameters({"head.weight": (3, 4)})
    with pytest.raises(ValueError, match=r"another parameter set: 'head\.bias'"):
        one.require_same_parameters({"head.weight": (3, 4), "head.bias": (3,)})
    with pytest.raises(ValueError, match="another parameter set"):
        one.require_same_parameters({"head.weight": (3, 5)})
    one.require_disjoint([record_hash(b"c")])
    with pytest.raises(ValueError, match="some of the spectrum's public records"):
        one.require_disjoint([record_hash(b"c"), record_hash(b"b")])


@pytest.mark.parametrize("damage", ["cut", "format", "key"])
def test_a_damaged_spectrum_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "s.npz"
    spectrum().save(path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    else:
        with np.load(path) as held:
            described, arrays = (
                json.loads(str(held["described"])),
                {k: held[k] for k in ("top", "residuals")},
            )
        described |= {"format": 99} if damage == "format" else {}
        if damage == "key":
            described.pop("tail_index")
        np.savez(path, **arrays, described=json.dumps(described))
    with pytest.raises(
        ValueError, match=r"s\.npz' is not a whole spectrum file: .*; make it again"
    ):
        load_spectrum(path)


def test_a_spectrum_that_names_no_records_is_refused() -> None:
    with pytest.raises(ValueError, match="does not name its public records"):
        replace(spectrum(), record_hashes=()).require_disjoint([record_hash(b"c")])
