"""Step time as a linear function of a step's size, fitted while the engine serves.

    seconds = base + per_token * tokens + per_sequence * sequences + per_context * context tokens

Recursive least squares with forgetting, in information form: sums of products decay with every step, and the solution
is computed when it is read. Steps that compute prompts and steps that only decode have separate sums, so that hours of
decoding do not displace the few prompt steps, which determine `per_token`. Coefficients are not negative.
"""

import math
from collections.abc import Sequence

from trimtab_router.protocol.messages import Coefficients

MEMORY_STEPS = 1000
"""Steps of each kind over which the fit averages."""
MIN_STEPS, MIN_PROMPT_STEPS = 16, 4
"""Steps before there is a fit: decode steps alone have as many tokens as sequences."""
MAX_OUTLIER_RATIO = 10.0
"""Steps that take this many times longer than predicted are not steps as usual: something was compiled or paged in."""
SCALES = (1.0, 1e-3, 1e-2, 1e-5)
"""Factors that bring the size of steps near 1."""
RIDGE = 1e-6
RESIDUAL_WEIGHT = 0.02
DECAY = 1.0 - 1.0 / MEMORY_STEPS

Vector = list[float]


class _Sums:
    """Decayed sums of products of one kind of steps. Each step counts by the inverse square of its time: the fit
    minimizes relative errors.
    """

    def __init__(self) -> None:
        self.products = [0.0] * 10  # upper triangle of the 4 x 4 matrix, by rows
        self.targets = [0.0] * 4
        self.num_steps = 0

    def add(self, x: Vector, seconds: float) -> None:
        weight = 1.0 / (seconds * seconds)
        x0, x1, x2, x3 = x
        w1, w2, w3, y = x1 * weight, x2 * weight, x3 * weight, 1.0 / seconds
        p, t = self.products, self.targets
        self.products = [
            p[0] * DECAY + weight * x0,
            p[1] * DECAY + w1,
            p[2] * DECAY + w2,
            p[3] * DECAY + w3,
            p[4] * DECAY + w1 * x1,
            p[5] * DECAY + w1 * x2,
            p[6] * DECAY + w1 * x3,
            p[7] * DECAY + w2 * x2,
            p[8] * DECAY + w2 * x3,
            p[9] * DECAY + w3 * x3,
        ]
        self.targets = [t[0] * DECAY + y, t[1] * DECAY + y * x1, t[2] * DECAY + y * x2, t[3] * DECAY + y * x3]
        self.num_steps += 1


class StepTimeFit:
    """The fit of one core."""

    def __init__(self) -> None:
        self._prompt, self._decode = _Sums(), _Sums()
        self._solution: Vector | None = None
        self._residual = 0.0

    def add(self, *, tokens: int, sequences: int, context: int, seconds: float, computes_prompts: bool) -> None:
        """Take in one completed step."""
        if not sequences or not 0 < seconds < math.inf:
            return
        x = [1.0, tokens * SCALES[1], sequences * SCALES[2], context * SCALES[3]]
        if self._solution is not None:
            predicted = sum(map(float.__mul__, self._solution, x))
            if seconds > MAX_OUTLIER_RATIO * predicted:
                return
            self._residual += RESIDUAL_WEIGHT * (abs(predicted - seconds) / seconds - self._residual)
        (self._prompt if computes_prompts else self._decode).add(x, seconds)

    def coefficients(self) -> Coefficients | None:
        """Return the fit of the steps so far, or None while there are too few."""
        samples = self._prompt.num_steps + self._decode.num_steps
        if samples < MIN_STEPS or self._prompt.num_steps < MIN_PROMPT_STEPS:
            return None
        products = list(map(float.__add__, self._prompt.products, self._decode.products))
        targets = list(map(float.__add__, self._prompt.targets, self._decode.targets))
        self._solution = _solve_not_negative(_square(products), targets)
        base, per_token, per_sequence, per_context = (
            coefficient * scale for coefficient, scale in zip(self._solution, SCALES, strict=True)
        )
        return Coefficients(base, per_token, per_sequence, per_context, self._residual, samples)

    def predict(self, *, tokens: int, sequences: int, context: int) -> float:
        """Return the predicted seconds of a step, by the fit that coefficients() has last returned; 0 without one."""
        if self._solution is None:
            return 0.0
        base, per_token, per_sequence, per_context = self._solution
        return (
            base
            + per_token * tokens * SCALES[1]
            + per_sequence * sequences * SCALES[2]
            + per_context * context * SCALES[3]
        )


def _square(upper: Sequence[float]) -> list[Vector]:
    a, b, c, d, e, f, g, h, i, j = upper
    return [[a, b, c, d], [b, e, f, g], [c, f, h, i], [d, g, i, j]]


def _solve_not_negative(matrix: list[Vector], targets: Vector) -> Vector:
    """Return the least-squares solution in which coefficients that would be negative are 0."""
    active = [0, 1, 2, 3]
    while active:
        rows = [[matrix[i][j] + (RIDGE * matrix[i][i] + 1e-12 if i == j else 0.0) for j in active] for i in active]
        found = _eliminate(rows, [targets[i] for i in active])
        lowest = min(range(len(active)), key=lambda place: found[place])
        if found[lowest] >= 0.0:
            values = dict(zip(active, found, strict=True))
            return [values.get(i, 0.0) for i in range(4)]
        del active[lowest]
    return [0.0] * 4


def _eliminate(rows: list[Vector], targets: Vector) -> Vector:
    """Solve a positive definite system by Gaussian elimination."""
    size = len(rows)
    rows = [[*row, target] for row, target in zip(rows, targets, strict=True)]
    for column in range(size):
        for below in range(column + 1, size):
            factor = rows[below][column] / rows[column][column]
            rows[below] = [low - factor * high for low, high in zip(rows[below], rows[column], strict=True)]
    solution = [0.0] * size
    for row in range(size - 1, -1, -1):
        known = sum(rows[row][column] * solution[column] for column in range(row + 1, size))
        solution[row] = (rows[row][size] - known) / rows[row][row]
    return solution
