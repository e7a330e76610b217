"""``wrap_model=False``: the script goes on calling its own model, whose calls are followed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from quietgrad.integrations.opacus.grad_sample.grad_sample_module import GradSampleModule


class AttachedModule(GradSampleModule):
    """Stands in for ``forward`` of a model that keeps its class and its names of parameters.
    ``cleanup()`` gives the model its own back. Training or evaluation is the model's to say.
    """

    def __init__(self, m: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(m, *args, **options)
        if isinstance(vars(m).get("forward"), _Followed):
            raise ValueError(
                "module is trained by another PrivacyEngine, or was made private before; call "
                "cleanup() of what make_private returned then"
            )
        if m._forward_hooks or m._forward_pre_hooks:
            raise ValueError(
                "wrap_model=False: module has forward hooks of its own, which would run twice; "
                "take them off, or leave wrap_model=True"
            )
        self._own = vars(m).get("forward")  # of a model that has one of its instance's
        self._is_attached = True
        self._attach()

    def _attach(self) -> None:
        vars(self._module)["forward"] = _Followed(self, self._module.forward)

    @property
    def training(self) -> bool:
        """The model's."""
        model = self.__dict__.get("_modules", {}).get("_module")
        return True if model is None else model.training

    @training.setter
    def training(self, mode: bool) -> None:
        model = self.__dict__.get("_modules", {}).get("_module")
        if model is not None:
            model.training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As ``GradSampleModule.forward``."""
        with self.bare():
            return super().forward(*args, **kwargs)

    @contextlib.contextmanager
    def bare(self) -> Iterator[None]:
        """The model as it was before: what runs it here is not the script."""
        stands = isinstance(vars(self._module).get("forward"), _Followed)
        if stands:
            self._detach()
        try:
            yield
        finally:
            if stands and self._is_attached:
                self._attach()

    def _detach(self) -> None:
        del vars(self._module)["forward"]
        if self._own is not None:
            vars(self._module)["forward"] = self._own

    def cleanup(self) -> None:
        """Ends private training, and gives the model its own ``forward`` back."""
        super().cleanup()
        self._is_attached = False
        if isinstance(vars(self._module).get("forward"), _Followed):
            self._detach()


class _Followed:
    """``forward`` of a model that is trained privately, with the signature of its own."""

    def __init__(self, stands_in: AttachedModule, own: Any) -> None:
        functools.update_wrapper(self, own)
        self._stands_in = stands_in

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stands_in.forward(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(
            "the model is trained privately with wrap_model=False, and a copy would be followed "
            "too; copy its state_dict(), or call cleanup() first"
        )
