"""What is kept when the user says so: lists, names, collections, predicates."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_helpers import EXACT_ROUTES, Work, assert_same_bits, check, fixed, run

import memory_saving_gradients as msg

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")


class Chain:
    """Sixteen layers in the default graph."""

    def __init__(self, length: int = 16) -> None:
        self.x = tf.constant(fixed(8, 8))
        self.w = v1.get_variable("w", initializer=fixed(8, 8), use_resource=True)
        self.ys = [self.x]
        for number in range(length):
            with tf.name_scope(f"layer{number}"):
                linear = tf.matmul(self.ys[-1], self.w, name="linear")
                hidden = tf.nn.relu(linear + 0.1, name="hidden")
                self.ys.append(tf.tanh(hidden * self.ys[-1], name="output"))
        self.loss = tf.reduce_sum(self.ys[-1], name="loss")

    def differentiate(self, checkpoints: Any) -> msg.Plan:
        """Asserts stock's bits."""
        stock = tf.gradients(self.loss, [self.w, self.x])
        new = msg.gradients(self.loss, [self.w, self.x], checkpoints=checkpoints)
        assert_same_bits(*run([stock, new]))
        plan = msg.last_plan()
        assert plan is not None
        return plan


@pytest.fixture
def chain() -> Any:
    with tf.Graph().as_default():
        yield Chain()


def ops_of(tensors: Any) -> set[str]:
    return {tensor.op.name for tensor in tensors}


# -- what serves -----------------------------------------------------------------------


def listed(chain: Chain, chosen: list[tf.Tensor]) -> Any:
    return chosen


def in_a_tuple(chain: Chain, chosen: list[tf.Tensor]) -> Any:
    return tuple(chosen)


def names(chain: Chain, chosen: list[tf.Tensor]) -> Any:
    return [tensor.name for tensor in chosen]


def op_names(chain: Chain, chosen: list[tf.Tensor]) -> Any:
    return [tensor.op.name for tensor in chosen]


def operations(chain: Chain, chosen: list[tf.Tensor]) -> Any:
    return [tensor.op for tensor in chosen]


def names_and_tensors(chain: Chain, chosen: list[tf.Tensor]) -> Any:
    return [chosen[0], *(tensor.name for tensor in chosen[1:])]


def collection(chain: Chain, chosen: list[tf.Tensor]) -> Any:
    for tensor in chosen:
        v1.add_to_collection("checkpoints", tensor)
    return "collection"


def predicate(chain: Chain, chosen: list[tf.Tensor]) -> Any:
    wanted = {tensor.name for tensor in chosen}
    return lambda tensor: tensor.name in wanted


WAYS = [
    listed,
    in_a_tuple,
    names,
    op_names,
    operations,
    names_and_tensors,
    collection,
    predicate,
]


@pytest.mark.parametrize("way", WAYS)
def test_exactly_what_was_named_is_kept(way: Any, chain: Chain) -> None:
    chosen = chain.ys[4:16:4]
    plan = chain.differentiate(way(chain, chosen))
    assert plan.kept == tuple(tensor.name for tensor in chosen)
    assert not ops_of(chosen) & set(plan.recomputed)
    assert ops_of(chain.ys[1:4]) <= set(plan.recomputed)
    assert plan.predicted_peak_bytes < plan.stock_peak_bytes


def test_the_collection_is_the_default(chain: Chain) -> None:
    v1.add_to_collection("checkpoints", chain.ys[8])
    msg.gradients(chain.loss, [chain.w])
    assert msg.last_plan().kept == (chain.ys[8].name,)
    msg.gradients_collection(chain.loss, [chain.w])
    assert msg.last_plan().kept == (chain.ys[8].name,)


def test_a_single_tensor(chain: Chain) -> None:
    assert chain.differentiate(chain.ys[8]).kept == (chain.ys[8].name,)


def test_an_alias_stands_for_what_it_shares_a_buffer_with() -> None:
    with tf.Graph().as_default():
        chain = Chain(8)
        owner = chain.ys[-1]
        alias = tf.reshape(tf.identity(owner), [4, 16])
        chain.loss = tf.reduce_sum(tf.exp(tf.sin(tf.exp(alias))))
        assert chain.differentiate([alias]).kept == (owner.name,)


@pytest.mark.parametrize("route", EXACT_ROUTES)
def test_the_collection_of_a_function_is_its_own(route: str) -> None:
    def forward(ws: Any, xs: Any) -> Any:
        y = xs[0]
        for number in range(9):
            y = tf.tanh(tf.nn.relu(y @ ws[0]) * y)
            if number % 3 == 2 and number < 8:
                v1.add_to_collection("checkpoints", y)
        return tf.reduce_sum(y)

    plan = check(Work(forward, [fixed(8, 8)], [fixed(8, 8)]), route, "collection")
    assert len(plan.kept) == 2


def test_a_predicate_sees_every_tensor_once(chain: Chain) -> None:
    seen: list[str] = []

    def wanted(tensor: tf.Tensor) -> bool:
        seen.append(tensor.name)
        return tensor.op.type == "Relu"

    plan = chain.differentiate(wanted)
    assert len(seen) == len(set(seen))
    assert {name.split("/")[1] for name in plan.kept} == {"hidden:0"}


def test_a_predicate_by_type_does_not_catch_similar_types() -> None:
    with tf.Graph().as_default():
        x = tf.constant(fixed(2, 4, 4, 3))
        y, bias = x, tf.constant(fixed(3))
        for _ in range(5):
            y = tf.tanh(tf.nn.bias_add(tf.sin(y), bias) + y)
        loss = tf.reduce_sum(tf.exp(y))
        msg.gradients(loss, [x], checkpoints=lambda t: t.op.type == "AddV2")
        kept = msg.last_plan().kept
        graph = v1.get_default_graph()
        assert kept
        assert {graph.get_tensor_by_name(name).op.type for name in kept} == {"AddV2"}


# -- what does not serve ---------------------------------------------------------------


def idle_tensors(chain: Chain) -> list[Any]:
    head = tf.exp(chain.ys[8], name="unused_head")
    after = tf.add(chain.loss, 1.0, name="after_the_loss")
    return [
        chain.x,
        chain.w,
        chain.w.handle,
        tf.constant(3.0, name="some_constant"),
        tf.argmax(chain.ys[8], 1, name="best"),
        tf.stop_gradient(head, name="stopped"),
        head,
        after,
        chain.loss,
        tf.shape(chain.ys[8], name="some_shape"),
    ]


def test_idle_checkpoints_are_named_in_one_warning(chain: Chain) -> None:
    idle = idle_tensors(chain)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = chain.differentiate([*idle, chain.ys[8]])
    assert plan.kept == (chain.ys[8].name,)
    (warning,) = caught
    text = str(warning.message)
    assert "10 of 11" in text or "9 of 11" in text
    assert chain.x.name in text
    assert warning.filename == __file__


def test_only_idle_checkpoints_are_an_error(chain: Chain) -> None:
    with pytest.raises(msg.CheckpointError, match=r'checkpoints="memory"') as caught:
        chain.differentiate(idle_tensors(chain))
    assert "and 5 more" in str(caught.value) or "and 4 more" in str(caught.value)
    with pytest.raises(ValueError, match=r"cannot serve: loss:0 .it is different"):
        chain.differentiate([chain.loss])


@pytest.mark.parametrize("use_resource", [False, True])
def test_a_variable_as_a_checkpoint_is_idle(use_resource: bool, chain: Chain) -> None:
    v = v1.get_variable("v", initializer=fixed(8, 8), use_resource=use_resource)
    with pytest.warns(UserWarning, match="v"):
        plan = chain.differentiate([v, chain.ys[8]])
    assert plan.kept == (chain.ys[8].name,)


def test_variables_as_checkpoints_in_a_function() -> None:
    import keras

    variables = [tf.Variable(fixed(8, 8), name="plain"), keras.Variable(fixed(8, 8))]

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        y = x
        for w in (*variables, *variables):
            y = tf.tanh(tf.nn.relu(y @ w) * y)
        return msg.gradients(
            tf.exp(y), variables, checkpoints=[*variables, y.op.inputs[0]]
        )

    with pytest.warns(UserWarning, match="plain:0 .it is a variable"):
        step.get_concrete_function(tf.TensorSpec([8, 8]))


def test_an_empty_collection_says_how_to_fill_it(chain: Chain) -> None:
    with pytest.raises(msg.CheckpointError, match=r"add_to_collection.*memory"):
        chain.differentiate("collection")
    with pytest.raises(msg.CheckpointError, match="is empty"):
        msg.gradients_collection(chain.loss, chain.w)


def test_an_empty_collection_of_a_function_says_first_what_one_does_there() -> None:
    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        return msg.gradients(tf.tanh(tf.sin(x)), x)

    with pytest.raises(msg.CheckpointError, match=r'="memory".*h1, h2.*add_to_coll'):
        step.get_concrete_function(tf.TensorSpec([8]))


@pytest.mark.parametrize("collection", [False, True])
def test_where_nothing_could_serve_a_list_is_an_error_too(collection: bool) -> None:
    with tf.Graph().as_default():
        x = tf.constant(fixed(8))
        y = tf.reduce_sum(3.0 * x)
        v1.add_to_collection("checkpoints", y)
        given: Any = "collection" if collection else [y]
        with pytest.raises(msg.CheckpointError, match="Nothing in this graph can"):
            msg.gradients(y, x, checkpoints=given)
        msg.gradients(y, x, checkpoints="memory")  # what the error advises


def test_an_empty_list(chain: Chain) -> None:
    with pytest.raises(msg.CheckpointError, match="it is empty"):
        chain.differentiate([])


def test_a_predicate_that_accepts_nothing(chain: Chain) -> None:
    with pytest.raises(msg.CheckpointError, match="returned False for all"):
        chain.differentiate(lambda tensor: False)


def test_a_predicate_that_raises_is_named_with_its_tensor(chain: Chain) -> None:
    def clumsy(tensor: tf.Tensor) -> bool:
        return tensor.shape[5] > 0

    with pytest.raises(
        msg.CheckpointError, match=r"clumsy .* IndexError .*:0 "
    ) as info:
        chain.differentiate(clumsy)
    assert isinstance(info.value.__cause__, IndexError)


@pytest.mark.parametrize("answer", [None, 1, "yes", tf.reduce_any])
def test_a_predicate_must_return_a_bool(answer: Any, chain: Chain) -> None:
    def clumsy(tensor: tf.Tensor) -> Any:
        return answer(tensor > 0) if callable(answer) else answer

    with pytest.raises(
        msg.CheckpointError, match=r"clumsy .* must return True or"
    ) as e:
        chain.differentiate(clumsy)
    assert "for the tensor layer0/" in str(e.value)


def test_a_predicate_may_return_a_bool_of_numpy(chain: Chain) -> None:
    plan = chain.differentiate(lambda t: np.equal(t.name, chain.ys[8].name))
    assert plan.kept == (chain.ys[8].name,)


def test_an_error_leaves_the_graph_usable(chain: Chain) -> None:
    with pytest.raises(msg.CheckpointError):
        chain.differentiate([])
    assert chain.differentiate("memory").recomputed


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("layer8/ouput:0", "layer8/output:0"),
        ("layer8/ouput", "layer8/output:0"),
        ("layer8/output:1", "layer8/output:0"),
        ("Layer8/output:0", "layer8/output:0"),
    ],
)
def test_a_misspelt_name_is_an_error_with_near_matches(
    name: str, near: str, chain: Chain
) -> None:
    with pytest.raises(msg.UnknownCheckpointNameError, match=near) as caught:
        chain.differentiate([chain.ys[4], name])
    assert name in str(caught.value)
    assert isinstance(caught.value, LookupError)
    assert isinstance(caught.value, ValueError)


def test_near_matches_are_no_noise(chain: Chain) -> None:
    with pytest.raises(msg.UnknownCheckpointNameError) as caught:
        chain.differentiate(["layer8/ouput"])
    text = str(caught.value)
    assert "did you mean layer8/output:0?" in text
    assert "layer1" not in text


def test_a_name_without_its_scope_is_near_to_those_in_scopes(chain: Chain) -> None:
    with pytest.raises(msg.UnknownCheckpointNameError) as caught:
        chain.differentiate(["output"])
    assert "layer0/output:0 or layer1/output:0 or layer2/output:0" in str(caught.value)


def test_only_what_could_serve_is_a_near_match(chain: Chain) -> None:
    tf.gradients(chain.loss, chain.w, name="layer8/outputs")
    chain.differentiate("memory")
    with pytest.raises(msg.UnknownCheckpointNameError) as caught:
        chain.differentiate(["layer8/outpus"])
    assert "did you mean layer8/output:0?" in str(caught.value)


def test_misspelt_names_are_reported_together(chain: Chain) -> None:
    given = ["layer8/ouput", chain.ys[4], "layer3/hiden", "zzzzzzzzzzzzzz"]
    with pytest.raises(msg.UnknownCheckpointNameError, match="names 3 tens") as caught:
        chain.differentiate(given)
    text = str(caught.value)
    assert "'layer8/ouput' (did you mean layer8/output:0?)" in text
    assert "'layer3/hiden' (did you mean layer3/hidden:0?)" in text
    assert "'zzzzzzzzzzzzzz' (no name is close to it)" in text


@pytest.mark.parametrize("entry", [3, None, np.zeros(3)])
def test_what_is_no_tensor_is_an_error(entry: Any, chain: Chain) -> None:
    with pytest.raises(msg.CheckpointError, match="may list graph tensors"):
        chain.differentiate([entry])


def test_a_tensor_of_another_graph(chain: Chain) -> None:
    with tf.Graph().as_default():
        foreign = tf.identity(tf.constant(1.0), name="foreign")
    with pytest.warns(UserWarning, match="foreign:0 .it belongs to another graph"):
        plan = chain.differentiate([foreign, chain.ys[8]])
    assert plan.kept == (chain.ys[8].name,)


def test_a_name_in_the_place_of_stocks_fourth_argument(chain: Chain) -> None:
    with pytest.raises(msg.CheckpointError, match="fourth positional") as caught:
        msg.gradients(chain.loss, chain.w, None, "my_gradients")
    for choice in ("memory", "speed", "collection", "list", "function", "name="):
        assert choice in str(caught.value)


# -- a plan given back -----------------------------------------------------------------


def blocks(skips: bool) -> tuple[tf.Tensor, list[tf.Tensor]]:
    x = y = tf.constant(fixed(8, 8))
    saved = []
    for number in range(12):
        y = tf.tanh(tf.nn.relu(y @ x) * y)
        if skips and number < 5:
            saved.append(y)
        elif skips and saved:
            y = tf.nn.softmax(y + saved.pop())
    return tf.reduce_sum(y), [x]


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("mode", ["memory", "speed"])
def test_the_automatic_choice_given_back_makes_the_same_graph(
    mode: str, skips: bool
) -> None:
    def built(checkpoints: Any) -> tuple[msg.Plan, list[tuple[Any, ...]]]:
        with tf.Graph().as_default() as graph:
            loss, xs = blocks(skips)
            msg.gradients(loss, xs, checkpoints=checkpoints)
            edges = [
                (
                    op.name,
                    tuple(tensor.name for tensor in op.inputs),
                    tuple(sorted(other.name for other in op.control_inputs)),
                )
                for op in graph.get_operations()
            ]
        return msg.last_plan(), edges

    plan, edges = built(mode)
    assert plan.recomputed
    given = [*plan.kept, *plan.kept[::2]]
    for seed in range(3):
        random.Random(seed).shuffle(given)
        again, same_edges = built(given)
        assert again.kept == plan.kept
        assert again.recomputed == plan.recomputed
        assert again.predicted_peak_bytes == plan.predicted_peak_bytes
        assert same_edges == edges
    assert built(mode)[1] == edges


# -- advice ----------------------------------------------------------------------------


def test_checkpoints_on_every_relu_are_no_more_than_stock_and_told_of() -> None:
    with tf.Graph().as_default():
        w = v1.get_variable("w", initializer=fixed(3, 3, 8, 8), use_resource=True)
        y = tf.constant(fixed(4, 8, 8, 8))
        relus = []
        for _ in range(20):
            y = tf.nn.relu(tf.nn.conv2d(y, w * 0.1, 1, "SAME"))
            relus.append(y)
        loss = tf.reduce_sum(tf.tanh(y)) + tf.nn.l2_loss(w)
        stock = tf.gradients(loss, [w])
        new = msg.gradients(loss, [w], checkpoints=relus)
        plan = msg.last_plan()
        assert_same_bits(*run([stock, new]))
    assert plan.predicted_peak_bytes <= plan.stock_peak_bytes
    assert len(plan.kept) <= len(relus)
    assert "kept" in plan.summary()


@pytest.mark.parametrize("mode", ["memory", "speed"])
def test_every_op_is_recomputed_at_most_once(mode: str, chain: Chain) -> None:
    plan = chain.differentiate(mode)
    names = [op.name for op in v1.get_default_graph().get_operations()]
    copies = [n for n in names if n.startswith("recompute/layer")]
    assert plan.recomputed
    assert not [name for name in copies if name.rsplit("_", 1)[-1].isdigit()]


def test_a_script_of_version_1_runs_unchanged() -> None:
    class Script:
        memory_saving_gradients = msg

    with tf.Graph().as_default():
        context = v1.placeholder(tf.int32, [2, 5])
        table = v1.get_variable("wte", initializer=fixed(11, 8), use_resource=True)
        with v1.variable_scope("model"):
            h = tf.gather(table, context)
            for layer in range(4):
                with v1.variable_scope(f"h{layer}"):
                    w = v1.get_variable("w", initializer=fixed(8, 8), use_resource=True)
                    h = h + tf.nn.gelu(tf.einsum("btd,de->bte", h, w))
                    if layer == 1:
                        v1.add_to_collection("checkpoints", h)
        logits = tf.einsum("btd,vd->btv", h, table)
        loss = tf.reduce_mean(
            v1.nn.sparse_softmax_cross_entropy_with_logits(
                labels=context, logits=logits
            )
        )
        train_vars = v1.trainable_variables()
        msgrads = Script.memory_saving_gradients
        found = [
            v1.gradients(loss, train_vars),
            msgrads.gradients(loss, train_vars),
            msgrads.gradients(loss, train_vars, checkpoints="memory"),
            msgrads.gradients(loss, train_vars, checkpoints="speed"),
            msgrads.gradients(loss, train_vars, checkpoints="collection"),
            msgrads.gradients(loss, train_vars, checkpoints=[h]),
            msgrads.gradients_memory(loss, train_vars),
            msgrads.gradients_speed(loss, train_vars),
            msgrads.gradients_collection(loss, train_vars),
        ]
        dense = [[tf.convert_to_tensor(g) for g in gradients] for gradients in found]
        step = v1.train.AdamOptimizer(0.1).apply_gradients(
            zip(found[1], train_vars, strict=True)
        )
        feeds = {context: np.arange(10).reshape(2, 5)}
        stock, *others = run(dense, feeds)
        for other in others:
            for one, two in zip(stock, other, strict=True):
                np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)
        run(step, feeds, steps=2)


def test_the_plan_counts_only_what_can_serve():
    with tf.Graph().as_default():
        x = y = tf.compat.v1.placeholder(tf.float32, [64, 64])
        names = []
        for number in range(12):
            y = tf.tanh(y, name=f"act{number}")
            names.append(f"act{number}")
        with pytest.warns(UserWarning):
            msg.gradients(
                tf.reduce_sum(y), x, checkpoints=[x, names[3], names[3], names[7]]
            )
    assert msg.last_plan().strategy.startswith("2 tensors from")
