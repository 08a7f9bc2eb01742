"""The programme of the exact planner: one stage for each backward op.

See `optimal` for the model; the items are those of its docstring.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from memory_saving_gradients.planners.problem import Problem
from memory_saving_gradients.planners.program import Program
from memory_saving_gradients.planners.reruns import Reruns
from memory_saving_gradients.schedule import Step

__all__ = ["Runs", "Stages"]

_BUDGET = 1000.0
"""The budget in the programme's unit of memory: near 1 is where solvers are exact."""

Runs = Literal["once", "often"]

Terms = list[tuple[int, float]]
"""Variables and their coefficients."""


class Stages:
    """The programme of one problem and budget."""

    def __init__(self, problem: Problem, budget_bytes: int, runs: Runs) -> None:
        self.problem = problem
        self.program = Program()
        self._ops = Reruns(problem)
        self._once = runs == "once"
        self._unit = _BUDGET / budget_bytes
        self._slots = range(len(problem.buffers.backward))
        # By slot and position, and by slot and tensor.
        self._again: dict[tuple[int, int], int] = {}
        self._held: dict[tuple[int, int], int] = {}
        for slot in self._slots:
            self._add_variables(slot)
        for slot in self._slots:
            self._demand_inputs(slot)
        if self._once:
            self._demand_once()
        self._forward_memory()
        for slot in self._slots:
            self._backward_memory(slot)

    def _add_variables(self, slot: int) -> None:
        """Item 1. What is of no use any more has no variable."""
        ops, buffers = self._ops, self.problem.buffers
        for tensor in ops.maker:
            if tensor in buffers.endless:
                self._held[slot, tensor] = self.program.variable(low=1.0)
            elif slot <= ops.last_use.get(tensor, -1) and (
                slot or tensor in ops.carried
            ):
                self._held[slot, tensor] = self.program.variable(whole=True)
        for position in ops.useful:
            if slot <= ops.last_run.get(position, -1) and not (
                self._once and position not in ops.needs[slot]
            ):
                again = self._again[slot, position] = self.program.variable(whole=True)
                op = buffers.graph.ops[buffers.forward[position]]
                self.program.pay(again, op.seconds)

    def _copies(self, slot: int, tensor: int, sign: float) -> Terms:
        """Whether a copy of the tensor is made in a stage."""
        again = self._again.get((slot, self._ops.maker[tensor]))
        copied = again is not None and tensor in self._ops.copied
        return [(again, sign)] if again is not None and copied else []

    def _holds(self, slot: int, tensor: int, sign: float) -> Terms:
        """Whether the tensor is carried into a stage."""
        held = self._held.get((slot, tensor))
        return [] if held is None else [(held, sign)]

    def _demand_inputs(self, slot: int) -> None:
        """Item 2."""
        ops = self._ops
        for tensor in ops.late_reads[slot]:
            self._demand(slot, tensor, [], 1.0)
        for position in ops.useful:
            if (slot, position) in self._again:
                again = self._again[slot, position]
                for tensor in ops.reads[position]:
                    self._demand(slot, tensor, [(again, -1.0)], 0.0)
        for tensor in ops.maker:
            if (slot + 1, tensor) in self._held:
                carried = self._held[slot + 1, tensor]
                self._demand(slot, tensor, [(carried, -1.0)], 0.0)

    def _demand(self, slot: int, tensor: int, terms: Terms, least: float) -> None:
        """Demands a tensor in a stage; `once`, an original if it was carried there."""
        held = self._holds(slot, tensor, 1.0)
        copies = self._copies(slot, tensor, 1.0)
        self.program.row([*terms, *held, *copies], low=least)
        if self._once and copies and self._several(tensor):
            kept = self._holds(0, tensor, -1.0)
            self.program.row([*terms, *held, *kept], low=least - 1.0)

    def _several(self, tensor: int) -> bool:
        """Whether the tensor's op makes others, too, of which some may be kept."""
        return len(self._ops.made[self._ops.maker[tensor]]) > 1

    def _demand_once(self) -> None:
        """Item 5."""
        ops, program = self._ops, self.program
        for position in sorted(ops.again):
            copies = [
                (self._again[slot, position], 1.0)
                for slot in self._slots
                if (slot, position) in self._again
            ]
            alone = len(ops.made[position]) == 1
            kept = self._holds(0, ops.made[position][0], 1.0) if alone else []
            program.row([*copies, *kept], high=1.0)
        for (slot, position), again in self._again.items():
            wants = [
                (want, -1.0)
                for tensor in ops.made[position]
                if tensor in ops.copied
                for want in self._wants(slot, tensor)
            ]
            program.row([(again, 1.0), *wants], high=0.0)

    def _wants(self, slot: int, tensor: int) -> list[int]:
        """What is at least 1 if the stage reads a copy of the tensor."""
        ops, program = self._ops, self.program
        wants = [
            self._again[slot, reader]
            for reader in ops.readers[tensor]
            if (slot, reader) in self._again
        ]
        late = tensor in ops.late_reads[slot]
        if not self._several(tensor):
            return [*wants, *([program.variable(low=1.0)] if late else [])]
        copy_read = program.variable()
        program.row([(copy_read, 1.0), *self._holds(0, tensor, 1.0)], high=1.0)
        if not late:
            program.row([(copy_read, 1.0), *((w, -1.0) for w in wants)], high=0.0)
        return [copy_read]

    def _forward_memory(self) -> None:
        """Item 4 for the forward pass: a buffer that nobody carries out of it dies
        with its last reader there."""
        ops, buffers = self._ops, self.problem.buffers
        fixed = ops.others
        carried: list[tuple[int, float]] = []
        alive: dict[int, int] = {}
        for position, op in enumerate(buffers.forward):
            made = buffers.makes[op]
            live = int(fixed[position]) + sum(buffers.size[t] for t in (*alive, *made))
            dying = {t for t, last in alive.items() if last == position}
            spare = self._forward_spare(op, position, dying)
            self._limit([*carried, *spare], live)
            alive.update({t: ops.last_read(t) for t in made if t in ops.maker})
            for tensor in [t for t, last in alive.items() if last <= position]:
                del alive[tensor]
                carried.extend(self._holds(0, tensor, float(buffers.size[tensor])))

    def _forward_spare(self, op: int, position: int, dying: set[int]) -> Terms:
        """What an op that works in place takes over from an input that dies."""
        ops, buffers = self._ops, self.problem.buffers
        wanted = ops.wanted(op)
        if wanted is None:
            return []
        reads = [t for t in buffers.reads[op] if buffers.size[t] == wanted]
        if any(
            t not in ops.maker
            and t not in buffers.endless
            and buffers.forward_readers[t][-1] == position
            for t in reads
        ):
            return [(self.program.variable(1.0, 1.0), -float(wanted))]
        taken = [t for t in reads if t in dying]
        spare = self.program.variable()
        held = [term for t in taken for term in self._holds(0, t, 1.0)]
        self.program.row([(spare, 1.0), *held], high=float(len(taken)))
        return [(spare, -float(wanted))]

    def _limit(self, terms: Terms, fixed_bytes: int) -> None:
        """Demands that so much is under the budget."""
        scaled = [(variable, value * self._unit) for variable, value in terms]
        self.program.row(scaled, high=_BUDGET - fixed_bytes * self._unit)

    def _backward_memory(self, slot: int) -> None:
        """Items 3 and 4 for a stage."""
        ops, buffers = self._ops, self.problem.buffers
        fixed = int(ops.gradients[slot])
        live = self.program.variable(0.0, _BUDGET)
        start = [
            term
            for tensor in ops.maker
            for term in self._holds(slot, tensor, -buffers.size[tensor] * self._unit)
        ]
        # `live` is what forward ops made; the gradients are known numbers.
        self.program.row([(live, 1.0), *start], low=0.0, high=0.0)
        for position in ops.useful:
            if (slot, position) in self._again:
                live = self._copy_memory(slot, position, live, fixed)
        op = buffers.backward[slot]
        made = sum(buffers.size[t] for t in buffers.makes[op])
        spare: Terms = []
        wanted = ops.wanted(op)
        if wanted is not None and ops.gradient_dies(slot):
            made -= wanted
        elif wanted is not None:
            deaths = [
                self._dies(slot, tensor, None)
                for tensor in ops.late_reads[slot]
                if buffers.size[tensor] == wanted and tensor not in buffers.endless
            ]
            spare = self._spare(deaths, float(wanted))
        self._limit([(live, 1.0 / self._unit), *spare], fixed + made)

    def _copy_memory(self, slot: int, position: int, live: int, fixed: int) -> int:
        """The memory while a copy may run; returns what is alive after it."""
        ops, size = self._ops, self.problem.buffers.size
        op = self.problem.buffers.forward[position]
        again, made = self._again[slot, position], ops.made[position]
        total = float(sum(size[tensor] for tensor in made))
        deaths = {
            tensor: self._dies(slot, tensor, position)
            for tensor in ops.reads[position]
            if tensor not in self.problem.buffers.endless
        }
        wanted = ops.wanted(op)
        spare: Terms = []
        if wanted is not None:
            fitting = [death for t, death in deaths.items() if size[t] == wanted]
            spare = self._spare(fitting, float(wanted))
        self._limit([(live, 1.0 / self._unit), (again, total), *spare], fixed)
        after = self.program.variable(0.0, _BUDGET)
        freed = [(death, float(size[t])) for t, death in deaths.items()]
        freed += self._idle_copies(slot, position)
        self.program.row(
            [
                (after, 1.0),
                (live, -1.0),
                (again, -total * self._unit),
                *((variable, value * self._unit) for variable, value in freed),
            ],
            low=0.0,
            high=0.0,
        )
        return after

    def _idle_copies(self, slot: int, position: int) -> Terms:
        """Outputs of a copy that nobody reads and that are therefore freed at once:
        beside a kept original, or because no later step wants them."""
        program, made = self.program, self._ops.made[position]
        again = self._again[slot, position]
        freed: Terms = []
        for tensor in made if len(made) > 1 else ():
            beside = program.variable()
            held = self._holds(slot, tensor, -1.0)
            program.row([(beside, 1.0), (again, -1.0)], high=0.0)
            program.row([(beside, 1.0), *held], high=0.0)
            unread = self._dies(slot, tensor, position)
            program.row([(beside, 1.0), (unread, 1.0), (again, -1.0)], high=0.0)
            size = float(self.problem.buffers.size[tensor])
            freed += [(beside, size), (unread, size)]
        return freed

    def _dies(self, slot: int, tensor: int, position: int | None) -> int:
        """Item 3; without a position, for the stage's backward op."""
        program = self.program
        outlived = position is not None and tensor in self._ops.late_reads[slot]
        dies = program.variable(high=0.0 if outlived else 1.0)
        others = self._holds(slot + 1, tensor, 1.0)
        if position is not None:
            program.row([(dies, 1.0), (self._again[slot, position], -1.0)], high=0.0)
            others += [
                (self._again[slot, reader], 1.0)
                for reader in self._ops.readers[tensor]
                if reader > position and (slot, reader) in self._again
            ]
        for other in others:
            program.row([(dies, 1.0), other], high=1.0)
        return dies

    def _spare(self, deaths: list[int], wanted: float) -> Terms:
        """The buffer that is taken over if one of these deaths occurs."""
        if not deaths:
            return []
        spare = self.program.variable()
        self.program.row([(spare, 1.0), *((d, -1.0) for d in deaths)], high=0.0)
        return [(spare, -wanted)]

    # -- from numbers to a plan ----------------------------------------------------

    def steps(self, values: NDArray[np.float64]) -> tuple[Step, ...]:
        """The backward pass that a solution stands for."""
        buffers = self.problem.buffers
        found = []
        for slot in self._slots:
            for position in self._ops.useful:
                again = self._again.get((slot, position))
                if again is not None and values[again] > 0.5:
                    found.append(Step(buffers.forward[position], copy=True))
            found.append(Step(buffers.backward[slot]))
        return tuple(found)

    def kept(self, values: NDArray[np.float64]) -> frozenset[int]:
        """The tensors that are carried out of the forward pass."""
        carried = (
            tensor
            for tensor in self._ops.copied
            if (0, tensor) in self._held and values[self._held[0, tensor]] > 0.5
        )
        return self.problem.always_kept.union(carried)
