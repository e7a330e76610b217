"""The part of a private Trainer that keeps silent: nothing private is logged or published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer
from transformers.trainer_utils import PredictionOutput

from quietgrad.integrations.owners import Owners
from quietgrad.integrations.public import refuse_private_evaluation
from quietgrad.integrations.stepping import ReleasedGradients
from quietgrad.integrations.transformers.loading import EpochLoader
from quietgrad.integrations.transformers.session import TrainerSession
from quietgrad.keyring import secret_files
from quietgrad.plan import PrivacyPlan
from quietgrad.training.files.card import CARD

# Computed from training records and not noised, or a norm that says nothing once they are clipped
# one by one: in no log, no TrainOutput, no trainer_state.json.
NOT_LOGGED = ("loss", "grad_norm", "train_loss", "total_flos")
NO_SEARCH = (
    "a search makes many runs on the same records, whose epsilons add, and its choice depends on "
    "them; search on public data, or see quietgrad compare"
)


class QuietTrainer(Trainer):
    """``transformers.Trainer`` without what would tell of training records. ``PrivateTrainer``
    trains.

    Attributes:
        plan: what runs.
        _session: the run in ``args.output_dir``.
        _private_data: the training data, as given and as prepared.
        _owners: whose they are.
        _released: what the optimiser may step on.
    """

    _found_public: Any = None
    plan: PrivacyPlan
    _session: TrainerSession
    _private_data: tuple[Any, ...]
    _owners: Owners
    _released: ReleasedGradients

    def num_examples(self, dataloader: Any) -> int:
        """Of the training data: N; how many records users have together is private."""
        if isinstance(dataloader, EpochLoader):
            return self.plan.dataset_size
        return int(super().num_examples(dataloader))

    def get_total_train_batch_size(self, args: Any) -> int:
        """The expected size, rounded, for messages and rates; the size itself is private."""
        return round(self.plan.expected_batch_size)

    def hyperparameter_search(self, *args: Any, **options: Any) -> Any:
        """Refused: every trial is a run on the same records.

        Raises:
            ValueError: always.
        """
        raise ValueError(NO_SEARCH)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **options: Any) -> dict[str, float]:
        """As Trainer's, on public records: scores are printed and saved.

        Raises:
            ValueError: for the training records.
        """
        self._refuse_private(self.eval_dataset if eval_dataset is None else eval_dataset)
        return super().evaluate(eval_dataset, *args, **options)

    def predict(self, test_dataset: Any, *args: Any, **options: Any) -> PredictionOutput:
        """As Trainer's, on public records: its scores are made to be printed.

        Raises:
            ValueError: for the training records.
        """
        self._refuse_private(test_dataset)
        return super().predict(test_dataset, *args, **options)

    def _refuse_private(self, dataset: Any) -> None:
        if isinstance(dataset, str) and isinstance(self.eval_dataset, dict):
            dataset = self.eval_dataset.get(dataset)
        if dataset is self._found_public is not None:
            return  # at every evaluation the same
        refuse_private_evaluation(dataset, (*self._private_data, self.train_dataset))
        self._owners.refuse_shared(dataset)
        self._found_public = dataset

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Trainer's clips the sum, after its noise; records are clipped one by one already."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Nothing: it would be the norm of the noise, for the most part. The last that is called
        before the optimiser steps.
        """
        self._released.require(self.optimizer, self.state.global_step + 1)

    def floating_point_ops(self, inputs: Any) -> int:
        """Trainer's is a number of tokens, which is private."""
        return 0

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Without what is private; with epsilon where training speaks."""
        training = "learning_rate" in logs or "train_runtime" in logs
        for name in NOT_LOGGED:
            logs.pop(name, None)  # in place: TrainOutput holds the same dictionary
        if training:
            logs.update(self._session.shown())
        super().log(logs, *args, **options)

    def _save_rng_state(self, output_dir: str) -> None:
        """Trainer's saves generators' states, from which dropout's masks follow, and how much was
        drawn. In their place: of which run the checkpoint is.
        """
        self._session.mark(Path(output_dir), self.state.global_step)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """There is none: generators are seeded anew each step."""

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        """With the rows that correlated noise goes on from."""
        super()._save_checkpoint(*args, **options)
        self._session.keep_noise()

    def _save(self, output_dir: str | None = None, *args: Any, **options: Any) -> None:
        """Saved weights say what they were trained on."""
        super()._save(output_dir, *args, **options)
        self._session.stamp(Path(output_dir or self._session.files.path), self.model)

    def create_model_card(self, *args: Any, **options: Any) -> None:
        """As Trainer's and TRL's, with the guarantee: Trainer's says nothing of it."""
        super().create_model_card(*args, **options)
        self._session.describe(self._session.files.path / CARD)

    def push_to_hub(self, *args: Any, **options: Any) -> Any:
        """As Trainer's, once nothing in the directory is secret.

        Raises:
            RuntimeError: while the run lasts.
        """
        files = secret_files(self._session.files.secrets)
        secret = next((path for path in files if path.exists()), None)
        if secret is not None:
            raise RuntimeError(
                f"{str(secret)!r} holds what the noise follows from, and would "
                "be published; end the run first, or save the model elsewhere "
                "(trainer.save_model(folder)) and publish that"
            )
        return super().push_to_hub(*args, **options)
