"""What a run hands on: calls with rows, and by name those without any."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attemper


class Pieces(nn.Module):
    """Attention over a piece of its input, and over all of it."""

    def __init__(self, queries: int, keys: int) -> None:
        super().__init__()
        self.queries, self.keys = queries, keys

    def forward(self, x: Tensor) -> Tensor:
        """[batch, heads, tokens, width] to the same."""
        piece = x[:, :, : self.keys]
        F.scaled_dot_product_attention(x[:, :, : self.queries], piece, piece)
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("keys", [0, 1, 29])
def test_a_call_without_queries_is_no_row(keys: int) -> None:
    x = torch.randn(2, 3, 29, 7, generator=torch.Generator().manual_seed(0))
    report = attemper.check(Pieces(0, keys), x)
    assert [(row.call, int(row.stats.rows.sum())) for row in report.rows] == [(1, 2 * 3 * 29)]
    assert report.unseen == (("", "a call of it has no queries, so that there is nothing to see"),)
    assert report.exit_code("info") == 0


def test_nothing_but_calls_without_queries_is_nothing_to_check() -> None:
    class Empty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x[:, :, :0], x, x)

    assert attemper.check(Empty(), torch.randn(2, 3, 29, 7)).exit_code() == 3
