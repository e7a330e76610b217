"""What a model is made of, for the capture: its modules, and those whose uses are captured."""

from quietgrad.clipping.capture.layout.sites import (
    Layout,
    Layouts,
    SharedInputs,
    Site,
    in_graph,
    layout_of,
)

__all__ = ["Layout", "Layouts", "SharedInputs", "Site", "in_graph", "layout_of"]
