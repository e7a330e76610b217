"""The private optimiser under Opacus' names for its place: one class for all ways of clipping."""

from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.optimizers.optimizer import DPOptimizer

DPOptimizerFastGradientClipping = DPOptimizer
DPPerLayerOptimizer = DPOptimizer

_ONE_PROCESS = (
    "an Opacus script runs on one process here; several processes are one run in the loops of "
    "docs/loops.md (docs/many_processes.md)"
)
__getattr__ = absent(
    __name__,
    {
        "AdaClipDPOptimizer": "its threshold follows the share of clipped records, whose noise is "
        "not in this accountant; see quietgrad.beside.AdaptiveClipping in a loop of docs/loops.md",
        "get_optimizer_class": "DPOptimizer is the optimiser of every way of clipping; let "
        "PrivacyEngine.make_private build it",
        "DistributedDPOptimizer": _ONE_PROCESS,
        "DistributedDPOptimizerFastGradientClipping": _ONE_PROCESS,
        "SimpleDistributedPerLayerOptimizer": _ONE_PROCESS,
        "FSDPOptimizerFastGradientClipping": _ONE_PROCESS,
    },
)
__all__ = ["DPOptimizer", "DPOptimizerFastGradientClipping", "DPPerLayerOptimizer"]
