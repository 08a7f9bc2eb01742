"""What is known of op types: the tables by which a graph is read.

Decisions are made by type and by TensorFlow's registry, never by name.
"""

from __future__ import annotations

__all__ = [
    "ALIAS_TYPES",
    "ATTRIBUTES",
    "BACK_EDGE_TYPES",
    "CALL_TYPES",
    "IDLE_ALIAS_TYPES",
    "INEXPENSIVE_TYPES",
    "IN_PLACE_TYPES",
    "LOOP_TYPES",
    "MASK_TYPES",
    "PLACEHOLDER_TYPES",
    "REASSOCIATED_TYPES",
    "REDUCTION_TYPES",
    "RESTING_TYPES",
    "SCALAR_BYTES",
    "SEED_PLACES",
    "SHAPE_TYPES",
    "ZEROS_TYPES",
]

ALIAS_TYPES = frozenset(
    """Bitcast EnsureShape ExpandDims Identity IdentityN PreventGradient Reshape
    Snapshot Squeeze StopGradient""".split()
)

# Ops whose result is there anyway: held by a variable, the caller or the graph itself.
RESTING_TYPES = frozenset(
    """Arg Const DeviceIndex ImmutableConst Placeholder PlaceholderV2 ReadVariableOp
    VarHandleOp Variable VariableV2 _Arg""".split()
)

PLACEHOLDER_TYPES = frozenset(
    "Arg Placeholder PlaceholderV2 PlaceholderWithDefault _Arg".split()
)

# They need the shape of what they read, not its value. In the backward pass they read
# the original, run early and hold nothing.
SHAPE_TYPES = frozenset(("Rank", "Shape", "ShapeN", "Size"))
ZEROS_TYPES = frozenset(("OnesLike", "ZerosLike"))

# Ops that sum, average and the like over axes (the second input), which they drop or,
# by their attribute `keep_dims`, keep as 1.
REDUCTION_TYPES = frozenset("All Any EuclideanNorm Max Mean Min Prod Sum".split())

# Ops that hand their first input's buffer on where they find nothing to do: no axis to
# sum over, nothing to repeat. Autodiff makes many where shapes are not known.
IDLE_ALIAS_TYPES = frozenset("BroadcastTo Max Mean Min Prod Sum Tile".split())

CALL_TYPES = frozenset(
    """Case If PartitionedCall RemoteCall StatefulPartitionedCall StatelessCase
    StatelessIf StatelessWhile SymbolicGradient While XlaLaunch XlaLaunchV2""".split()
)

LOOP_TYPES = frozenset(("StatelessWhile", "While"))

# Kernels that say `IsExpensive() == false`: the executor runs them at once.
INEXPENSIVE_TYPES = (
    ALIAS_TYPES
    | RESTING_TYPES
    | SHAPE_TYPES
    | frozenset(
        """BroadcastArgs BroadcastGradientArgs ConcatOffset Enter Exit LoopCond Merge
        NextIteration NoOp Switch""".split()
    )
)

# Where stateless draws take their seed: the only operand of theirs that is a value.
SEED_PLACES = {
    **dict.fromkeys(
        """StatelessMultinomial StatelessParameterizedTruncatedNormal
        StatelessRandomBinomial StatelessRandomGammaV2 StatelessRandomNormal
        StatelessRandomPoisson StatelessRandomUniform StatelessRandomUniformFullInt
        StatelessRandomUniformInt StatelessTruncatedNormal""".split(),
        1,
    ),
    **dict.fromkeys(
        """StatelessRandomNormalV2 StatelessRandomUniformFullIntV2
        StatelessRandomUniformIntV2 StatelessRandomUniformV2
        StatelessTruncatedNormalV2""".split(),
        1,
    ),
    "StatelessRandomGetKeyCounter": 0,
}

# What makes a dropout mask of a random draw and numbers.
MASK_TYPES = frozenset(
    (
        "Add",
        "AddV2",
        "Cast",
        "Greater",
        "GreaterEqual",
        "Less",
        "LessEqual",
        "Mul",
        "Sub",
    )
)
SCALAR_BYTES = 16

# Kernels that write into an input of equal size when it dies (TensorFlow's
# `forward_input_or_allocate_output`).
IN_PLACE_TYPES = frozenset(
    """Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh BiasAdd Ceil
    ClipByValue Complex Conj Cos Cosh Digamma Div DivNoNan Elu EluGrad Erf Erfc Exp
    Expm1 Floor FloorDiv FloorMod FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3
    FusedBatchNormGradV3 Inv InvGrad LeakyRelu LeakyReluGrad Lgamma Log Log1p
    LogSoftmax Maximum Minimum Mod Mul MulNoNan Neg Pow RealDiv Reciprocal
    ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Rint Round Rsqrt RsqrtGrad SelectV2
    Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softmax Softplus SoftplusGrad
    Softsign SoftsignGrad Sqrt SqrtGrad Square SquaredDifference Sub Tan Tanh
    TanhGrad TruncateDiv Xdivy Xlog1py Xlogy""".split()
)

# Pairs of these with a constant each are merged by Grappler's constant folding.
REASSOCIATED_TYPES = frozenset(("Add", "AddV2", "Div", "Mul", "RealDiv", "Sub"))

ATTRIBUTES = {
    "MatMul": ("transpose_a",),
    "SparseMatMul": ("transpose_a",),
    "BatchMatMul": ("adj_x",),
    "BatchMatMulV2": ("adj_x",),
    "BatchMatMulV3": ("adj_x",),
    "Einsum": ("equation",),
}

# The edges that close a TensorFlow 1 loop.
BACK_EDGE_TYPES = frozenset(("NextIteration", "RefNextIteration"))
