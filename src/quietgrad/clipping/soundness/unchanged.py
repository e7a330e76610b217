"""A model's parameters and buffers stay as they are while private records go through it, and so do
its layers, their modes and what is trained.

What a forward pass writes into a buffer (running statistics, a cache filled from the batch) leaves
the run without noise: ``state_dict`` holds it. It also reaches later records' losses. Each clipping
call compares identity and version counter of every tensor of the model before and after, and the
contents of small buffers; at the guard's steps all contents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quietgrad.clipping.capture.layout.modules import modules_of, named_modules_of, walked_anew
from quietgrad.clipping.soundness.company.quantized import packs_itself
from quietgrad.clipping.soundness.kept.put_again import PutAgain, digest_of
from quietgrad.clipping.soundness.switches.torch_settings import TorchSettings
from quietgrad.sending import read_together
from quietgrad.tensors import is_spread, local_of

# Contents of buffers up to this size together are copied and compared at every call: about a tenth
# of a millisecond.
SMALL_BYTES = 2**20


THE_WHOLE = "the model"  # which has no path


class StateChanged(ValueError):
    """A forward pass wrote into the model."""


class Watch:
    """Tensors of a model as they were.

    Args:
        model: watched.
        thorough: also keep and compare all buffers' contents and the parameters' bits, whatever
            their size.
    """

    def __init__(self, model: nn.Module, thorough: bool) -> None:
        self._model = model
        self._buffers, self._parameters = _tensors_of(named_modules_of(model))
        self._versions = {
            id(t): version_of(t) for t in (*self._buffers.values(), *self._parameters.values())
        }
        left = float("inf") if thorough else SMALL_BYTES
        self._copies: dict[tuple[str, str], Tensor] = {}
        for key, t in sorted(self._buffers.items(), key=lambda item: _bytes(item[1])):
            left -= _bytes(t)
            if left < 0:
                break
            self._copies[key] = t.detach().clone()
        self._bits = _bits_of(self._parameters) if thorough else {}
        self._put_again = PutAgain.of(modules_of(model))
        self._modes = {module: module.training for module in modules_of(model)}
        self._layers = [
            (path, module, dict(module._modules), type(module), vars(module).get("forward"))
            for path, module in named_modules_of(model)
        ]
        self._trained = {key: t.requires_grad for key, t in self._parameters.items()}
        self._settings = TorchSettings()

    def changed(self) -> tuple[list[str], list[str]]:
        """Names of buffers and of parameters that are not what they were."""
        now, known = _tensors_of(walked_anew(self._model))
        same = {key for key in {**self._buffers, **now} if self._is_same(key, now.get(key))}
        same -= self._of_other_contents(same)
        buffers = [key for key in {**self._buffers, **now} if key not in same]
        of_now = _bits_of({key: t for key, t in known.items() if key in self._bits})
        parameters = [
            key
            for key, t in {**self._parameters, **known}.items()
            if known.get(key) is not self._parameters.get(key)
            or (version_of(t) != self._versions[id(t)] and not self._put_again.holds(t))
            or of_now.get(key) != self._bits.get(key)
        ]
        return [_dotted(key) for key in buffers], [_dotted(key) for key in parameters]

    def switched(self) -> str | None:
        """A layer that is in another mode than it was, a parameter that is trained now and was not,
        or the other way round, or a setting of torch's; all are as they were afterwards.
        """
        found = self._settings.switched()
        for path, module in walked_anew(self._model):
            if module.training != self._modes.get(module, module.training):
                found = found or (f"layer {path!r}" if path else "the model")
                module.training = not module.training
        for key, parameter in self._parameters.items():
            if parameter.requires_grad != self._trained[key]:
                found = found or f"parameter {_dotted(key)!r}"
                parameter.requires_grad_(self._trained[key])
        return found

    def exchanged(self) -> str | None:
        """A layer in whose place another one stands now, or none, or that has another class or a
        ``forward`` of its own; all are as they were afterwards. What came beside them is not looked
        at: modules are also made when they are first needed.
        """
        found = None
        for path, module, layers, kind, forward in self._layers:
            for local, layer in layers.items():
                if module._modules.get(local) is not layer:
                    found = found or _dotted((path, local))
                    module._modules[local] = layer
            if type(module) is not kind:
                found = found or path or THE_WHOLE
                module.__class__ = kind
            if vars(module).get("forward") is not forward:
                found = found or path or THE_WHOLE
                vars(module).pop("forward", None)
                if forward is not None:
                    vars(module)["forward"] = forward
        return found

    def _is_same(self, key: tuple[str, str], now: Tensor | None) -> bool:
        before = self._buffers.get(key)
        return before is not None and now is before and version_of(now) == self._versions[id(now)]

    def _of_other_contents(self, keys: set[tuple[str, str]]) -> set[tuple[str, str]]:
        """Which of these buffers hold something else than their copies, as far as there are any."""
        alike = {
            key: are_alike(copy, self._buffers[key])
            for key, copy in self._copies.items()
            if key in keys
        }
        found = zip(alike, read_together(alike.values()), strict=True)
        return {key for key, same in found if not same}

    def put_back(self) -> bool:
        """Buffers as they were, as far as there are copies; returns whether every buffer is."""
        complete = True
        modules = dict(self._model.named_modules(remove_duplicate=False))
        for path, local in _tensors_of(walked_anew(self._model))[0]:
            if (path, local) not in self._buffers:
                modules[path]._buffers.pop(local)
        for (path, local), tensor in self._buffers.items():
            modules[path]._buffers[local] = tensor
            copy = self._copies.get((path, local))
            if copy is not None and (
                version_of(tensor) != self._versions[id(tensor)] or not equal_contents(copy, tensor)
            ):
                if (tensor.shape, tensor.dtype) != (copy.shape, copy.dtype):
                    tensor.data = copy  # through .data it was made another one
                with torch.no_grad():
                    tensor.data.copy_(copy)
            complete = complete and (
                copy is not None or version_of(tensor) == self._versions[id(tensor)]
            )
        return complete


@contextlib.contextmanager
def unchanged(model: nn.Module, thorough: bool = False) -> Iterator[None]:
    """Refuses a block in which the model's parameters or buffers change; buffers are put back, also
    after an exception.

    Raises:
        StateChanged: naming the tensor and the remedy.
    """
    watch = Watch(model, thorough)
    try:
        yield
    except BaseException:
        watch.exchanged()
        watch.put_back()
        watch.switched()
        raise
    exchanged = watch.exchanged()
    if exchanged is not None:
        watch.put_back()
        raise StateChanged(
            f"layer {exchanged!r} is exchanged for another one, taken away, or given another class "
            "or forward, while the loss is computed, and would stay so for other records, whose "
            "gradients would follow from those that came before; it was put back, but what the "
            "model notes beside it was not: load the model again, and choose its layers before the "
            "run (as BigBird's attention_type='original_full')"
        )
    switched = watch.switched()
    if switched is not None:
        watch.put_back()
        raise StateChanged(
            f"{switched} is switched while the loss is computed (training or evaluation mode, "
            "trained or frozen, a setting of torch's), and would stay so for other records; it was "
            "put back. Switch it before the run (train(), eval(), requires_grad_()), or back again "
            "in the loss"
        )
    buffers, parameters = watch.changed()
    if not buffers and not parameters:
        return
    back = watch.put_back()
    if parameters:
        path = parameters[0].rpartition(".")[0]
        owner = dict(walked_anew(model)).get(path)  # None where the loss took the layer away
        if owner is not None and packs_itself(owner):
            raise StateChanged(
                f"layer {path!r} ({type(owner).__name__}) packed its "
                "weights for inference, as it does in evaluation mode on a processor; load the "
                "model again and call its train() before the run"
            )
        raise StateChanged(
            f"parameter {parameters[0]!r} is rewritten while the loss is computed, outside the "
            "privacy mechanism; it may hold private records "
            "now, so do not use or publish these weights: load the last released ones, and let the "
            "optimizer alone write parameters"
        )
    raise StateChanged(
        f"buffer {buffers[0]!r} changes while the loss is computed: it would carry private records "
        "out of the run without noise (state_dict() holds it) and into other records' losses; "
        + (
            "it was put back"
            if back
            else "load the weights from before: it may hold private records"
        )
        + ". Keep no statistics of batches in the model: remove the buffer or stop its updates "
        "(eval() of its layer); let a table that grows with the longest input grow on a public one "
        "before the run"
    )


Named = dict[tuple[str, str], Tensor]


def _tensors_of(modules: list[tuple[str, nn.Module]]) -> tuple[Named, Named]:
    """(module path, local name) -> buffer, and parameter."""
    buffers: Named = {}
    parameters: Named = {}
    for path, module in modules:
        for found, own in ((buffers, module._buffers), (parameters, module._parameters)):
            if own:
                for local, tensor in own.items():
                    if tensor is not None:
                        found[path, local] = tensor
    return buffers, parameters


def _dotted(key: tuple[str, str]) -> str:
    return ".".join(part for part in key if part)


def version_of(tensor: Tensor) -> int:
    """How often torch counted a write into it."""
    # Tensors made in inference mode count no versions; their contents are compared like all others.
    if tensor.is_inference():
        return -1
    # What is written into a shard does not count for the tensor that is spread.
    return tensor._version + (local_of(tensor)._version if is_spread(tensor) else 0)


def equal_contents(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same, not-a-numbers included."""
    return bool(are_alike(one, other))


def are_alike(one: Tensor, other: Tensor) -> Tensor:
    """The same as a truth value that need not be there yet."""
    one, other = local_of(one), local_of(other)
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return torch.tensor(False, device="cpu")
    same = one == other.detach()
    if one.is_floating_point() or one.is_complex():
        same = same | ((one != one) & (other != other))
    return same.all()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bits_of(tensors: Named) -> dict[tuple[str, str], tuple[int, int]]:
    numbers = iter(read_together(number for t in tensors.values() for number in _bits(t)))
    return dict(zip(tensors, zip(numbers, numbers, strict=True), strict=True))


def _bits(tensor: Tensor) -> Tensor:
    """[2] another one when any single entry changes, or two change places. Of a tensor that is
    spread over ranks, of what is here.
    """
    tensor = local_of(tensor.detach())
    if type(tensor) not in (Tensor, nn.Parameter):
        # Another library's layout (quantized): identity and version only.
        return torch.zeros(2, dtype=torch.int64, device="cpu")
    return digest_of(tensor)
