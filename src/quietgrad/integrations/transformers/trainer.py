"""Hugging Face's Trainer with private steps: its loop, its callbacks, its checkpoints; batches,
gradients and what is written down are the run's.

Every method below stands in the place of one of Trainer's, and says what would be wrong with that.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import Seq2SeqTrainer, Trainer
from transformers.optimization import GreedyLR
from transformers.trainer_utils import TrainOutput

import quietgrad.integrations.transformers.refusals as refusals
from quietgrad.checks import warn_of_half_precision
from quietgrad.clipping.capture.backward import PerExampleLoss
from quietgrad.clipping.soundness.company.quantized import keep_unpacked
from quietgrad.distributed.groups.news import in_public, telling
from quietgrad.distributed.together import here
from quietgrad.integrations.alike import REMEDY, told_of
from quietgrad.integrations.folders import leaves_no_folder
from quietgrad.integrations.owners import Owners
from quietgrad.integrations.plans import plan_for
from quietgrad.integrations.stepping import ReleasedGradients
from quietgrad.integrations.transformers.collating import LookingTrainer
from quietgrad.integrations.transformers.hooks import require_hooks
from quietgrad.integrations.transformers.loading import EpochLoader
from quietgrad.integrations.transformers.losses import record_loss_of, refuse_own_losses
from quietgrad.integrations.transformers.quiet import NO_SEARCH
from quietgrad.integrations.transformers.session import TrainerSession
from quietgrad.integrations.transformers.sharding import ALIKE
from quietgrad.loading.batches import LoadedBatch
from quietgrad.loading.loader import PrivateLoader
from quietgrad.loading.repeated import require_each_once
from quietgrad.loading.unsaid import say_no_lengths
from quietgrad.plan import PrivacyConfig, PrivacyPlan, PrivateRun


class PrivateTrainer(LookingTrainer):
    """``transformers.Trainer`` that trains privately: ``privacy=`` says how.

    What Trainer does with public things is Trainer's: callbacks, schedulers, evaluation,
    checkpoints, reports. A step is one Poisson batch of the plan, read
    ``per_device_train_batch_size`` records at a time; ``max_steps`` is the plan's; gradients are
    clipped per record by ``PrivacyConfig.max_grad_norm``, and ``args.max_grad_norm`` has no effect.
    The ledger and, while the run lasts, the secrets are in ``args.output_dir``, which holds nothing
    else that is private. The training loss is private: it is in no log, and
    ``TrainOutput.training_loss`` is None.

    Args:
        model, args, data_collator, train_dataset, eval_dataset, **options: Trainer's. What
            ``data_collator`` and ``train_dataset`` make of a record may depend on no other record,
            up to padding that the model masks; ``eval_dataset`` is public.
        privacy: the guarantee, and the size of a batch: a configuration, or the plan that one built
            for these records. A plan that was ``extended`` goes on with the run in
            ``args.output_dir``, by ``train(resume_from_checkpoint=True)``.
        per_example_loss: (model, batch) -> [records]; None takes the cross entropy (or the like) of
            the model's head, as a mean over the record's own labels.
        record_owner: a column of ``train_dataset``, or one owner a record: users are protected
            (docs/users.md), and ``per_device_train_batch_size`` still counts records.
        accept_start: "epsilons-add" or "trained-without-privacy", to go on from the saved weights
            of an earlier private run, whose epsilon adds to this one's, or of a run without
            privacy, whose records no epsilon covers.

    Raises:
        ValueError, TypeError: for what cannot be private (``quietgrad.integrations.transformers
            .refusals``), numbers that contradict the plan, and heads without a loss of each record;
            what ``PrivacyConfig.build`` refuses.
    """

    @telling
    @leaves_no_folder
    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        privacy: PrivacyConfig | PrivacyPlan,
        per_example_loss: PerExampleLoss | None = None,
        record_owner: str | Iterable[Any] | None = None,
        accept_start: str = "",
        **options: Any,
    ) -> None:
        require_hooks(Trainer)
        say_no_lengths()
        refusals.refuse_functions(type(self), PrivateTrainer, options)
        refusals.refuse_data(train_dataset, eval_dataset)
        self._owners = Owners(record_owner, train_dataset)
        self._owners.refuse_shared(eval_dataset)
        if record_owner is None:
            require_each_once(train_dataset)  # what TRL makes of it has a memory of its own
        if args is not None:
            refusals.refuse_arguments(args)
        refusals.refuse_optimizer(options)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            **options,
        )
        refusals.refuse_arguments(self.args)
        refusals.refuse_collator(self.data_collator)
        train: Any = self.train_dataset  # prepared: tokenised, say
        self._private_data = (train_dataset, train)
        self.plan: PrivacyPlan = plan_for(privacy, train, self._owners)
        refusals.refuse_contradictions(self.args, self.plan)
        # A copy: the caller's arguments may serve another trainer with another plan.
        self.args = copy.copy(self.args)
        self.args.max_steps = self.plan.steps
        self._session = TrainerSession(self.plan, str(self.args.output_dir), accept_start)
        self._session.starts_from(self.model, self._bare_model())
        self._released = ReleasedGradients(
            "use per_example_loss=; change released gradients in a callback's on_pre_optimizer_step"
        )
        self._given_loss = per_example_loss
        self._loss = self._loss_of_a_record()

    def epsilon(self) -> float:
        """Privacy spent so far in ``args.output_dir``, at the plan's delta; an upper bound.

        Raises:
            RuntimeError: where the directory holds a run that this trainer has not gone on with.
        """
        return self._session.epsilon()

    def _loss_of_a_record(self) -> PerExampleLoss:
        smoothing = self.args.label_smoothing_factor
        if self._given_loss is None:
            refuse_own_losses(self.model)
            return record_loss_of(self._bare_model(), self.label_names, smoothing)
        if smoothing:
            raise ValueError(
                f"args.label_smoothing_factor={smoothing} has no effect on per_example_loss=; set "
                "it 0, and smooth there"
            )
        return self._given_loss

    @property
    def _run(self) -> PrivateRun:
        run = self._session.run
        if run is None:
            raise RuntimeError(
                "no private run has begun; call trainer.train(), which opens the ledger and draws "
                "the batches"
            )
        return run

    # ---- the run ----

    @telling
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **options: Any,
    ) -> TrainOutput:
        """As ``Trainer.train``, for the releases that the ledger leaves. A resume goes on at the
        next release; steps that were lost since the checkpoint are spent, and not made up for.

        Returns:
            The steps made and public metrics; ``training_loss`` is None.

        Raises:
            ValueError: what ``TrainerSession.open`` refuses, and arguments changed since.
        """
        together = here()
        # What one process refuses alone the others would wait for.
        held = together.all_of(lambda: self._ready(trial), "begin training", in_public)
        model: Any = self.model
        together.require_alike(told_of(self, self._not_compiled(model), self._loss), REMEDY)
        together.require_same("the model's weights", held, ALIKE)
        resume = resume_from_checkpoint or False
        with self._session.open(resume, self._require_readable, together) as found:
            try:
                done = super().train(found, None, ignore_keys_for_eval, **options)
            finally:
                self._let_go_of_workers()
        return TrainOutput(done.global_step, None, done.metrics)  # type: ignore[arg-type]

    def _ready(self, trial: Any) -> str:
        """Refuses what cannot be trained, on this process; ``_require_shardable``'s."""
        refusals.refuse_before_training(self)
        if trial is not None:
            raise ValueError(NO_SEARCH)
        self._owners.require_in_place(self.train_dataset, self._private_data[1])
        self._session.starts_from(self.model, self._bare_model())
        held = self._require_shardable()
        model: Any = self.model
        keep_unpacked(model)
        if self.accelerator.mixed_precision != "no" and not self.plan.data_are_public:
            warn_of_half_precision("args.bf16=True", "bf16=False")
            self._session.coarse_told = True
        self._look_first()
        return held

    def _let_go_of_workers(self) -> None:
        """Workers that stay (``dataloader_persistent_workers``) would hold on to the lock of the
        directory that they were forked with; an evaluation afterwards starts new ones.
        """
        handler = self.callback_handler
        if isinstance(handler.train_dataloader, EpochLoader):
            handler.train_dataloader.close()
        handler.eval_dataloader = None
        for held in (
            getattr(self.accelerator, "_dataloaders", []),
            getattr(self, "_eval_dataloaders", {}),
        ):
            held.clear()

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model has a loss of its own."""
        self.model = super().call_model_init(trial)
        if hasattr(self, "_loss"):
            self._loss = self._loss_of_a_record()
        return self.model

    # ---- batches ----

    def get_train_dataloader(self) -> EpochLoader:  # type: ignore[override]
        """Trainer's shuffles: batches of a fixed size, which no epsilon here covers."""
        return EpochLoader(self._run, self._loader_of)

    def _loader_of(self, steps: int) -> PrivateLoader:
        args = self.args
        options = {
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory and args.device.type != "cpu",
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "multiprocessing_context": getattr(args, "dataloader_multiprocessing_context", None),
        }
        dataset, collate = self._read(self.train_dataset, "training")
        return self._run.loader(
            dataset,
            steps=steps,
            physical_batch_size=args.per_device_train_batch_size,
            collate_fn=collate,
            **options,
        )

    def _read(self, dataset: Any, description: str) -> tuple[Any, Any]:
        """A data set and its collator, without the columns that the model does not take."""
        if hasattr(dataset, "remove_columns") and hasattr(dataset, "column_names"):
            return self._remove_unused_columns(dataset, description=description), self.data_collator
        return dataset, self._get_collator_with_removed_columns(self.data_collator, description)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Trainer's divides every record's loss by the number of labels in the batch; on several
        processes it multiplies evaluation's by their number, also where it is a mean already.
        """
        if self.args.world_size > 1 or any(isinstance(b, LoadedBatch) for b in batch_samples):
            return None
        return super()._get_num_items_in_batch(batch_samples, device)

    # ---- a step ----

    def training_step(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
        """One private step up to the optimiser's. Trainer's takes the gradient of a batch's loss.

        Returns:
            Zero: nothing of the loss leaves the step, and ``log`` leaves out what is made of it.
        """
        model.train()
        train_mode = getattr(self.optimizer, "train", None)  # of optimisers without a schedule
        if callable(train_mode):
            train_mode()
        plain = self._not_compiled(model)
        self._run.backward(plain, self._loss, inputs)
        self._released.note(plain, self._run.released)
        self._session.trained(plain)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0 and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return torch.zeros((), device=self.args.device)

    def _not_compiled(self, model: nn.Module) -> Any:
        """Clipping runs what was compiled uncompiled; and noise is drawn by the parameters' names,
        which compiling changes.
        """
        return self.accelerator.unwrap_model(model, keep_torch_compile=False)

    # ---- going on ----

    def _init_training_state(self, *args: Any, **options: Any) -> tuple[int, int]:
        """Trainer's goes on where the checkpoint was and skips batches of the loader; the run goes
        on at the next release, and its loader there by itself.
        """
        super()._init_training_state(*args, **options)
        self.state.global_step = self._run.released
        return self._run.released // self.plan.sampler.steps_per_epoch, 0

    def _prepare_for_training(self, *args: Any, **options: Any) -> tuple[Any, Any]:
        """Then the schedule is moved on over lost steps, and the guard looks at public records."""
        model, loader = super()._prepare_for_training(*args, **options)
        resumed = self._session.resumed
        lost = self._run.released - (0 if resumed is None else resumed.releases)
        schedule: Any = self.lr_scheduler
        if not isinstance(schedule, ReduceLROnPlateau | GreedyLR):
            with warnings.catch_warnings():  # that the optimiser took no step between is so
                warnings.filterwarnings(
                    "ignore", "Detected call of `lr_scheduler.step", UserWarning
                )
                for _ in range(lost):
                    schedule.step()
        self._offset = self._run.released % self.plan.sampler.steps_per_epoch
        if self._run.released < self.plan.steps:
            self._look_again(model, self._run)
        return model, loader

    def _run_epoch(  # type: ignore[override]  # always called by name
        self, *, epoch: int, steps_in_epoch: int, **options: Any
    ) -> Any:
        """The first epoch of a resumed run begins where it was: ``state.epoch`` counts so."""
        made, self._offset = self._offset, 0
        return super()._run_epoch(
            epoch=epoch + made / steps_in_epoch if made else epoch,
            steps_in_epoch=steps_in_epoch,
            **options,
        )


class PrivateSeq2SeqTrainer(PrivateTrainer, Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer``, private; evaluation may generate. See ``PrivateTrainer``."""
