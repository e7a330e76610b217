"""``LightningModule`` with private steps."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

import quietgrad.integrations.lightning.refusals as refusals
from quietgrad.integrations.lightning.hooks import require_parts
from quietgrad.integrations.lightning.hyperparameters import let_configurations_load
from quietgrad.integrations.lightning.session import MARK
from quietgrad.integrations.lightning.steps import PrivateSteps, PublicLoaders
from quietgrad.plan import PrivacyConfig
from quietgrad.tensors import Batch
from quietgrad.training.files.provenance import KEY

let_configurations_load()


def loss_in_precision(model: Any, batch: Batch) -> Tensor:
    """[records] losses, in the Trainer's precision. Private."""
    with model.trainer.precision_plugin.train_step_context():
        return model.per_example_loss(batch)


class PrivateLightningModule(LightningModule):
    """``LightningModule`` whose ``fit`` is private: ``per_example_loss`` stands where
    ``training_step`` stood, and ``privacy`` says how private.

    A step is one Poisson batch of the plan; what ``fit`` is given (a data set, a DataLoader, a data
    module) says which records, and how they are read. ``max_steps`` is the plan's. The ledger and,
    while the run lasts, the secrets are in ``Trainer(default_root_dir=)``. The training loss is
    private, and nobody sees it: ``self.log`` is for validation.

    Args:
        privacy: the guarantee, and the size of a batch; or set ``self.privacy``, or a class
            attribute.
        *args, **options: for other base classes.

    Attributes:
        accept_start: "epsilons-add" to go on from weights of an earlier private run, whose epsilon
            adds to this one's.
        record_owner: a column of the training data, or one owner a record: whole users are
            protected (docs/users.md). Also an argument, like ``privacy``.
    """

    privacy: PrivacyConfig
    accept_start: str = ""
    record_owner: Any = None

    def __init__(
        self,
        *args: Any,
        privacy: PrivacyConfig | None = None,
        record_owner: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        if privacy is not None:
            self.privacy = privacy
        if record_owner is not None:
            self.record_owner = record_owner
        self._steps: PrivateSteps | None = None
        self._batch: Any = None
        self._loaded_record: dict[str, Any] | None = None
        self._loaded_run = ""  # that the record is of

    def per_example_loss(self, batch: Any) -> Tensor:
        """[records] losses of a micro-batch, each a function of its record alone. Yours to write.

        Args:
            batch: what ``collate_fn`` made of the records, on the module's device.
        """
        raise NotImplementedError("write per_example_loss(self, batch) -> [records] losses")

    def epsilon(self) -> float:
        """Privacy spent so far by the last ``fit``, at the plan's delta; an upper bound.

        Raises:
            RuntimeError: before a run has begun.
        """
        if self._steps is None:
            raise RuntimeError("no private run has begun; call trainer.fit(model, ...)")
        return self._steps.run.epsilon()

    # ---- what Lightning calls ----

    @property
    def private_base(self) -> type[PrivateLightningModule]:
        """This class: what a subclass may not change is compared with it."""
        return PrivateLightningModule

    @property
    def trainer(self) -> Trainer:
        """As Lightning's. Where it is set to fit, what cannot be private is refused."""
        return LightningModule.trainer.fget(self)  # type: ignore[attr-defined]

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            require_parts(trainer)
            refusals.refuse_trainer(trainer)
            refusals.refuse_module(self, PrivateLightningModule)
            if trainer.max_epochs is None and trainer.max_steps == -1:
                trainer.fit_loop.max_epochs = -1  # the plan's steps end training
            self._steps = PrivateSteps(
                self.privacy,
                self.accept_start,
                self._loaded_record,
                self.record_owner,
                self._loaded_run,
            )
            others = [one for one in trainer.callbacks if not isinstance(one, PublicLoaders)]
            trainer.callbacks[:] = [self._steps, *others]
        elif (
            trainer is not None
            and self._steps is not None
            and not any(isinstance(one, PublicLoaders) for one in trainer.callbacks)
        ):
            trainer.callbacks.insert(0, PublicLoaders(self._steps.records, self._steps.owners))
        LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]

    def training_step(self, batch: Any) -> Tensor:
        """Nothing yet: the Trainer empties ``.grad`` between this and ``backward``.

        Returns:
            No number: nothing of the loss leaves the step, and a callback that shows what it is
            given as ``outputs["loss"]`` shows none.
        """
        self._batch = batch
        return torch.full((), torch.nan, device=self.device)

    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        """One private step up to the optimiser's."""
        if self._steps is None:
            raise RuntimeError("no private run has begun; call trainer.fit(model, ...)")
        batch, self._batch = self._batch, None
        run = self._steps.run
        run.backward(self, loss_in_precision, batch)
        self._steps.noted(self)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """As Lightning's, in validation and tests.

        Raises:
            ValueError: while training.
        """
        trainer = self._trainer
        if trainer is not None and trainer.training and not trainer.sanity_checking:
            raise ValueError(
                f"self.log({name!r}) while training: what is computed from training records is "
                "private, their loss above all; log in validation_step, on public records. "
                "epsilon is logged already, and learning rates by LearningRateMonitor"
            )
        super().log(name, value, *args, **options)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remembers which run the weights are of."""
        self._remember(checkpoint.get(MARK))

    def _remember(self, mark: dict[str, Any] | None) -> None:
        """Which run the weights are of.

        Args:
            mark: ``MARK`` of a checkpoint; None: what is in memory is known by its parameters.
        """
        mark = mark or {}
        self._loaded_record, self._loaded_run = mark.get(KEY), mark.get("run", "")

    def __getstate__(self) -> dict[str, Any]:
        """Without the run, which is of one process and cannot be copied; a copy says what it has
        released so far.
        """
        if self._loaded_record is None and self._steps is not None:
            self._remember(self._steps.told())
        state: dict[str, Any] = super().__getstate__()
        return state | {"_steps": None, "_batch": None}
