"""Per-layer rules: from a module's input and the gradient at its output to per-example gradients in
factored form.

A rule is a function (module, input, output_gradient, parameter names wanted) -> {own parameter
name: contribution}. Inputs and output gradients have examples first. Without one: ``fallback``.
"""
