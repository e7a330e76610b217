"""``PrivacyEngine`` with the interface of Opacus 1.6."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Sequence
from typing import IO, Any, BinaryIO

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from quietgrad.checks import SettingsWarning, require_delta_for, require_word
from quietgrad.integrations.opacus.accountants import QuietgradAccountant, create_accountant
from quietgrad.integrations.opacus.criterion import PerSequence
from quietgrad.integrations.opacus.data_loader import DPDataLoader
from quietgrad.integrations.opacus.grad_sample import AttachedModule, GradSampleModule
from quietgrad.integrations.opacus.optimizers import DPOptimizer
from quietgrad.integrations.opacus.settings import (
    Releases,
    clipping_of,
    require_clipping,
    require_known,
    require_mode,
    require_optimizer,
    steps_of,
)
from quietgrad.integrations.opacus.source import BatchSource
from quietgrad.integrations.opacus.validators.module_validator import ModuleValidator
from quietgrad.plan.process import BoundToProcess
from quietgrad.sampling import PoissonSampler
from quietgrad.tensors import trainable_parameters

Path = str | os.PathLike[str] | BinaryIO | IO[bytes]


class PrivacyEngine(BoundToProcess):
    """Makes a model, an optimiser and a data loader private, and says what was spent.

    Args:
        accountant: "prv"; "rdp" for the larger epsilon of Renyi divergences; "gdp" is another name
            of "prv".
        secure_mode: whether noise is from a cryptographic stream; needs ``cryptography``.

    Raises:
        ValueError: for an accountant that Opacus does not have.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        super().__init__()
        self._accountant = create_accountant(accountant)
        self.secure_mode, self._calibrated = secure_mode, False

    @property
    def accountant(self) -> QuietgradAccountant:
        """Counts the releases; no other does."""
        return self._accountant

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Private counterparts of a model, its optimiser and its data loader.

        Args:
            module: in training mode, without layers that mix records.
            optimizer: of the module's parameters.
            criterion: of the loss; returned with grad_sample_mode="ghost".
            data_loader: map-style; its batches become Poisson samples at rate 1 / len(data_loader).
            noise_multiplier: sigma, relative to the clipping norm, above 0.
            max_grad_norm: C; a list for "per_layer".
            batch_first: whether records come first in the model's tensors.
            loss_reduction: "mean" or "sum", of the loss over records.
            poisson_sampling: not used: batches are Poisson samples, as the accountant asks.
            clipping: "flat" or "per_layer".
            noise_generator: not used.
            grad_sample_mode: "hooks", "ghost", "functorch" or "ew"; all run Quietgrad's clipper.
            wrap_model: False: the given model is trained, called as before; in place of a model
                comes what ends that by ``cleanup()``.
            rand_on_empty: not needed.
            **kwargs: strict, which changes nothing: layers that mix records are always refused.

        Returns:
            (model, optimizer, data_loader), or with "ghost" (model, optimizer, criterion,
            data_loader).

        Raises:
            ValueError: naming the argument and the remedy.
            UnsupportedModuleError: for layers that mix records.
        """
        require_mode(grad_sample_mode)
        require_word("loss_reduction", loss_reduction, ("mean", "sum"))
        if not poisson_sampling:
            warnings.warn(
                "poisson_sampling=False is not done: every record of a batch has a coin of its "
                "own, as epsilon asks (of shuffled batches it may be several times as large), so "
                "that batches differ in size, and may be empty; leave it True to see this no more",
                SettingsWarning,
                stacklevel=2,
            )
        require_clipping(clipping)  # adaptive clipping has arguments of its own
        require_known(kwargs)
        if noise_generator is not None:
            warnings.warn(
                "noise_generator is not used: noise comes from Quietgrad's own streams, seeded by "
                "the operating system",
                SettingsWarning,
                stacklevel=2,
            )
        require_optimizer(module, optimizer)
        inner = module._module if isinstance(module, GradSampleModule) else module
        self.validate(module=inner, optimizer=optimizer, data_loader=data_loader)
        source = self._source(data_loader, batch_first)
        self.accountant.starts_from(inner)
        norm, groups = clipping_of(clipping, max_grad_norm, list(trainable_parameters(inner)))
        sampler = source.sampler
        noise = "secure" if self.secure_mode else "keyed"
        releases = Releases(sampler.dataset_size, sampler.sample_rate, groups, noise)
        kind = GradSampleModule if wrap_model else AttachedModule
        wrapped = kind(inner, source, batch_first=batch_first, loss_reduction=loss_reduction)
        if isinstance(optimizer, DPOptimizer):
            optimizer = optimizer.original_optimizer
        private = DPOptimizer(
            optimizer, wrapped, source, releases, noise_multiplier, norm, loss_reduction
        )
        wrapped.zero_grad()  # what is left of an earlier training is no release
        source.modules.append(wrapped)
        source.optimizers.append(private)
        loader = (
            data_loader
            if isinstance(data_loader, DPDataLoader)
            else DPDataLoader(data_loader, source)
        )
        if grad_sample_mode == "ghost":
            criterion = nn.CrossEntropyLoss() if criterion is None else criterion
            return wrapped, private, PerSequence(criterion, loss_reduction), loader
        return wrapped, private, loader

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | Sequence[float],
        **kwargs: Any,
    ) -> Any:
        """``make_private`` with the noise that spends ``target_epsilon`` at ``target_delta`` in so
        many epochs.

        Args:
            target_epsilon, target_delta: the budget.
            epochs: passes over the data loader; each is len(data_loader) steps. More passes spend
                more, and ``get_epsilon`` says so.
            module, optimizer, criterion, data_loader, max_grad_norm, kwargs: as for
                ``make_private``; ``epsilon_tolerance`` is accepted: the noise is exact.

        Raises:
            ValueError: as ``make_private``, and for a budget that no noise meets.
        """
        if len(self.accountant) or self._calibrated:
            warnings.warn(
                "this PrivacyEngine has released something already, or was calibrated for another "
                "model, and the noise is calibrated for what comes now alone; the whole epsilon "
                "will be larger",
                SettingsWarning,
                stacklevel=2,
            )
        self._calibrated = True
        _require_loader(data_loader)
        require_delta_for("target_delta", target_delta, len(data_loader.dataset))  # type: ignore[arg-type]
        kwargs.pop("epsilon_tolerance", None)  # of Opacus' search
        steps = steps_of(epochs, len(data_loader))
        sigma = self.accountant.noise_for(target_epsilon, target_delta, 1 / len(data_loader), steps)
        return self.make_private(
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=data_loader,
            noise_multiplier=sigma,
            max_grad_norm=max_grad_norm,
            **kwargs,
        )

    def _source(self, data_loader: DataLoader[Any], batch_first: bool) -> BatchSource:
        if isinstance(data_loader, DPDataLoader):  # a second model on the same batches
            if data_loader.source.accountant is not self.accountant:
                raise ValueError(
                    "data_loader was made private by another PrivacyEngine, which counts its "
                    "releases; use that engine, or give the loader of before"
                )
            return data_loader.source
        _require_loader(data_loader)
        size = len(data_loader.dataset)  # type: ignore[arg-type]
        sampler = PoissonSampler(size, 1 / len(data_loader))
        self.accountant.counts_for(size)
        return BatchSource(sampler, self.accountant, batch_first)

    def get_epsilon(self, delta: float) -> float:
        """An upper bound of epsilon for all releases so far, for adding or removing a record.

        Args:
            delta: below one over the number of records, and 0.1; another is a ValueError.
        """
        return self.accountant.get_epsilon(delta)

    def is_compatible(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> bool:
        """Whether ``validate`` has nothing to say."""
        return ModuleValidator.is_valid(module)

    def validate(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> None:
        """Raises:
        UnsupportedModuleError: for layers that mix records, by name, and for a module that is not
            in training mode.
        """
        ModuleValidator.validate(module, strict=True)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A copy whose layers do not mix records (BatchNorm becomes GroupNorm).

        Raises:
            UnsupportedModuleError: where that is not enough.
        """
        return ModuleValidator.fix_and_validate(module)

    def save_checkpoint(
        self,
        *,
        path: Path,
        module: nn.Module,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Writes weights, optimiser, schedulers and the history of releases; nothing that was not
        released.

        Args:
            path: file, or an open one.
            module, optimizer, noise_scheduler, grad_clip_scheduler: what is saved.
            checkpoint_dict: further entries of the script's own.
            module_state_dict_kwargs, torch_save_kwargs: passed on.
        """
        saved = copy.copy(checkpoint_dict or {})
        saved["module_state_dict"] = module.state_dict(**(module_state_dict_kwargs or {}))
        saved["privacy_accountant_state_dict"] = self.accountant.state_dict()
        for name, part in (
            ("optimizer", optimizer),
            ("noise_scheduler", noise_scheduler),
            ("grad_clip_scheduler", grad_clip_scheduler),
        ):
            if part is not None:
                saved[f"{name}_state_dict"] = part.state_dict()
        torch.save(saved, path, **(torch_save_kwargs or {}))

    def load_checkpoint(
        self,
        *,
        path: Path,
        module: nn.Module,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Reads what ``save_checkpoint`` wrote; noise and batches are drawn anew. Releases made
        after it are not counted: load the newest, or add that run's epsilon.

        Args:
            path: file, or an open one.
            module, optimizer, noise_scheduler, grad_clip_scheduler: what is loaded into.
            module_load_dict_kwargs, torch_load_kwargs: passed on.

        Returns:
            What the file holds.

        Raises:
            ValueError: if it holds no history of releases.
        """
        options = {"weights_only": True} | (torch_load_kwargs or {})
        found: dict[str, Any] = torch.load(path, **options)
        self.accountant.load_state_dict(found["privacy_accountant_state_dict"])
        module.load_state_dict(found["module_state_dict"], **(module_load_dict_kwargs or {}))
        for name, part in (
            ("optimizer", optimizer),
            ("noise_scheduler", noise_scheduler),
            ("grad_clip_scheduler", grad_clip_scheduler),
        ):
            state = found.get(f"{name}_state_dict")
            if part is not None and state:
                part.load_state_dict(state)
        return found


def _require_loader(data_loader: DataLoader[Any]) -> None:
    """Raises:
    ValueError: where records cannot be drawn by a coin each.
    """
    if isinstance(data_loader.dataset, IterableDataset):
        raise ValueError(
            "data_loader reads a stream, whose records cannot be drawn by a coin each; load them "
            "into a map-style data set"
        )
    if data_loader.batch_sampler is None:
        raise ValueError("data_loader has batch_size=None; give the expected batch size")
    sampler = getattr(data_loader, "sampler", None)
    if not isinstance(sampler, RandomSampler | SequentialSampler) and not isinstance(
        data_loader, DPDataLoader
    ):
        raise ValueError(
            f"data_loader has a {type(sampler).__name__}: the accountant is for records that are "
            "all drawn at one rate; leave the sampler out, and weigh losses instead"
        )
    if not len(data_loader):
        raise ValueError("data_loader has no batch; use a smaller batch_size, or more records")
