"""The HiGHS solver for mixed-integer programs (extra ``dev``), as far as it is used here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

INFINITY = 1e30  # from 1e20 on HiGHS takes a bound as none

Terms = Sequence[tuple[int, float]]
"""Variable and coefficient."""


class SolverMissing(RuntimeError):
    """highspy is not installed."""


class Solution(NamedTuple):
    values: list[float] | None
    """None if none was found."""
    bound: float
    """The objective is not below this; INFINITY if there is no solution."""
    proven: bool
    """The values are optimal, or it is proven that there are none."""


class Program:
    """Minimise a linear function of variables within bounds, subject to linear rows."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._upper: list[float] = []
        self._rows: list[tuple[float, float, Terms]] = []

    @property
    def size(self) -> int:
        """The number of variables."""
        return len(self._cost)

    def integer(self, upper: float, cost: float = 0.0) -> int:
        """A new variable, an integer from 0 to ``upper``; its number."""
        self._cost.append(cost)
        self._upper.append(upper)
        return len(self._cost) - 1

    def between(self, lower: float, terms: Terms, upper: float) -> None:
        """lower <= sum of the terms <= upper."""
        self._rows.append((lower, upper, terms))

    def at_most(self, terms: Terms, upper: float) -> None:
        self.between(-INFINITY, terms, upper)

    def solve(self, limit_s: float) -> Solution:
        """The best found within ``limit_s`` seconds, on one core.

        Raises SolverMissing; RuntimeError if HiGHS fails.
        """
        try:
            import highspy
        except ImportError as error:
            raise SolverMissing(
                "the exact placement needs highspy: pip install 'robust-slurm[dev]'"
            ) from error
        program = highspy.HighsLp()
        program.num_col_ = len(self._cost)
        program.num_row_ = len(self._rows)
        program.col_cost_ = self._cost
        program.col_lower_ = [0.0] * len(self._cost)
        program.col_upper_ = self._upper
        program.row_lower_ = [lower for lower, _, _ in self._rows]
        program.row_upper_ = [upper for _, upper, _ in self._rows]
        program.integrality_ = [highspy.HighsVarType.kInteger] * len(self._cost)
        starts, which, factors = [0], [], []
        for _, _, terms in self._rows:
            for variable, factor in terms:
                which.append(variable)
                factors.append(float(factor))
            starts.append(len(which))
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_, matrix.index_, matrix.value_ = starts, which, factors
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("time_limit", limit_s)
        if solver.passModel(program) == highspy.HighsStatus.kError:
            raise RuntimeError("HiGHS refused the program")
        solver.run()
        status, info = solver.getModelStatus(), solver.getInfo()
        if status == highspy.HighsModelStatus.kInfeasible:
            return Solution(None, INFINITY, True)
        optimal = status == highspy.HighsModelStatus.kOptimal
        if not optimal and status != highspy.HighsModelStatus.kTimeLimit:
            raise RuntimeError(f"HiGHS ended with {solver.modelStatusToString(status)}")
        feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = list(solver.getSolution().col_value) if feasible else None
        return Solution(values, info.mip_dual_bound, optimal)
