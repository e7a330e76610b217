"""Models whose per-example gradients cannot be captured from several examples at once, and how they
are refused.
"""

from __future__ import annotations

from quietgrad.clipping.capture.layout import Site


class NotCaptured(ValueError):
    """Book-keeping cannot tell examples apart in this model; one example at a
    time is exact for it.
    """


def no_example_dimension(site: Site, what: str) -> NotCaptured:
    """``what``: "returns a tensor", or "is called with" something."""
    return NotCaptured(
        f"layer {site.name!r} ({type(site.module).__name__}) {what} whose first dimension is not "
        "the example, so per-example gradients "
        "cannot be told apart; freeze its parameters (requires_grad_(False)), give its input an "
        "example dimension, or take one example at "
        "a time (engine='one-example', exact for every layer)"
    )


def does_not_run_again(layer: str) -> NotCaptured:
    """Of a layer without a rule, whose forward pass is repeated for each example."""
    return NotCaptured(
        f"layer {layer!r} has no rule, is run again for each example, and "
        "reads something that was set for the whole batch (an attribute, a global, what it kept of "
        "its last call), so its per-example gradients are not known; pass it what it reads as an "
        "argument, examples first, freeze its parameters (requires_grad_(False)), or take one "
        "example at a time (engine='one-example', exact for every layer)"
    )


def draws_again(layer: str) -> NotCaptured:
    """Of a layer without a rule that would draw other numbers than it drew."""
    return NotCaptured(
        f"layer {layer!r} has no rule, is run again for each example, and draws random numbers, "
        "which would be others; switch them off (dropout, masks), freeze its own parameters, move "
        "these into a small module of their own, or take one example at a time "
        "(engine='one-example', exact for every layer)"
    )


def several_inputs(site: Site) -> NotCaptured:
    """Of a layer whose rule knows one input."""
    return NotCaptured(
        f"layer {site.name!r} ({type(site.module).__name__}) is called with several tensors, and "
        "its per-example gradients are known for "
        "one; pass one (bags of words as rows of equal length, filled up with padding_idx), freeze "
        "its parameters "
        "(requires_grad_(False)), or take one example at a time (engine='one-example', exact for "
        "every layer)"
    )


def nested(site: Site) -> NotCaptured:
    """Of a layer that meets tensors of unlike lengths in one, which have no dimensions."""
    return NotCaptured(
        f"layer {site.name!r} ({type(site.module).__name__}) is called with a nested tensor, or "
        "returns one (torch.nested), whose per-example gradients are not known; give it padded "
        "tensors and a mask, freeze its parameters (requires_grad_(False)), or take one example at "
        "a time (engine='one-example', exact for every layer)"
    )


def transformed(site: Site) -> NotCaptured:
    """Of a layer that is called inside a transform of torch.func, or under forward-mode
    derivatives.
    """
    return NotCaptured(
        f"layer {site.name!r} ({type(site.module).__name__}) is called inside a transform (vmap, "
        "grad or jvp of torch.func, torch.autograd.forward_ad), where examples cannot be told "
        "apart; call it outside, or take one example at a time (engine='one-example', exact for "
        "every layer)"
    )


def sorted_beforehand(site: Site) -> NotCaptured:
    """Of a recurrent layer whose examples stand in an order that nobody tells."""
    return NotCaptured(
        f"layer {site.name!r} ({type(site.module).__name__}) is called with a packed sequence that "
        "was sorted beforehand, so which row is which example is not known; pack it with "
        "enforce_sorted=False, freeze its parameters (requires_grad_(False)), or take one example "
        "at a time (engine='one-example', exact for every layer)"
    )


def gradients_of_its_own(site: Site) -> NotCaptured:
    """Of a loss that runs backward passes while it is computed."""
    return NotCaptured(
        f"layer {site.name!r} ({type(site.module).__name__}) is run backwards while the losses are "
        "computed (a gradient penalty), so gradients of a loss and of the loss's own gradients "
        "cannot be told apart; take that term out of the loss, or take one example at a time "
        "(engine='one-example', exact for every layer)"
    )


def measured_otherwise(parameter: str) -> NotCaptured:
    """Of a parameter that a module uses in another way than before, beside sketches."""
    return NotCaptured(
        f"parameter {parameter!r} is used by its module in another way than before (under autocast "
        "and without, bags in rows and by offsets), so its sketched norm would be another number: "
        "which way it is must not follow from a batch; use a module of its own for each way, "
        "freeze the parameter, or use an exact estimator"
    )


def never_called(parameter: str) -> NotCaptured:
    """Of a parameter that acts without a call of its module."""
    return NotCaptured(
        f"parameter {parameter!r} influences the loss, but the module that owns it is never "
        "called, so its per-example gradients "
        "cannot be captured; freeze it, call the module instead of using its parameter directly, "
        "or take one example at a time "
        "(engine='one-example', exact for every layer)"
    )


def escaped(parameter: str) -> NotCaptured:
    """Of a parameter that acts beside the calls of its module."""
    return NotCaptured(
        f"parameter {parameter!r}: the captured per-example gradient is not the one that autograd "
        "computes, so the update would not be its gradient; it is used outside its module's call "
        "(x @ table.weight.T, a weight penalty in the loss), or its module's forward pass is "
        "random; call the module instead, take the penalty out of the loss (weight_decay), freeze "
        "it, or take one example at a time (engine='one-example', exact for every layer)"
    )


def not_expandable(layer: str) -> NotCaptured:
    """Of a layer whose one value for all examples cannot be given to each."""
    return NotCaptured(
        f"layer {layer!r} is called with one value for all examples, and giving every example its "
        "own stops the forward pass; give its "
        "input an example dimension, freeze its parameters (requires_grad_(False)), or take one "
        "example at a time "
        "(engine='one-example', exact for every layer)"
    )


def reentrant_and_spread() -> ValueError:
    """Of checkpointing that hides calls until the backward pass."""
    return ValueError(
        "the model uses reentrant gradient checkpointing, and its parameters are spread over ranks "
        "(fully_shard, tensor parallel); use torch.utils.checkpoint with use_reentrant=False "
        "(model.gradient_checkpointing_enable({'use_reentrant': False}))"
    )
