"""The callback that a private module brings along: the run's beginning, its place in checkpoints,
and its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel

import quietgrad.integrations.lightning.monitors as monitors
import quietgrad.integrations.lightning.refusals as refusals
import quietgrad.integrations.lightning.strategies as strategies
from quietgrad.checks import warn_of_half_precision
from quietgrad.clipping.capture.spread import put_away
from quietgrad.distributed.groups.news import FAILED, in_public, tell
from quietgrad.events import unit_of
from quietgrad.integrations.lightning.data import EpochLoader, training_data
from quietgrad.integrations.lightning.progress import count_releases, move_schedules
from quietgrad.integrations.lightning.session import MARK, Session
from quietgrad.integrations.owners import Owners
from quietgrad.integrations.reporting import epsilon_for_bars, shown_epsilon, spent_name
from quietgrad.integrations.stepping import ReleasedGradients
from quietgrad.plan import PrivacyConfig, PrivateRun


class PublicLoaders(Callback):
    """Refuses to score or to predict training records: what is said of them is private.

    Args:
        records: what is trained on; None before that is known.
        owners: whose the records are.
    """

    def __init__(self, records: Any = None, owners: Owners | None = None) -> None:
        self.records = records
        self.owners = owners

    def _look(self, loaders: Any) -> None:
        refusals.refuse_private_loaders(loaders, self.records, self.owners)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks at what is validated on."""
        self.on_validation_start(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks at what is validated on, also by ``trainer.validate`` after a fit."""
        self._look(trainer.val_dataloaders)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks at what is tested on."""
        self._look(trainer.test_dataloaders)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks at what is predicted: what a model says of its training records is private too."""
        self._look(trainer.predict_dataloaders)


class PrivateSteps(PublicLoaders):
    """One ``fit`` of a private module. The module puts it in front of the Trainer's callbacks.

    Args:
        privacy: the guarantee, and the size of a batch.
        accept_start: of the module.
        record: what the module's weights were loaded from, if it says.
        record_owner: of the module.
        loaded_run: name of the run that ``record`` is of.

    Attributes:
        session: None before the data are known.
    """

    def __init__(
        self,
        privacy: PrivacyConfig,
        accept_start: str,
        record: dict[str, Any] | None,
        record_owner: Any = None,
        loaded_run: str = "",
    ) -> None:
        super().__init__()
        self.session: Session | None = None
        self._privacy = privacy
        self._accept_start = accept_start
        self._record = record
        self._record_owner = record_owner
        self._loaded_run = loaded_run
        self._loader: EpochLoader | None = None
        self._mark: dict[str, Any] = {}
        self._seen = 0
        self._max_steps = -1  # the Trainer's
        self._max_epochs: int | None = -1
        self._hooks: list[Any] = []
        self._put_back: Callable[[], None] = lambda: None  # the Trainer's strategy
        self._released = ReleasedGradients(
            "put what is private into per_example_loss, and what is done to released gradients "
            "into the optimiser"
        )

    @property
    def run(self) -> PrivateRun:
        """The run, once it has begun."""
        if self.session is None or self.session.run is None:
            raise RuntimeError("no private run has begun; call trainer.fit(model, ...)")
        return self.session.run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Plans, once the data are there."""
        if stage != "fit":
            return
        self._put_back()
        self._put_back = strategies.refuse_shards(trainer.strategy)
        datamodule: Any = getattr(trainer, "datamodule", None)
        refusals.refuse_transfers(pl_module, LightningModule)
        refusals.refuse_secrets(pl_module, self._privacy)
        if datamodule is not None:
            refusals.refuse_transfers(datamodule, LightningDataModule)
            refusals.refuse_secrets(datamodule, self._privacy)
        source = trainer.fit_loop._data_source
        data = training_data(source.dataloader())
        self.records = data.dataset
        self.owners = Owners(self._record_owner, data.dataset)
        owned = self.owners.of_records
        plan = self._privacy.build(len(data.dataset), record_owner=owned)
        refusals.refuse_contradictions(trainer, plan)
        self.session = Session(plan, str(trainer.default_root_dir))
        self._loader = EpochLoader(data, plan.sampler.steps_per_epoch)
        source.instance = self._loader
        precision = refusals.precision_of(trainer.precision_plugin)
        if precision != "32-true" and not plan.data_are_public:
            warn_of_half_precision(f"Trainer(precision={precision!r})", "'32-true'")
            self.session.coarse_told = True
        self._max_steps = trainer.max_steps
        trainer.fit_loop.epoch_loop.max_steps = plan.steps
        # Schedules are made of either: CosineAnnealingLR(optimizer, self.trainer.max_epochs).
        self._max_epochs = trainer.max_epochs
        trainer.fit_loop.max_epochs = math.ceil(plan.steps / plan.sampler.steps_per_epoch)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Which run it is of."""
        self._mark = checkpoint.get(MARK) or {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins the run, or goes on with it, where the checkpoint is loaded by now, and nothing
        waits for the sanity check.
        """
        assert self.session is not None
        plan = self.session.plan
        monitors.refuse_private(trainer, plan)
        waits = monitors.watched(trainer, plan) and monitors.will_be_tried(trainer)
        if not waits and not trainer.strategy.restore_checkpoint_after_setup:
            self._begin(trainer, pl_module)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """By now it is known what validation logs."""
        assert self.session is not None
        monitors.refuse_unlogged(trainer, self.session.plan)

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.session is not None and self._loader is not None
        refusals.refuse_optimizers(trainer.optimizers)
        strategies.refuse_wrapped(trainer, pl_module)
        refusals.refuse_module(pl_module, pl_module.private_base)  # type: ignore[arg-type]
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            # It has sent the first process's weights to all; gradients go through the run.
            trainer.strategy.model.require_backward_grad_sync = False
        mark = None if trainer.ckpt_path is None else self._mark
        self._seen = self.session.open(
            mark, self._record, self._accept_start, pl_module, self._loaded_run
        )
        self._hooks = [
            one.register_step_pre_hook(self._released_alone) for one in trainer.optimizers
        ]
        self._loader.open(self.run, pl_module.device.type == "cpu")

    def noted(self, pl_module: Any) -> None:
        """After a release: what it wrote to ``.grad`` is what may be stepped on."""
        self._released.note(pl_module, self.run.released)
        assert self.session is not None
        self.session.trained(pl_module)
        # Of a fit that is broken off no record tells; what the weights came from is not all by now.
        pl_module._remember(None)

    def _released_alone(self, optimizer: Any, arguments: Any, options: Any) -> Any:
        """Before a step of the optimiser. Lightning gives it the backward pass as a closure, and
        calls the hooks between the two inside.
        """
        closure = arguments[1] if len(arguments) > 1 else options.get("closure")

        def checked() -> Any:
            found = None if closure is None else closure()
            self._released.require(optimizer, self.run.released)
            return found

        if closure is None:
            return checked()
        others = {name: value for name, value in options.items() if name != "closure"}
        return (optimizer, checked, *arguments[2:]), others

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts from where the ledger is."""
        assert self.session is not None
        if self.session.run is None:  # shards, or what callbacks watch, had to be known first
            self._begin(trainer, pl_module)
        if self.run.released:
            per_epoch = self.run.plan.sampler.steps_per_epoch
            move_schedules(trainer, self._seen, self.run.released, per_epoch)
            count_releases(trainer, self.run.released, per_epoch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts shards away before anything is saved: no backward pass follows, which would."""
        put_away(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Epsilon, rounded up, where others log their loss, and what was released beside the
        gradients.
        """
        if not trainer.barebones and self.session is not None:
            name, spent = spent_name(unit_of(self.session.plan.neighbouring)), self.run.epsilon()
            shown = {name: shown_epsilon(spent)} | self.run.shown()
            if self.session.plan.data_are_public:
                shown["data_declared_public"] = 1.0
            # The same on all processes; a mean over them could round it down.
            alike: dict[str, Any] = {"batch_size": 1, "sync_dist": True, "reduce_fx": "max"}
            for told, value in shown.items():
                LightningModule.log(pl_module, told, value, **alike)
            bar = name.replace("epsilon", "eps")  # of another value, so of another name
            alike |= {"logger": False, "prog_bar": True}
            LightningModule.log(pl_module, bar, epsilon_for_bars(spent), **alike)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """A checkpoint says of which run it is, and what its weights were trained on."""
        if self.session is not None and self.session.run is not None:
            checkpoint[MARK] = self.session.mark(trainer.global_step)
            self.session.keep_noise()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Lets go of the directory, and tells the other processes, who may wait for this one."""
        tell(FAILED, in_public(exception))
        self._close(trainer, exception)
        refusals.name_remedy(exception)

    def told(self) -> dict[str, Any] | None:
        """``MARK`` of the weights as they are; None before a release."""
        if self.session is None or self.session.run is None or not self.run.released:
            return None
        return self.session.mark(self.run.released)

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Ends the run; the module's weights are its output from now on."""
        if stage == "fit":
            told = self.told()
            if told is not None:
                pl_module._remember(told)
            self._close(trainer)

    def _close(self, trainer: Trainer, error: BaseException | None = None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._put_back()
        if self._loader is not None:
            self._loader.close()
            trainer.fit_loop.epoch_loop.max_steps = self._max_steps
            trainer.fit_loop.max_epochs = self._max_epochs
            self._loader = None
        if self.session is not None:
            self.session.close(error)
