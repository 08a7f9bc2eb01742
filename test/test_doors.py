"""Which gradients the doors let through, and whose ops they leave alone."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf
from saving_helpers import python
from tensorflow.python.eager import imperative_grad
from tensorflow.python.ops import gradients_util
from tf_helpers import assert_same_bits, copies_in, fixed, run

import mem_util
import memory_saving_gradients as msg
from memory_saving_gradients import counting, doors, tf_internals
from memory_saving_gradients.autodiff import Setting
from memory_saving_gradients.checkpoints import Auto
from memory_saving_gradients.plan import _newest

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")

MEMORY = Setting(Auto("memory"))


def chain(y: tf.Tensor, ws: Any) -> tf.Tensor:
    for w in ws:
        y = tf.tanh(tf.nn.softplus(y @ w) - 0.3 * y)
    return y


@pytest.fixture(autouse=True)
def shut_doors() -> Iterator[None]:
    """Each test finds TensorFlow's own functions, and leaves them."""
    # Custom gradients keep their graphs alive in TensorFlow's registry.
    doors._rewired.clear()
    forget_graphs()
    assert gradients_util._GradientsHelper is tf_internals.gradients_helper
    yield
    assert imperative_grad.imperative_grad.__module__.startswith("tensorflow")
    assert not tf_internals.TAPES.is_open


def forget_graphs() -> None:
    """`last_plan()` is what keeps a rewired graph alive that nobody else holds."""
    vars(_newest).clear()
    gc.collect()
    with doors.hold_open():
        pass


def test_the_very_functions_come_back() -> None:
    before = imperative_grad.imperative_grad, gradients_util._GradientsHelper
    with doors.hold_open():
        assert imperative_grad.imperative_grad is not before[0]
        with doors.hold_open():
            pass
        assert gradients_util._GradientsHelper is not before[1]
    assert imperative_grad.imperative_grad is before[0]
    assert gradients_util._GradientsHelper is before[1]


def test_they_come_back_after_an_error() -> None:
    before = imperative_grad.imperative_grad
    with pytest.raises(ZeroDivisionError), doors.use(MEMORY):
        raise ZeroDivisionError
    assert imperative_grad.imperative_grad is before


def test_the_guard_stays_while_a_rewired_graph_lives() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.constant(fixed(4, 8))
        msg.gradients(chain(x, [tf.constant(fixed(8, 8))] * 8), x, checkpoints="memory")
        assert copies_in(graph)
        assert tf_internals.GRAPHS.is_open
    with doors.hold_open():
        pass
    assert tf_internals.GRAPHS.is_open
    del graph, x
    forget_graphs()
    assert not tf_internals.GRAPHS.is_open


def test_a_wrapper_around_ours_stays_and_ours_passes_on() -> None:
    stock = imperative_grad.imperative_grad
    calls = []
    try:
        with doors.hold_open():
            ours = imperative_grad.imperative_grad

            def theirs(*args: Any, **kwargs: Any) -> Any:
                calls.append(1)
                return ours(*args, **kwargs)

            imperative_grad.imperative_grad = theirs
        assert imperative_grad.imperative_grad is theirs
        with doors.use(MEMORY):
            step = tf.function(taken)
            step(tf.constant(fixed(4, 8)))
        assert calls == [1]
        assert copies_in(step.get_concrete_function(tf.constant(fixed(4, 8))).graph)
    finally:
        imperative_grad.imperative_grad = stock
    with doors.hold_open():
        assert tf_internals.TAPES.is_open
    assert imperative_grad.imperative_grad is stock


def taken(x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = chain(x, [tf.constant(fixed(8, 8, seed=i)) for i in range(8)])
    return tape.gradient(y, x)


def test_a_setting_is_that_of_its_thread() -> None:
    copies: dict[str, list[str]] = {}
    inside, done = threading.Event(), threading.Event()

    def trace(name: str) -> None:
        step = tf.function(taken).get_concrete_function(tf.constant(fixed(4, 8)))
        copies[name] = copies_in(step.graph)

    def other() -> None:
        inside.wait()
        trace("other")
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with doors.use(MEMORY):
        inside.set()
        done.wait()
        trace("this")
    thread.join()
    assert copies["this"]
    assert not copies["other"]


def test_the_innermost_setting_counts() -> None:
    def copies() -> list[str]:
        step = tf.function(lambda x: taken(x))
        return copies_in(step.get_concrete_function(tf.constant(fixed(4, 8))).graph)

    with doors.use(MEMORY):
        assert copies()
        with doors.use(None):
            assert not copies()
        assert copies()


# -- whose ops -------------------------------------------------------------------------


def test_ops_are_collected_by_thread() -> None:
    with tf.Graph().as_default() as graph:
        with tf_internals.ops_of_this_thread(graph) as outer:
            first = tf.constant(1.0)

            def work() -> None:
                with (
                    graph.as_default(),
                    tf_internals.ops_of_this_thread(graph) as theirs,
                ):
                    found.append(tf.constant(2.0).op)
                    assert theirs == found

            found: list[tf.Operation] = []
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            with tf_internals.ops_of_this_thread(graph) as inner:
                second = tf.constant(3.0)
        last = tf.constant(4.0)
    assert outer == [first.op, second.op]
    assert inner == [second.op]
    assert graph.get_operations() == [first.op, *found, second.op, last.op]
    assert graph._create_op_helper.__func__ is tf.Graph._create_op_helper


def test_ops_of_other_threads_are_never_changed() -> None:
    """Another thread builds in the same graph in the middle of a gradient."""
    with tf.Graph().as_default() as graph:
        x = tf.constant(fixed(4, 8))
        ws = [tf.constant(fixed(8, 8, seed=i)) for i in range(8)]
        foreign: list[tf.Operation] = []

        @tf.custom_gradient
        def meeting(y: tf.Tensor) -> Any:
            def gradient(dy: tf.Tensor) -> tf.Tensor:
                def work() -> None:
                    with graph.as_default():
                        foreign.append(tf.tanh(hidden).op)
                        foreign.append(tf.add(hidden, foreign[0].outputs[0]).op)

                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
                return dy

            return tf.identity(y), gradient

        hidden = chain(x, ws[:4])
        y = chain(meeting(hidden), ws[4:])
        (stock,) = tf.gradients(y, x)
        foreign.clear()
        (new,) = msg.gradients(y, x, checkpoints="memory")
        assert msg.last_plan().recomputed
        assert [t.op for t in foreign[0].inputs] == [hidden.op]
        assert [t.op for t in foreign[1].inputs] == [hidden.op, foreign[0]]
        assert not any(op.control_inputs for op in foreign)
        assert_same_bits(*run([[stock], [new]]))


def test_an_op_of_another_thread_in_the_midst_of_the_backward_pass() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.constant(fixed(4, 8))
        ws = [tf.constant(fixed(8, 8, seed=i)) for i in range(8)]

        @tf.custom_gradient
        def meeting(y: tf.Tensor) -> Any:
            def gradient(dy: tf.Tensor) -> tf.Tensor:
                made: list[tf.Tensor] = []

                def work() -> None:
                    with graph.as_default():
                        made.append(dy * hidden)
                        foreign.append(made[0].op)

                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
                return made[0] + 1.0

            return tf.identity(y), gradient

        foreign: list[tf.Operation] = []
        hidden = chain(x, ws[:2])
        y = chain(meeting(chain(hidden, ws[2:4])), ws[4:])
        (stock,) = tf.gradients(y, x)
        (new,) = msg.gradients(y, x, checkpoints="memory")
        copied = set(msg.last_plan().recomputed)
        assert copied
        assert hidden.op.name not in copied
        assert foreign[1].inputs[1] is hidden
        assert not foreign[1].control_inputs
        assert_same_bits(*run([[stock], [new]]))


def test_a_gradient_that_the_user_gives_is_left_alone() -> None:
    with tf.Graph().as_default():
        x = tf.constant(fixed(4, 8))
        given = tf.complex(tf.sin(x), tf.cos(x))
        real = chain(x, [tf.constant(fixed(8, 8, seed=i)) for i in range(8)])
        y = tf.complex(real, 2.0 * real)
        stock = tf.gradients(y, x, given)
        new = msg.gradients(y, x, given, checkpoints="memory")
        assert msg.last_plan().recomputed
        assert not given.op.control_inputs
        assert_same_bits(*run([stock, new]))


@pytest.mark.parametrize("kind", ["plain", "tape"])
def test_two_threads_build_one_graph(kind: str) -> None:
    """Each rewires its own gradient; the other's is not disturbed.

    They take turns, as replicas do: TensorFlow's own `Tensor.consumers` fails now and
    then if another thread adds one meanwhile. But both are in the midst of their
    gradients when they meet.
    """
    with tf.Graph().as_default() as graph:
        x = tf.constant(fixed(4, 8))
        starts = [tf.constant(fixed(8, 8, seed=i)) for i in range(8)]
        results: dict[int, Any] = {}
        met, turn = threading.Barrier(2, timeout=60), threading.Lock()

        @tf.custom_gradient
        def meeting(y: tf.Tensor) -> Any:
            def gradient(dy: tf.Tensor) -> tf.Tensor:
                turn.release()
                met.wait()
                turn.acquire()
                return dy * 1.0

            return tf.identity(y), gradient

        def work(number: int) -> None:
            with turn, graph.as_default():
                ws = [w * (1.0 + number) for w in starts]
                if kind == "tape":
                    with msg.GradientTape() as tape:
                        tape.watch(x)
                        y = chain(meeting(chain(x, ws[:4])), ws[4:])
                    results[number] = tape.gradient(y, x)
                else:
                    y = chain(meeting(chain(x, ws[:4])), ws[4:])
                    results[number] = msg.gradients_memory(y, x)[0]
                assert msg.last_plan().recomputed

        threads = [threading.Thread(target=work, args=[n]) for n in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stock = [
            tf.gradients(chain(x, [w * (1.0 + n) for w in starts]), x)[0]
            for n in (0, 1)
        ]
        assert_same_bits(*run([stock, [results[0], results[1]]]))


def mirrored(synchronised: bool) -> None:
    """Run in a process of its own: logical devices are made before all else."""
    import keras

    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def gradients(tape: Any) -> list[Any]:
        keras.utils.set_random_seed(1)
        layers: list[Any] = [keras.Input([8])]
        with strategy.scope():
            for _ in range(4):
                layers.append(keras.layers.Dense(8, "tanh"))
                layers.append(
                    keras.layers.BatchNormalization(synchronized=synchronised)
                )
            model = keras.Sequential(layers)

        def replica(x: tf.Tensor) -> Any:
            with tape() as recording:
                loss = tf.reduce_mean(model(x, training=True) ** 2)
            variables = [v.value for v in model.trainable_variables]
            return recording.gradient(loss, variables)

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            found = strategy.run(replica, [x])
            return [strategy.experimental_local_results(g) for g in found]

        taken = step(tf.constant(fixed(16, 8)))
        state = [v.numpy() for v in model.non_trainable_variables]
        return [*tf.nest.flatten(taken), *state]

    stock, new = gradients(tf.GradientTape), gradients(msg.GradientTape)
    assert_same_bits(stock, new)
    print(dict(counting.counts().rewired), dict(counting.counts().stock))


def mirrored_peak() -> None:
    """As above, for the peak of both replicas together, under synchronised batch norm.

    The pool of memory that logical CPUs share is all that can be read there.
    """
    import keras

    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def peak(tape: Any) -> int:
        layers: list[Any] = [keras.Input([256])]
        with strategy.scope():
            for _ in range(8):
                layers.append(keras.layers.Dense(256))
                layers.append(keras.layers.BatchNormalization(synchronized=True))
                layers.append(keras.layers.Activation("gelu"))
            model = keras.Sequential(layers)

        def replica(x: tf.Tensor) -> Any:
            with tape() as recording:
                loss = tf.reduce_mean(model(x, training=True) ** 2)
            variables = [v.value for v in model.trainable_variables]
            return [tf.reduce_sum(g) for g in recording.gradient(loss, variables)]

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            found = strategy.run(replica, [x])
            return [strategy.experimental_local_results(g) for g in found]

        x = tf.random.stateless_normal([2048, 256], [1, 2])
        taken = mem_util.measure(step, x, replayable=False)
        return taken.above_rest_bytes["/cpu:0"]

    stock, new = peak(tf.GradientTape), peak(msg.GradientTape)
    assert new < 0.5 * stock, (new, stock)


@pytest.mark.slow
def test_the_peak_falls_under_synchronised_batch_norm() -> None:
    running = python("import test_doors; test_doors.mirrored_peak()")
    _, errors = running.communicate(timeout=300)
    assert running.returncode == 0, errors


@pytest.mark.slow
@pytest.mark.parametrize("synchronised", [False, True])
def test_replicas_of_a_mirrored_strategy(synchronised: bool) -> None:
    running = python(f"import test_doors; test_doors.mirrored({synchronised})")
    told, errors = running.communicate(timeout=300)
    assert running.returncode == 0, errors
    assert told == "{'tf.GradientTape': 2} {}\n"
