"""A rule for a layer of one's own, checked against autograd before it is taken."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from quietgrad.clipping.norms.factors import DenseFactors, DirectGradients, Given
from quietgrad.clipping.norms.rules.checked import CheckedRule
from quietgrad.clipping.norms.rules.padded import moved_by_padding
from quietgrad.clipping.norms.rules.registry import _RULES, Rule, rule_for

TOLERANCE = 1e-4  # relative, of a float64 copy: far above rounding, far below a wrong formula


def add_layer_rule(rule: Rule, module: nn.Module, x: Tensor) -> None:
    """From here on modules of ``module``'s exact type are clipped by ``rule``, in this process.

    Before that the rule is tried on a float64 copy of ``module``: all examples of ``x`` together,
    and each alone, against one backward pass an example. A wrong formula would give wrong
    gradients; one that mixes examples would break the guarantee. What is tried is ``x`` alone, so
    it should be as varied as what the layer will see. It is tried on made-up records too, whose
    positions cancel: padding may change no bit of them (``sum_over_positions``). The guard of a run
    looks at the rule again, in that model, in its types and on its records.

    Args:
        rule: (module, input, gradient at its output, names of the parameters wanted) -> own
            parameter name to ``DirectGradients`` ([examples, entries]) or ``DenseFactors``. The
            first dimension of everything is examples; row i may depend on example i alone.
        module: one of the kind, of any size; it takes one tensor and gives one.
        x: [examples, ...] inputs that are not private, two or more, each different.

    Raises:
        TypeError: if ``module`` is none, or has no parameter, or the rule gives something else.
        ValueError: for a kind that has a rule, too few examples, or a rule that is not autograd's
            gradient, says something else of an example in company, or of one that is padded longer.
    """
    if not isinstance(module, nn.Module) or not list(module.parameters(recurse=False)):
        raise TypeError(
            f"module={module!r} must be a module with parameters of its own; pass one of the kind "
            "that the rule is for"
        )
    kind = type(module)
    if rule_for(module) is not None:
        raise ValueError(
            f"module={kind.__name__} has a rule already; give your own layer a class of its own"
        )
    if x.dim() < 2 or len(x) < 2:
        raise ValueError(
            f"x of shape {list(x.shape)} must be [examples, ...] with two examples or more: the "
            "rule is tried on them together and alone"
        )
    _require_like_autograd(rule, module, x)
    checked = CheckedRule(rule)
    require_same_however_padded(checked, module, x)
    _RULES[kind] = checked


def require_same_however_padded(rule: CheckedRule, module: nn.Module, x: Tensor) -> None:
    """Refuses a rule that gives a record of this shape other bits where it is padded longer.

    Raises:
        ValueError: naming the parameter.
    """
    copied = copy.deepcopy(module).eval()
    wanted = tuple(name for name, _ in copied.named_parameters(recurse=False))
    like = next(copied.parameters(recurse=False))
    x = x.detach().to(like.device, like.dtype) if x.is_floating_point() else x
    with torch.no_grad():
        grad = copied(x)
    name = moved_by_padding(rule, copied, x, grad, wanted)
    if name is not None:
        raise other_bits(type(module).__name__, name)


def other_bits(kind: str, name: str) -> ValueError:
    """Of a rule whose sums follow from a record's padding."""
    return ValueError(
        f"the layer rule of {kind} gives a record another gradient of {name!r} where it is padded "
        "longer, so one long record would change what others add: torch adds up positions in "
        "another order then; add them up by quietgrad.clipping.sum_over_positions, one dimension "
        "after the other where several are summed, or give DenseFactors, with their sizes (height, "
        "width) where positions are a map"
    )


def _require_like_autograd(rule: Rule, module: nn.Module, x: Tensor) -> None:
    copied = copy.deepcopy(module).double().eval()
    x = x.detach().double() if x.is_floating_point() else x
    parameters = dict(copied.named_parameters(recurse=False))
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    with torch.enable_grad():
        out = copied(x)
        if not isinstance(out, Tensor) or out.dim() < 1 or len(out) != len(x):
            raise ValueError(
                f"module={type(module).__name__} gives no tensor with the {len(x)} examples "
                "first; such a layer goes without a rule"
            )
        source = torch.Generator().manual_seed(0)
        grads = torch.randn(out.shape, generator=source, dtype=torch.float64, device="cpu")
        grads = grads.to(out.device)
        losses = [(copied(x[i : i + 1]) * grads[i : i + 1]).sum() for i in range(len(x))]
        rights = [torch.autograd.grad(loss, list(parameters.values())) for loss in losses]
    together = _gradients(rule, copied, x, grads, parameters)
    for name, parameter in parameters.items():  # the others frozen
        _gradients(rule, copied, x, grads, {name: parameter})
    for i, right in enumerate(rights):
        alone = _gradients(rule, copied, x[i : i + 1], grads[i : i + 1], parameters)
        for name, wanted_one in zip(parameters, right, strict=True):
            _require_close(name, i, "alone", alone[name][0], wanted_one)
            _require_close(name, i, "among the others", together[name][i], wanted_one)


def _gradients(
    rule: Rule, module: nn.Module, x: Tensor, grad: Tensor, parameters: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Parameter name -> [examples, *shape], as the rule has them."""
    with torch.no_grad():
        found: Mapping[str, Given] = rule(module, x, grad, tuple(parameters))
        if set(found) != set(parameters):
            raise ValueError(
                f"rule gives {sorted(found)} where {sorted(parameters)} is wanted; it has to give "
                "the parameters that are wanted, by their own names, and no others"
            )
        return {name: _of_examples(name, found[name], p, len(x)) for name, p in parameters.items()}


def _of_examples(name: str, found: object, parameter: nn.Parameter, examples: int) -> Tensor:
    """[examples, *shape] of what a rule gives for one parameter."""
    if not isinstance(found, DirectGradients | DenseFactors):
        raise TypeError(
            f"rule gives a {type(found).__name__} for {name!r}; wrap it: DirectGradients(gradients "
            "of [examples, entries]), or DenseFactors(left, right)"
        )
    shape = parameter.shape
    try:
        ones = torch.eye(examples, dtype=torch.float64, device=parameter.device)
        return torch.stack([found.weighted_sum(one, shape, torch.float64) for one in ones])
    except (RuntimeError, IndexError, ValueError) as error:
        told = ", ".join(
            str(list(part.shape)) for part in vars(found).values() if isinstance(part, Tensor)
        )
        raise ValueError(
            f"rule gives {type(found).__name__} of shape {told} for {name!r}, a parameter of "
            f"{list(shape)}, and {examples} examples; it takes DirectGradients([examples, "
            "entries]), or DenseFactors([examples, 1, positions, rows], [examples, 1, positions, "
            "columns])"
        ) from error


def _require_close(name: str, example: int, where: str, given: Tensor, right: Tensor) -> None:
    difference = float((given - right).norm()) / max(float(right.norm()), 1e-300)
    if not difference <= TOLERANCE:  # a NaN too
        raise ValueError(
            f"rule gives another gradient of {name!r} than autograd for example {example} "
            f"{where}: relative difference {difference:.2g}; correct its formula"
        )
