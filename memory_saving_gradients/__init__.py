"""Gradient checkpointing for TensorFlow by rewriting the graph.

`gradients` is a drop-in for `tf.gradients` that needs less memory: TensorFlow builds
the backward pass, then the library rewires it to recompute what it reads from the
forward pass instead of holding it.
"""

from memory_saving_gradients import tf_required as _tf_required  # noqa: F401
from memory_saving_gradients.budget import Budget
from memory_saving_gradients.comparison import Compared, Comparison, compare
from memory_saving_gradients.differentiate import (
    gradients,
    gradients_collection,
    gradients_memory,
    gradients_speed,
)
from memory_saving_gradients.dry_run import plan
from memory_saving_gradients.errors import (
    BudgetError,
    CheckpointError,
    CostError,
    EagerExecutionError,
    IllegalGraphError,
    MemorySavingGradientsError,
    PlanMismatchError,
    UnknownCheckpointNameError,
    UnsupportedTensorFlowError,
    VerificationUnavailableError,
)
from memory_saving_gradients.keras import memory_saving
from memory_saving_gradients.largest_batch import (
    FittingBatch,
    FittingBatches,
    max_batch_size,
)
from memory_saving_gradients.loops import scan, while_loop
from memory_saving_gradients.pareto_front import Pareto, ParetoPoint, pareto
from memory_saving_gradients.patching import disable, enable, enabled
from memory_saving_gradients.plan import Plan, last_plan
from memory_saving_gradients.saved import SavedPlan
from memory_saving_gradients.status import Status, status
from memory_saving_gradients.tape import GradientTape

__version__ = "1.0.0"

__all__ = [
    "Budget",
    "BudgetError",
    "CheckpointError",
    "Compared",
    "Comparison",
    "CostError",
    "EagerExecutionError",
    "FittingBatch",
    "FittingBatches",
    "GradientTape",
    "IllegalGraphError",
    "MemorySavingGradientsError",
    "Pareto",
    "ParetoPoint",
    "Plan",
    "PlanMismatchError",
    "SavedPlan",
    "Status",
    "UnknownCheckpointNameError",
    "UnsupportedTensorFlowError",
    "VerificationUnavailableError",
    "__version__",
    "compare",
    "disable",
    "enable",
    "enabled",
    "gradients",
    "gradients_collection",
    "gradients_memory",
    "gradients_speed",
    "last_plan",
    "max_batch_size",
    "memory_saving",
    "pareto",
    "plan",
    "scan",
    "status",
    "while_loop",
]
