"""The private optimiser under Opacus' names for its place: one class for all ways of clipping."""

from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.absent_modules import ADAPTIVE, CHOSEN, ONE_PROCESS
from quietgrad.integrations.opacus.optimizers.optimizer import DPOptimizer

DPOptimizerFastGradientClipping = DPOptimizer
DPPerLayerOptimizer = DPOptimizer

__getattr__ = absent(
    __name__,
    {
        "AdaClipDPOptimizer": ADAPTIVE,
        "get_optimizer_class": CHOSEN,
        "DistributedDPOptimizer": ONE_PROCESS,
        "DistributedDPOptimizerFastGradientClipping": ONE_PROCESS,
        "DistributedDPOptimizerFastGradientlipping": ONE_PROCESS,  # as Opacus' __all__ has it
        "SimpleDistributedPerLayerOptimizer": ONE_PROCESS,
        "FSDPOptimizerFastGradientClipping": ONE_PROCESS,
    },
)
__all__ = ["DPOptimizer", "DPOptimizerFastGradientClipping", "DPPerLayerOptimizer"]
