"""Bayesian linear regression, one row at a time: a Gaussian over coefficients, as mean and covariance.

Small matrices are tuples of rows: six coefficients need no library. A row says `y = Σ xᵢ·θᵢ + noise`; after it

    gain = P·x / (xᵀ·P·x + sd²)      mean += gain·(y − xᵀ·mean)      P −= gain·(P·x)ᵀ
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Vector = tuple[float, ...]
Matrix = tuple[Vector, ...]


@dataclass(frozen=True, slots=True)
class Gaussian:
    """Belief about a vector of coefficients."""

    mean: Vector
    covariance: Matrix

    @classmethod
    def prior(
        cls, mean: Sequence[float], *, scale: Sequence[float], own_sd: Sequence[float], common_sd: float
    ) -> Gaussian:
        """Return a belief in which each coefficient is uncertain by its `own_sd`, and all jointly by `common_sd` (a
        wrong clock speed), both as multiples of the coefficient's `scale`.
        """
        covariance = tuple(
            tuple(common_sd**2 * one * other + ((own * one) ** 2 if i == j else 0.0) for j, other in enumerate(scale))
            for i, (one, own) in enumerate(zip(scale, own_sd, strict=True))
        )
        return cls(tuple(mean), covariance)

    def predict(self, x: Vector) -> tuple[float, float]:
        """Return mean and standard deviation of `Σ xᵢ·θᵢ`, without the noise of a row."""
        spread = _dot(x, self._times(x))
        return _dot(x, self.mean), math.sqrt(max(0.0, spread))

    def update(self, x: Vector, y: float, *, sd: float) -> Gaussian:
        """Return the belief after one more row with noise of this standard deviation."""
        px = self._times(x)
        scale = _dot(x, px) + sd * sd
        if scale <= 0 or not math.isfinite(scale):
            return self
        error = y - _dot(x, self.mean)
        mean = tuple(m + p * error / scale for m, p in zip(self.mean, px, strict=True))
        covariance = tuple(
            tuple(entry - a * b / scale for entry, b in zip(row, px, strict=True))
            for row, a in zip(self.covariance, px, strict=True)
        )
        return Gaussian(mean, _symmetric(covariance))

    def sd(self, index: int) -> float:
        """Return the standard deviation of one coefficient."""
        return math.sqrt(max(0.0, self.covariance[index][index]))

    def _times(self, x: Vector) -> Vector:
        return tuple(_dot(row, x) for row in self.covariance)


def _dot(one: Vector, other: Vector) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _symmetric(matrix: Matrix) -> Matrix:
    """Return the matrix made symmetric with non-negative variances: rounding makes the halves drift apart."""
    size = len(matrix)
    return tuple(
        tuple(max(0.0, matrix[i][i]) if i == j else (matrix[i][j] + matrix[j][i]) / 2 for j in range(size))
        for i in range(size)
    )
