"""`gradients` is a drop-in for `tf.gradients`: arguments, variables, structures."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_helpers import (
    EXACT_ROUTES,
    Work,
    assert_close,
    assert_same_bits,
    check,
    fixed,
    run,
)

import memory_saving_gradients as msg

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")


def block(y: tf.Tensor, w: Any) -> tf.Tensor:
    return tf.tanh(tf.nn.relu(y @ w) - 0.3 * y)


def chain(y: tf.Tensor, w: Any, length: int = 6) -> tf.Tensor:
    for _ in range(length):
        y = block(y, w)
    return y


def graph_model(length: int = 6) -> tuple[tf.Tensor, list[Any], tf.Tensor]:
    """In the default graph: a loss, two variables, and the last activation."""
    x = tf.constant(fixed(8, 8))
    ws = [
        v1.get_variable(f"w{i}", initializer=fixed(8, 8, seed=i), use_resource=True)
        for i in (1, 2)
    ]
    y = chain(chain(x, ws[0], length), ws[1], length)
    return tf.reduce_mean(y * y), ws, y


def compare_in_graph(ys: Any, xs: Any, **keywords: Any) -> list[Any]:
    """Asserts equal bits in the default graph; returns the library's gradients."""
    stock = tf.gradients(ys, xs, **keywords)
    new = msg.gradients(ys, xs, checkpoints="memory", **keywords)
    assert [g is None for g in stock] == [g is None for g in new]
    assert [type(g) for g in stock] == [type(g) for g in new]
    present = [[g for g in side if g is not None] for side in (stock, new)]
    assert_same_bits(*run(present))
    return new


# -- ys, xs, grad_ys -------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple, lambda pair: pair[0]])
def test_lists_tuples_and_single_tensors(kind: Any) -> None:
    with tf.Graph().as_default():
        loss, weights, y = graph_model()
        new = compare_in_graph(kind([loss, y]), kind(weights))
        assert msg.last_plan().recomputed
        assert type(new) is list


@pytest.mark.parametrize("use_resource", [False, True])
def test_version_1_variables(use_resource: bool) -> None:
    with tf.Graph().as_default():
        w = v1.get_variable("w", initializer=fixed(8, 8), use_resource=use_resource)
        y = chain(tf.constant(fixed(8, 8, seed=1)), w)
        compare_in_graph(y, w)
        compare_in_graph(y, [w, w])
        assert msg.last_plan().recomputed


def test_a_version_1_variable_read_without_a_copy() -> None:
    with tf.Graph().as_default():
        w = v1.get_variable("w", initializer=fixed(8, 8), use_resource=False)
        y = tf.constant(fixed(8, 8, seed=1))
        for _ in range(6):
            y = tf.tanh(tf.raw_ops.MatMul(a=y, b=tf.tanh(w._ref())))
        compare_in_graph(y, [w])
        assert msg.last_plan().recomputed


def test_keras_variables_beside_others() -> None:
    import keras

    of_keras = keras.Variable(fixed(8, 8))
    of_tensorflow = tf.Variable(fixed(8, 8, seed=1))

    @tf.function(autograph=False)
    def both(x: tf.Tensor) -> tuple[list[Any], list[Any]]:
        y = chain(chain(x, of_keras.value), of_tensorflow)
        stock = tf.gradients(y, [of_keras.value, of_tensorflow, x])
        return stock, msg.gradients(
            y, [of_keras, of_tensorflow, x], checkpoints="memory"
        )

    assert_same_bits(*both(tf.constant(fixed(4, 8))))
    assert msg.last_plan().recomputed


def test_a_keras_model() -> None:
    import keras

    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input([8, 8, 3])]
        + [
            layer
            for _ in range(3)
            for layer in (layers.Conv2D(4, 3), layers.BatchNormalization())
        ]
        + [layers.Flatten(), layers.Dense(3)]
    )
    weights = model.trainable_variables

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tuple[list[Any], list[Any]]:
        loss = tf.reduce_mean(model(x, training=True) ** 2)
        stock = tf.gradients(loss, [w.value for w in weights])
        return stock, msg.gradients(loss, weights, checkpoints="memory")

    assert_same_bits(*step(tf.constant(fixed(4, 8, 8, 3))))
    assert msg.last_plan().recomputed


def test_several_ys_that_share_most_of_their_graph() -> None:
    with tf.Graph().as_default():
        loss, weights, y = graph_model()
        # A sum of three or more may start with whichever operand's buffer is free.
        ys = [loss, y, tf.reduce_sum(y), y]
        stock = tf.gradients(ys, weights)
        new = msg.gradients(ys, weights, checkpoints="memory")
        stock, new = run([stock, new])
        assert_close(stock, stock, new)
        assert msg.last_plan().recomputed


def test_a_y_upstream_of_another_y() -> None:
    with tf.Graph().as_default():
        w = tf.constant(fixed(8, 8))
        middle = chain(w, w)
        compare_in_graph([middle, chain(middle, w)], [w])
        assert msg.last_plan().recomputed


def test_a_y_that_is_an_x() -> None:
    with tf.Graph().as_default():
        x = tf.constant(fixed(8, 8))
        y = chain(x, x)
        compare_in_graph([y, x], [x, y])
        compare_in_graph(x, x)


def test_variables_as_ys() -> None:
    with tf.Graph().as_default():
        loss, weights, _ = graph_model()
        compare_in_graph([weights[0], loss], weights)


def grad_of_tensor() -> Any:
    return tf.constant(fixed(8, 8, seed=5))


def grad_of_numpy() -> Any:
    return fixed(8, 8, seed=5)


def grad_of_slices() -> Any:
    values = tf.constant(fixed(2, 8, seed=5))
    return tf.IndexedSlices(values, tf.constant([3, 5]), tf.constant([8, 8]))


@pytest.mark.parametrize("grad", [grad_of_tensor, grad_of_numpy, grad_of_slices])
def test_given_grad_ys(grad: Any) -> None:
    with tf.Graph().as_default():
        _, weights, y = graph_model()
        compare_in_graph(y, weights, grad_ys=grad())
        compare_in_graph([y], weights, grad_ys=[grad()])
        assert msg.last_plan().recomputed


def test_grad_ys_of_which_one_is_none() -> None:
    with tf.Graph().as_default():
        loss, weights, y = graph_model()
        compare_in_graph([loss, y], weights, grad_ys=[None, fixed(8, 8)])


def test_grad_ys_that_are_a_function_of_the_forward_pass() -> None:
    with tf.Graph().as_default():
        _, weights, y = graph_model()
        compare_in_graph(y, weights, grad_ys=tf.exp(y))


@pytest.mark.parametrize(
    ("ys", "keywords", "error"),
    [
        (lambda y: y, {"grad_ys": [None, None]}, ValueError),
        (lambda y: tf.cast(y, tf.complex64), {}, TypeError),
        (lambda y: tf.as_string(y), {}, TypeError),
        (lambda y: y, {"grad_ys": np.array(["no number"])}, TypeError),
        (lambda y: y, {"unconnected_gradients": "nonsense"}, ValueError),
        (lambda y: y, {"aggregation_method": 17}, ValueError),
    ],
)
def test_errors_are_stocks(ys: Any, keywords: Any, error: type[Exception]) -> None:
    with tf.Graph().as_default():
        x = tf.constant(fixed(8, 8))
        y = ys(chain(x, x))
        with pytest.raises(error) as of_stock:
            tf.gradients(y, x, **keywords)
        with pytest.raises(error) as of_ours:
            msg.gradients(y, x, checkpoints="memory", **keywords)
        assert str(of_ours.value)[:30] == str(of_stock.value)[:30]


def test_an_op_without_a_gradient_is_stocks_error() -> None:
    with tf.Graph().as_default():
        x = tf.constant(fixed(8, 8))
        y = tf.linalg.lu(tf.tanh(x))[0]
        with pytest.raises(LookupError, match="Lu"):
            msg.gradients(y, x, checkpoints="memory")


def test_no_xs() -> None:
    with tf.Graph().as_default():
        loss, _, _ = graph_model()
        assert msg.gradients(loss, [], checkpoints="memory") == []


# -- keywords of tf.gradients ----------------------------------------------------------


def test_stop_gradients() -> None:
    with tf.Graph().as_default():
        x = tf.constant(fixed(8, 8))
        middle = chain(x, x)
        y = chain(middle, x)
        compare_in_graph(y, [x, middle], stop_gradients=[middle])
        compare_in_graph(y, [x, middle], stop_gradients=middle)
        assert msg.last_plan().recomputed


@pytest.mark.parametrize("unconnected", list(tf.UnconnectedGradients))
def test_xs_that_do_not_reach_ys(unconnected: Any) -> None:
    with tf.Graph().as_default():
        loss, weights, _ = graph_model()
        away = v1.get_variable("away", initializer=fixed(3), use_resource=True)
        behind = loss * 2
        xs = [away, weights[0], behind, tf.constant(fixed(2, 2))]
        new = compare_in_graph(loss, xs, unconnected_gradients=unconnected)
        assert (new[0] is None) == (unconnected is tf.UnconnectedGradients.NONE)
        assert msg.last_plan().recomputed


def test_zeros_for_unconnected_keras_variables() -> None:
    import keras

    used, unused = keras.Variable(fixed(8, 8)), keras.Variable(fixed(3, 2))

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> list[Any]:
        return msg.gradients(
            chain(x, used.value),
            [used, unused],
            checkpoints="memory",
            unconnected_gradients="zero",
        )

    zeros = step(tf.constant(fixed(4, 8)))[1]
    assert_same_bits([np.zeros([3, 2], np.float32)], [zeros])


def types_under(scope: str) -> Counter[str]:
    operations = v1.get_default_graph().get_operations()
    return Counter(op.type for op in operations if op.name.startswith(scope + "/"))


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"gate_gradients": True},
        {"aggregation_method": tf.AggregationMethod.ADD_N},
        {"aggregation_method": tf.AggregationMethod.EXPERIMENTAL_TREE},
        {"aggregation_method": tf.AggregationMethod.EXPERIMENTAL_ACCUMULATE_N},
    ],
)
def test_the_same_ops_as_stock_under_the_given_name(keywords: Any) -> None:
    with tf.Graph().as_default():
        _, weights, y = graph_model()
        seed = tf.constant(fixed(8, 8))
        stock = tf.gradients(y, weights, seed, name="stock", **keywords)
        new = msg.gradients(y, weights, seed, "memory", name="ours", **keywords)
        assert types_under("ours") == types_under("stock")
        assert msg.last_plan().recomputed
        assert_same_bits(*run([stock, new]))


def test_gates_hold_gradients_back() -> None:
    with tf.Graph().as_default():
        _, weights, y = graph_model()
        msg.gradients(y, weights, checkpoints="memory", gate_gradients=True, name="g")
        gates = [
            op
            for op in v1.get_default_graph().get_operations()
            if op.name.startswith("g/") and op.name.endswith("group_deps")
        ]
        assert gates
        assert all(op.control_inputs for op in gates)


@pytest.mark.parametrize("colocate", [False, True, None])
@pytest.mark.parametrize("graph", ["version 1", "function"])
def test_colocation(colocate: bool | None, graph: str) -> None:
    def colocated() -> Counter[tuple[bytes, ...]]:
        x = tf.constant(fixed(8, 8))
        with tf.name_scope("forward"):
            y = chain(x, x)
        keywords = {} if colocate is None else {"colocate_gradients_with_ops": colocate}
        msg.gradients(y, x, checkpoints="memory", name="ours", **keywords)
        return [
            op.colocation_groups()[0]
            for op in v1.get_default_graph().get_operations()
            if op.name.startswith("ours/") and "MatMul" in op.type
        ]

    if graph == "version 1":
        with tf.Graph().as_default():
            groups = colocated()
    else:
        found: list[Any] = []
        tf.function(lambda: found.extend(colocated())).get_concrete_function()
        groups = found
    with_forward = colocate or (colocate is None and graph == "function")
    assert groups
    assert all(b"loc:@forward/" in group for group in groups) == with_forward


def test_the_signature_is_that_of_version_1() -> None:
    stock = inspect.signature(v1.gradients).parameters
    for member in (msg.gradients_memory, msg.gradients_speed, msg.gradients_collection):
        ours = inspect.signature(member).parameters
        assert list(ours) == list(stock)
        assert [p.kind for p in ours.values()] == [p.kind for p in stock.values()]
        for name in stock:
            # None is what stock does by default, in a tf.function, too.
            if name != "colocate_gradients_with_ops":
                assert ours[name].default == stock[name].default
    general = list(inspect.signature(msg.gradients).parameters)
    assert general[:4] == ["ys", "xs", "grad_ys", "checkpoints"]
    assert set(stock) <= set(general)


@pytest.mark.parametrize("mode", ["memory", "speed", "collection"])
def test_the_family_takes_the_arguments_of_version_1_by_position(mode: str) -> None:
    with tf.Graph().as_default():
        loss, weights, y = graph_model()
        v1.add_to_collection("checkpoints", weights[1] @ y)
        v1.add_to_collection("checkpoints", y.op.inputs[0])
        stock = v1.gradients(loss, weights, None, "stock", True, True, 1, [y])
        member = getattr(msg, f"gradients_{mode}")
        with (
            pytest.warns(UserWarning)
            if mode == "collection"
            else contextlib.nullcontext()
        ):
            new = member(loss, weights, None, "ours", True, True, 1, [y])
        assert stock == [None, None] == new


# -- shapes of graphs ------------------------------------------------------------------


def shared_weights(ws: Any, xs: Any) -> Any:
    return chain(chain(xs[0], ws[0]), ws[0])


def disconnected_towers(ws: Any, xs: Any) -> Any:
    return [chain(xs[0], ws[0]), tf.reduce_sum(chain(xs[1], ws[1]), axis=0)]


def long_skips(ws: Any, xs: Any) -> Any:
    y, saved = xs[0], []
    for _ in range(5):
        y = block(y, ws[0])
        saved.append(y)
    for skip in reversed(saved):
        y = block(y + skip, ws[1])
    return y


def dense_connections(ws: Any, xs: Any) -> Any:
    found = [xs[0]]
    for _ in range(6):
        found.append(block(tf.add_n(found), ws[0]))
    return tf.concat(found, 1)


def batch_norm(ws: Any, xs: Any) -> Any:
    y = tf.reshape(xs[0], [4, 2, 4, 2])
    for w in (*ws, *ws, *ws):
        y = tf.tanh(tf.sin(tf.exp(y)))
        y = tf.raw_ops.FusedBatchNormV3(
            x=y, scale=w[0, :2], offset=w[1, :2], mean=[0.0] * 2, variance=[1.0] * 2
        )[0]
    return tf.tanh(y)


def split_and_unstack(ws: Any, xs: Any) -> Any:
    y = block(xs[0], ws[0])
    for _ in range(3):
        a, b = tf.split(y, 2, axis=1)
        rows = tf.unstack(tf.concat([tf.sin(b), a], 1))
        y = block(tf.stack(rows[::-1]), ws[1])
    return y


def half_of_a_split_unused(ws: Any, xs: Any) -> Any:
    y = xs[0]
    for _ in range(4):
        y = tf.tanh(tf.split(tf.tanh(tf.concat([y, y * 2], 1)), 2, axis=1)[1] @ ws[0])
    return y


def singular_values(ws: Any, xs: Any) -> Any:
    y = block(xs[0], ws[0])
    s, u, v = tf.linalg.svd(tf.tanh(y @ ws[1]))
    return block(tf.tanh(u * s) @ tf.transpose(v), ws[0])


def top_values(ws: Any, xs: Any) -> Any:
    y = block(xs[0], ws[0])
    for _ in range(3):
        values, places = tf.math.top_k(tf.tanh(y), 8)
        y = block(values + tf.cast(places, tf.float32) / 8, ws[1])
    return y


def moments_and_grid(ws: Any, xs: Any) -> Any:
    y = block(xs[0], ws[0])
    mean, variance = tf.nn.moments(tf.tanh(y), [0])
    a, b = tf.meshgrid(tf.tanh(mean), tf.sqrt(variance + 1.0))
    return block(a * b, ws[1])


def integers_between(ws: Any, xs: Any) -> Any:
    y = block(xs[0], ws[0])
    for _ in range(3):
        y = tf.tanh(y)
        places = tf.argsort(y, axis=0)
        best = tf.one_hot(tf.argmax(y, 1), 8)
        count = tf.cast(tf.cast(y * 4, tf.int32) // 2, tf.float32)
        y = block(tf.gather(y, places[:, 0]) * best + count * y, ws[1])
    return y


def booleans_between(ws: Any, xs: Any) -> Any:
    y = block(xs[0], ws[0])
    for _ in range(3):
        positive = tf.logical_and(y > 0, tf.math.is_finite(y))
        y = block(tf.where(positive, tf.tanh(y), y * y), ws[1])
    return y


def shapes_that_depend_on_values(ws: Any, xs: Any) -> Any:
    y = block(xs[0], ws[0])
    for _ in range(3):
        rows = tf.boolean_mask(y, y[:, 0] > -0.2)
        y = block(tf.concat([rows, y], 0), ws[1])
    return y


def custom_shape_arithmetic(ws: Any, xs: Any) -> Any:
    y = block(xs[0], ws[0])
    for _ in range(3):
        size = tf.shape(y)
        y = tf.reshape(tf.tanh(y), [size[0] * 2, size[1] // 2])
        y = tf.reshape(tf.tanh(y), size) @ ws[1]
    return y


def strings_between(ws: Any, xs: Any) -> Any:
    y = block(xs[0], ws[0])
    for _ in range(3):
        back = tf.strings.to_number(tf.as_string(tf.round(y * 8)))
        y = block(tf.tanh(y) * tf.reshape(back, tf.shape(y)), ws[1])
    return y


def identities_everywhere(ws: Any, xs: Any) -> Any:
    y = tf.identity(xs[0])
    for w in [*ws, *ws]:
        y = tf.identity(tf.squeeze(tf.expand_dims(tf.tanh(tf.identity(y)), 0), 0))
        y, _ = tf.identity_n([y @ w, w])
        y = tf.reshape(tf.reshape(tf.stop_gradient(y) * 0.1 + y, [-1]), [8, 8])
    return y


def biased_convolutions(ws: Any, xs: Any) -> Any:
    y = tf.reshape(xs[0], [1, 4, 4, 4])
    for w in [*ws, *ws]:
        filters = tf.reshape(w[:, :6], [1, 3, 4, 4])
        left, right = (
            tf.nn.bias_add(tf.nn.conv2d(tf.tanh(y), f, 1, "SAME"), w[0, :4])
            for f in (filters, tf.sin(filters))
        )
        y = tf.tanh(left) * tf.tanh(right)
    return y


GRAPHS = [
    biased_convolutions,
    shared_weights,
    disconnected_towers,
    long_skips,
    dense_connections,
    batch_norm,
    split_and_unstack,
    half_of_a_split_unused,
    singular_values,
    top_values,
    moments_and_grid,
    integers_between,
    booleans_between,
    shapes_that_depend_on_values,
    custom_shape_arithmetic,
    strings_between,
    identities_everywhere,
]

# Compiling takes long: one of each kind.
COMPILED = [biased_convolutions, integers_between, long_skips]


@pytest.mark.parametrize(
    ("forward", "route"),
    [(forward, "session") for forward in GRAPHS]
    + [(forward, route) for forward in COMPILED for route in ("function", "jitted")],
)
def test_graphs(forward: Any, route: str) -> None:
    weights = [fixed(8, 8, seed=1), fixed(8, 8, seed=2)]
    inputs = [fixed(8, 8, seed=3), fixed(8, 8, seed=4)]
    check(Work(forward, weights, inputs), route)


def test_intermediate_xs() -> None:
    with tf.Graph().as_default():
        x = tf.constant(fixed(8, 8))
        middle = chain(x, x)
        alias = tf.identity(middle)
        piece = tf.split(chain(alias, x), 2)
        y = chain(tf.concat(piece, 0), x)
        xs = [middle, alias, piece[1], x, y]
        compare_in_graph(y, xs)
        compare_in_graph(tf.reduce_sum(y), xs[:2])
        assert msg.last_plan().recomputed


@pytest.mark.parametrize("route", EXACT_ROUTES)
def test_complex_numbers(route: str) -> None:
    def forward(ws: Any, xs: Any) -> Any:
        y = tf.cast(xs[0], tf.complex64)
        for _ in range(4):
            y = tf.tanh(tf.signal.fft(y @ ws[0]) * 0.1)
            y = tf.complex(tf.math.imag(y), tf.math.real(y)) * tf.math.conj(y)
        return tf.abs(y)

    weights = [fixed(8, 8, dtype=np.complex64)]
    check(Work(forward, weights, [fixed(8, 8)]), route)


def test_complex_ys() -> None:
    with tf.Graph().as_default():
        x = tf.constant(fixed(8, 8, dtype=np.complex64))
        y = x
        for _ in range(8):
            y = tf.tanh(tf.exp(tf.sin(y * 0.1)) - y)
        compare_in_graph(y, x, grad_ys=fixed(8, 8, dtype=np.complex64))
        assert msg.last_plan().recomputed


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_other_floats(dtype: tf.DType) -> None:
    def forward(ws: Any, xs: Any) -> Any:
        y = chain(tf.cast(xs[0], dtype), tf.cast(ws[0], dtype))
        return tf.cast(tf.nn.softmax(chain(y, tf.cast(ws[1], dtype))), tf.float32)

    check(Work(forward, [fixed(8, 8), fixed(8, 8, seed=1)], [fixed(8, 8)]), "session")


def test_ragged_tensors() -> None:
    with tf.Graph().as_default():
        x = tf.constant(fixed(6, 6))
        ragged = tf.RaggedTensor.from_row_lengths(x, [1, 3, 2])
        y = ragged
        for _ in range(5):
            y = tf.tanh(y * y.with_values(tf.tanh(tf.exp(y.values) @ x)))
        stock = tf.gradients(y, [x, ragged])
        new = msg.gradients(y, [x, ragged], checkpoints="memory")
        assert msg.last_plan().recomputed
        assert type(new[1]) is type(stock[1])
        flat = [tf.nest.flatten(side, expand_composites=True) for side in (stock, new)]
        assert_same_bits(*run(flat))


# -- sparse gradients ------------------------------------------------------------------


ROWS = 50_000


def two_lookups(ws: Any, xs: Any) -> Any:
    y = chain(tf.gather(ws[0], xs[0]), ws[1])
    return chain(tf.concat([y, tf.gather(ws[0], xs[1])], 0), ws[1])


LOOKUPS = Work(
    two_lookups,
    [fixed(ROWS, 8), fixed(8, 8)],
    [np.arange(0, 64, 4), np.arange(12, 44, 2)],
)


@pytest.mark.parametrize("route", EXACT_ROUTES)
def test_gradients_of_lookups_stay_sparse(route: str) -> None:
    plan = check(LOOKUPS, route)
    assert plan.predicted_peak_bytes < ROWS * 8 * 4
    table = (ROWS, 8)
    made = [op for op in plan.reading.graph.backward_ops if op.type != "Const"]
    shapes = [t.shape for op in made for t in plan.reading.ops[op.id].outputs]
    assert table not in [tuple(s) for s in shapes if s.rank is not None]


def test_lookups_under_xla() -> None:
    check(LOOKUPS, "jitted")


def test_a_lookup_beside_a_dense_use() -> None:
    def forward(ws: Any, xs: Any) -> Any:
        y = chain(tf.gather(ws[0], xs[0]), ws[1])
        return chain(y @ tf.transpose(ws[0]) @ ws[0], ws[1])

    weights = [fixed(16, 8), fixed(8, 8, seed=1)]
    for route in EXACT_ROUTES:
        check(Work(forward, weights, [np.arange(3)]), route, recomputes=False)


def test_a_lookup_of_a_recomputed_table() -> None:
    def forward(ws: Any, xs: Any) -> Any:
        table = chain(ws[1], ws[0])
        return chain(tf.gather(table, xs[0]) + tf.gather(table, xs[0] + 1), ws[0])

    weights = [fixed(8, 8), fixed(8, 8, seed=1)]
    for route in EXACT_ROUTES:
        check(Work(forward, weights, [np.arange(4)]), route)


# -- custom gradients ------------------------------------------------------------------


@tf.custom_gradient
def straight_through(x: tf.Tensor) -> Any:
    return tf.round(x * 4) / 4, lambda upstream: upstream


@tf.custom_gradient
def reversal(x: tf.Tensor) -> Any:
    return tf.identity(x), lambda upstream: -0.5 * upstream


@tf.custom_gradient
def closing_over_an_intermediate(x: tf.Tensor) -> Any:
    inner = tf.exp(tf.sin(x))
    return tf.tanh(inner), lambda upstream: upstream * inner * 0.1


CUSTOM = [straight_through, reversal, closing_over_an_intermediate, tf.stop_gradient]


@pytest.mark.parametrize(
    ("function", "route"),
    [(function, route) for function in CUSTOM for route in EXACT_ROUTES]
    + [(closing_over_an_intermediate, "jitted")],
)
def test_custom_gradients(function: Any, route: str) -> None:
    def forward(ws: Any, xs: Any) -> Any:
        y = block(xs[0], ws[0])
        for w in (*ws, *ws):
            y = block(function(y) + 0.1 * y, w)
            v1.add_to_collection("checkpoints", y)
        return y

    work = Work(forward, [fixed(8, 8), fixed(8, 8, seed=1)], [fixed(8, 8)])
    with pytest.warns(UserWarning, match="differentiated itself"):
        check(work, route, "collection")
    check(work, route, "memory")


def test_a_custom_gradient_with_a_variable_inside() -> None:
    def forward(ws: Any, xs: Any) -> Any:
        @tf.custom_gradient
        def scaled(x: tf.Tensor) -> Any:
            y = x * ws[1]

            def grad(upstream: tf.Tensor, variables: Any = None) -> Any:
                of_x = upstream * tf.tanh(y)
                return of_x, [tf.reduce_sum(upstream * x * 2, 0)] * len(variables)

            return y, grad

        y = xs[0]
        for _ in range(5):
            y = scaled(block(y, ws[0]))
        return block(y, ws[0])

    check(Work(forward, [fixed(8, 8), fixed(8)], [fixed(8, 8)]), "function")


@tf.RegisterGradient("TanhThatPassesAQuarter")
def _a_quarter(op: tf.Operation, upstream: tf.Tensor) -> tf.Tensor:
    return upstream * 0.25 * op.outputs[0]


def test_gradient_override_map() -> None:
    with tf.Graph().as_default() as graph:
        y = x = tf.constant(fixed(8, 8))
        with graph.gradient_override_map({"Tanh": "TanhThatPassesAQuarter"}):
            y = chain(y, x)
        y = chain(y, x)
        compare_in_graph(y, x)
        assert msg.last_plan().recomputed


# -- where it is called ----------------------------------------------------------------


def test_eagerly_it_says_what_to_do() -> None:
    x = tf.Variable(fixed(2, 2))
    for function in (msg.gradients, msg.gradients_memory, msg.gradients_collection):
        with pytest.raises(msg.EagerExecutionError, match=r"tf\.function"):
            function(tf.tanh(x), [x])
    with pytest.raises(RuntimeError):
        msg.gradients_speed(tf.tanh(x), x)


def test_inside_autograph() -> None:
    w = tf.Variable(fixed(8, 8))

    @tf.function
    def step(x: tf.Tensor) -> Any:
        y = x
        for _ in range(6):
            y = block(y, w)
        loss = tf.reduce_sum(y)
        if loss > 1e9:
            loss = -loss
        return tf.gradients(loss, [w]), msg.gradients(loss, [w], checkpoints="memory")

    assert_same_bits(*step(tf.constant(fixed(8, 8))))


def test_of_tensors_made_outside_the_graph_of_the_call() -> None:
    @tf.function(autograph=False)
    def outer(x: tf.Tensor) -> Any:
        y = chain(x, x)

        @tf.function(autograph=False)
        def inner() -> Any:
            return tf.gradients(y, x), msg.gradients(y, x, checkpoints="memory")

        return inner()

    assert_same_bits(*outer(tf.constant(fixed(8, 8))))


def test_devices_and_dependencies_of_the_caller_do_not_rub_off() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.constant(fixed(8, 8))
        y = chain(x, x)
        late = tf.constant(0, name="late")
        with (
            tf.device("CPU:1"),
            tf.control_dependencies([late]),
            tf.name_scope("scope"),
        ):
            msg.gradients(y, x, checkpoints="memory")
        copies = [
            op for op in graph.get_operations() if op.name.startswith("recompute/")
        ]
        copies = [op for op in copies if "seed" not in op.name]
        assert copies
        assert not any(op.device for op in copies)
        assert not any(late.op in op.control_inputs for op in copies)


# -- in place of tf.gradients ----------------------------------------------------------


@pytest.fixture(params=["tf", "tf.compat.v1", "tensorflow.python.ops.gradients"])
def patched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    from tensorflow.python.ops import gradients as module

    homes = {"tf": tf, "tf.compat.v1": v1}
    home = homes.get(request.param, module)
    monkeypatch.setattr(home, "gradients", msg.gradients_memory)
    return home


def test_assigned_over_stock_it_does_not_call_itself(patched: Any) -> None:
    with tf.Graph().as_default():
        loss, weights, _ = graph_model()
        found = patched.gradients(loss, weights)
        assert msg.last_plan().recomputed
        assert np.isfinite(run(found)).all()


OPTIMIZERS = [
    lambda: v1.train.GradientDescentOptimizer(0.1),
    lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    lambda: v1.train.AdamOptimizer(0.1),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_version_1_optimizers(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorflow.python.ops import gradients as module

    def trained() -> list[Any]:
        with tf.Graph().as_default():
            loss, weights, _ = graph_model()
            step = make().minimize(loss)
            with v1.Session() as running:
                running.run(v1.global_variables_initializer())
                for _ in range(3):
                    running.run(step)
                return running.run(weights)

    stock = trained()
    calls = []

    def counted(*args: Any, **keywords: Any) -> Any:
        found = msg.gradients_memory(*args, **keywords)
        calls.append(msg.last_plan().recomputed)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(module, "gradients", counted)
        new = trained()
    assert len(calls) == 1
    assert calls[0]
    for one, other in zip(stock, new, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    trained()
    assert len(calls) == 1
