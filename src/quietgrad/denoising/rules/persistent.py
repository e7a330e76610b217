"""What stood out of the momentum and is seen again in the next release is amplified.

A learning rate that is large for the task makes the strongest directions of a gradient swing: each
release pulls back what the last step overshot. Those directions are what stands out of the noise,
so a longer step along them makes them swing more; along directions that releases agree on it is
what saves steps. Released values tell which is which, so the gain of a matrix grows while they
agree and falls back when they do not, as the learning rates of delta-bar-delta do (Jacobs 1988).
docs/notes/denoising_rules.md has what was measured.

Symbols: M the momentum before a release, y, u, v its singular triplets above the bulk's edge,
w = shrink(y); G the release, in the units of those that went into M. The shrunk value w is u^T S v
for the signal S of M (eq. 8: the optimal coefficient of u v^T), so a gradient that has stayed the
same shows u^T G v = w / mass: M holds it mass times. The ratio of the two is the persistence r of a
spike: 1 for a gradient that stays, negative for one that turns round. u and v come from M alone, so
fresh noise has mean zero in it. Correlated noise has not: the share of M's noise that G holds is
known (``MomentNoise.share_in``), u^T N v = y - w of M's noise N, and that is taken off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quietgrad.checks import (
    require_at_least,
    require_bool,
    require_finite,
    require_int,
    require_positive,
)
from quietgrad.denoising.formulas import bulk_edge, shrink
from quietgrad.denoising.matrices import matrix_shapes, stacks
from quietgrad.denoising.moment import MomentNoise
from quietgrad.denoising.rules.detection import KAPPA, require_kappa, require_released
from quietgrad.denoising.rules.protocols import Directions, Gains, MomentStep
from quietgrad.denoising.spikes import Spikes, detect
from quietgrad.noise.noisy_sum import NoisySum

# Of the gain, at a release that shows all of what stood out again (from 1 to 8 in three steps), and
# at one that shows as much turned round.
GROWTH, FALL = 2.0, 0.25


@dataclass(frozen=True)
class PersistentAmplification:
    """The momentum plus what stood out of it before a release, as far as that shows it again.

    Of every matrix (g - 1) sum_i min(1, max(0, r_i)) w_i u_i v_i^T is added, with the gain
    g = g_before GROWTH^r for r > 0, g_before FALL^|r| else, r the persistence of all its spikes
    (weighted by w^2, cut to [-1, 1]), and g kept between 1 and ``largest_gain``. Where nothing
    stands out, nothing is added and the gain stays. Nothing is taken away. At rates that are small
    for the task what stands out stays, and the step along it is g times as long; at large ones it
    swings from step to step, and nothing is amplified.

    Attributes:
        kappa: a layer is touched if its largest singular value is at least so many edges of the
            bulk; at least 1.
        largest_gain: by how much a step along the spikes is longer at most; at least 1, which
            amplifies nothing.
        delay: how many steps go along the moment as it is; the rule itself begins with the second.
        embeddings: whether embedding tables are treated as matrices too.

    Raises:
        TypeError, ValueError: for settings out of range.
    """

    kappa: float = KAPPA
    largest_gain: float = 8.0
    delay: int = 0
    embeddings: bool = False

    def __post_init__(self) -> None:
        require_kappa(self.kappa)
        require_finite("largest_gain", self.largest_gain)
        require_at_least("largest_gain", self.largest_gain, 1.0, "spikes are never made smaller")
        require_int("delay", self.delay)
        require_at_least("delay", self.delay, 0, "pass a number of steps")
        require_bool("embeddings", self.embeddings)

    def directions(
        self,
        step: MomentStep,
        model: nn.Module | None = None,
    ) -> Directions:
        """See ``MomentumRule``."""
        if not step.noise_before.releases or step.noise_after.releases <= self.delay:
            return {}, {}
        added, gains = self.added(
            step.before,
            step.noise_before,
            step.incoming(),
            step.expected_batch_size,
            step.gains,
            model,
        )
        return {name: part.add_(step.after[name]) for name, part in added.items()}, gains

    def added(
        self,
        moments: Mapping[str, Tensor],
        noise: MomentNoise,
        noisy: NoisySum,
        expected_batch_size: float,
        gains: Gains,
        model: nn.Module | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, list[float]]]:
        """What is added to the momentum, and the gains that go with it.

        Cost: as for a rule of the gradient, and m n operations a spike. Memory: one tensor for
        every parameter of which something is amplified, and one stack of releases at a time.

        Args:
            moments: parameter name -> running average of releases, before ``noisy``; each divided
                by ``expected_batch_size``.
            noise: what is known of the averages' noise.
            noisy: the release that comes next; not denoised.
            expected_batch_size: B.
            gains: parameter name -> gain of each of its matrices before this release; 1 where there
                is none.
            model: tells embeddings and experts from other weights.

        Returns:
            Name -> tensor in the parameter's shape, for parameters of which something is amplified;
            name -> new gains, for those that may have changed.

        Raises:
            TypeError: for anything that was not released.
            ValueError: if it was denoised, lacks a parameter or has it in another shape.
        """
        _check(moments, noisy, expected_batch_size)
        added: dict[str, Tensor] = {}
        found: dict[str, list[float]] = {}
        if noise.std == 0 or not noise.mass:
            return added, found
        share = noise.share_in(noisy.noise_std / expected_batch_size, noisy.mixing_row)
        for names, stack in stacks(moments, matrix_shapes(moments, model, self.embeddings)):
            detected = detect(stack, noise.std, self.kappa)
            if detected is None:
                continue
            which, spikes = detected
            each = len(stack) // len(names)
            shape = (stack.shape[1], stack.shape[2])
            released = torch.cat([noisy.gradients[name].reshape(-1, *shape) for name in names])
            released = released if len(spikes.values_lp) == len(which) else released[which]
            gain = stack.new_tensor([g for name in names for g in gains.get(name, [1.0] * each)])
            seen_lp = _seen(released.to(stack), spikes) / expected_batch_size
            of_which = self._weights(seen_lp, spikes, shape, noise, share, gain[which])
            weights_lp, gain[which] = of_which
            touched = which.clone()
            touched[which] = weights_lp.any(dim=1)
            new, changes = gain.tolist(), touched.tolist()
            part = _spread(_product(spikes, weights_lp), which) if any(changes) else None
            for i, name in enumerate(names):
                of_name = slice(i * each, (i + 1) * each)
                found[name] = new[of_name]
                if part is not None and any(changes[of_name]):
                    # A copy where the stack has others that are not used: a view would keep them.
                    own = part[of_name] if all(changes) else part[of_name].clone()
                    added[name] = own.reshape(moments[name].shape).to(moments[name].dtype)
        return added, found

    def _weights(
        self,
        seen_lp: Tensor,
        spikes: Spikes,
        shape: tuple[int, int],
        noise: MomentNoise,
        share: float,
        gain_l: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """([l, p] (g - 1) min(1, max(0, r)) w, [l] g)."""
        values_lp = spikes.values_lp
        decided = values_lp[:, :1] >= self.kappa * bulk_edge(shape, noise.std)
        w = torch.where(decided, shrink(values_lp, shape, noise.std), 0.0)
        seen_again = noise.mass * (seen_lp - share * (values_lp - w))
        # A release that overflowed says nothing.
        rw = torch.nan_to_num(torch.where(w > 0, seen_again, 0.0))
        squares = w.square().sum(dim=1).clamp(min=torch.finfo(w.dtype).tiny)
        r = ((rw * w).sum(dim=1) / squares).nan_to_num().clamp(-1, 1)
        factor = torch.where(r > 0, GROWTH ** r.clamp(min=0), FALL ** (-r).clamp(min=0))
        gain = (gain_l * factor).clamp(1.0, self.largest_gain)
        return (gain - 1).unsqueeze(1) * rw.clamp(min=0).minimum(w), gain


def _check(moments: Mapping[str, Tensor], noisy: NoisySum, expected_batch_size: float) -> None:
    require_released(noisy)
    require_positive("expected_batch_size", expected_batch_size, "pass plan.expected_batch_size")
    for name, moment in moments.items():
        if name not in noisy.gradients or noisy.gradients[name].shape != moment.shape:
            there = tuple(noisy.gradients[name].shape) if name in noisy.gradients else "nothing"
            raise ValueError(
                f"noisy has {there} for {name!r}, and its moment {tuple(moment.shape)}; pass the "
                "release that goes into these moments"
            )


def _seen(released_lmn: Tensor, spikes: Spikes) -> Tensor:
    """[l, p] u^T G v."""
    right = spikes.right_lnp.transpose(1, 2)
    return (torch.bmm(spikes.left_lmp.transpose(1, 2), released_lmn) * right).sum(dim=2)


def _product(spikes: Spikes, weights_lp: Tensor) -> Tensor:
    return torch.bmm(spikes.left_lmp * weights_lp.unsqueeze(1), spikes.right_lnp.transpose(1, 2))


def _spread(part: Tensor, which: Tensor) -> Tensor:
    """Rows of ``part`` where ``which`` is true, zeros elsewhere."""
    if len(part) == len(which):
        return part
    whole = part.new_zeros(len(which), *part.shape[1:])
    whole[which] = part
    return whole
