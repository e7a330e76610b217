"""What stands where Opacus keeps ``p.grad_sample``: whatever is done with it says the remedy."""

from __future__ import annotations

from typing import Any

from torch import nn

BY_RECORD = (
    "gradients of single records are private and made at optimizer.step() alone; to look at them "
    "without training, torch.func.vmap(torch.func.grad(...)) on the bare model"
)


def _refused(*_: Any, **__: Any) -> Any:
    raise AttributeError(f"parameters have no 'grad_sample': {BY_RECORD}")


class NoGradSample:
    """An object without state. It may be assigned over, deleted and compared with None, as scripts
    do between steps; a pickled parameter has an empty set in its place.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":  # Python's own questions, such as copy's and pickle's
            raise AttributeError(name)
        _refused()

    def __reduce__(self) -> Any:
        return set, ()  # which torch.load(weights_only=True) takes

    def __repr__(self) -> str:
        return "None"

    __torch_function__: Any = classmethod(_refused)
    __getitem__: Any = _refused
    __iter__: Any = _refused
    __len__: Any = _refused
    __array__: Any = _refused
    __float__: Any = _refused
    __add__: Any = _refused
    __radd__: Any = _refused
    __sub__: Any = _refused
    __rsub__: Any = _refused
    __mul__: Any = _refused
    __rmul__: Any = _refused
    __truediv__: Any = _refused
    __pow__: Any = _refused


_NONE = NoGradSample()


def put_on(model: nn.Module) -> None:
    """Puts it on the parameters of a model that is made private, frozen ones too."""
    for p in model.parameters():
        vars(p)["grad_sample"] = _NONE


def take_off(model: nn.Module) -> None:
    """Leaves parameters as they were; what a script assigned in its place is the script's."""
    for p in model.parameters():
        if vars(p).get("grad_sample") is _NONE:
            del vars(p)["grad_sample"]
