"""4-bit gradient communication with error feedback (LoCo) for PyTorch FSDP."""

from loco_fsdp import reference
from loco_fsdp.config import LoCoConfig
from loco_fsdp.feedback import ResidualState
from loco_fsdp.fsdp2 import attach
from loco_fsdp.handle import LoCoHandle
from loco_fsdp.metrics import CommStats
from loco_fsdp.optimizer import LoCoOptimizer
from loco_fsdp.reduce_scatter import compressed_reduce_scatter

__all__ = [
    "CommStats",
    "LoCoConfig",
    "LoCoHandle",
    "LoCoOptimizer",
    "ResidualState",
    "attach",
    "compressed_reduce_scatter",
    "reference",
]
