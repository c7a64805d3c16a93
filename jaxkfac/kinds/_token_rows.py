"""Tokens and output rows of an embedding, example by example."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkfac.kinds._both_sides import LowRankMatrices
from jaxkfac.kinds._rows import ArrayOrShape
from jaxkfac.kinds._squares import Basis, rotate_outputs, scaled, squares_by_token

_EXACT = jax.lax.Precision.HIGHEST  # as the gradients that the products are of


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Tokens and output rows of one use of an embedding.

    Attributes:
        tokens: ``(examples, positions)``; with one position each, where examples need not be
            told apart.
        g: ``(examples, positions, features)``.
    """

    tokens: ArrayOrShape
    g: ArrayOrShape

    def squares(self, like: dict[str, Any], basis: Basis) -> dict[str, Any]:
        """Sums of squares in a basis.

        Memory:
            Some copies of the output rows.
        """
        g = rotate_outputs(scaled(self.g, basis), basis, 2)
        return {"squares": squares_by_token(self.tokens, g, like["squares"].shape[0])}

    def gradients(self, like: dict[str, Any]) -> dict[str, Any]:
        """Gradients by example: whole tables."""
        table = like["gradients"]
        examples = jnp.arange(len(self.tokens))[:, None]
        rows = self.g.astype(table.dtype)
        zeros = jnp.zeros(table.shape, table.dtype)
        return {"gradients": zeros.at[examples, self.tokens].add(rows, mode="drop")}

    def scores(
        self, like: dict[str, Any], queries: ArrayOrShape | LowRankMatrices, bias_queries: ArrayOrShape | None
    ) -> dict[str, Any]:
        """Inner products of the queries' tables with the examples' gradients.

        Memory:
            One copy of the output rows: queries go one by one, and no example's table is formed.
        """

        def read(table: ArrayOrShape) -> ArrayOrShape:
            return table.at[self.tokens].get(mode="fill", fill_value=0)

        def one(query: ArrayOrShape | LowRankMatrices) -> ArrayOrShape:
            if not isinstance(query, LowRankMatrices):
                return (read(query) * self.g.astype(query.dtype)).sum((1, 2))
            rows = self.g.astype(query.right.dtype)
            moved = jnp.einsum("nso,ro->nsr", rows, query.right, precision=_EXACT)
            return (read(query.left) * moved).sum((1, 2))

        return {"scores": jax.lax.map(one, queries)}
