"""The part of a private Trainer that keeps silent: nothing private is logged or published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer

import quietgrad.integrations.transformers.refusals as refusals
from quietgrad.integrations.transformers.session import TrainerSession

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
        _session: the run in ``args.output_dir``.
        _private_data: the training data, as given and as prepared.
    """

    _session: TrainerSession
    _private_data: tuple[Any, ...]

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
        refusals.refuse_private_evaluation(eval_dataset, self._private_data)
        return super().evaluate(eval_dataset, *args, **options)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Trainer's clips the sum, after its noise; records are clipped one by one already."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Nothing: it would be the norm of the noise, for the most part."""

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
        self._session.stamp(Path(output_dir or self._session.files.path))

    def push_to_hub(self, *args: Any, **options: Any) -> Any:
        """As Trainer's, once nothing in the directory is secret.

        Raises:
            RuntimeError: while the run lasts.
        """
        secrets = self._session.files.secrets
        if secrets.exists():
            raise RuntimeError(
                f"{str(secrets)!r} holds what the noise follows from, and would "
                "be published; end the run first, or save the model elsewhere "
                "(trainer.save_model(folder)) and publish that"
            )
        return super().push_to_hub(*args, **options)
