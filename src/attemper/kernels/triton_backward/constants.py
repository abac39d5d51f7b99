"""What every logit's gradient of a row has in common, before anything walks over the keys."""

import triton
import triton.language as tl

from attemper.kernels.triton_common import load_rows, offsets_of
from attemper.kernels.triton_problem import UNSPECIALIZED


@triton.jit(do_not_specialize=UNSPECIALIZED)
def row_constants(output, d_output, d_lse, constant, flow_batch, flow_head, flow_row, flow_column, heads, queries,
                  VALUE_WIDTH: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """constant = the gradient of lse − Σ o·do, [batch, heads, queries].

    output: [batch, heads, queries, VALUE_WIDTH], unrounded; d_output: like it; both None where nothing flows into the output.
    d_lse: [batch, heads, queries] or None.
    """
    blocks = tl.cdiv(queries, BLOCK_M)
    plane = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < queries
    # In float64: where the weights are sharp, Σ o·do is nearly the opposite of what a key adds to it.
    sums = tl.zeros([BLOCK_M], tl.float64)
    if d_output is not None:
        o = load_rows(output, (plane * queries + row) * VALUE_WIDTH, 1, inside, VALUE_WIDTH, BLOCK_V)
        flow_offsets = offsets_of(plane // heads, plane % heads, row, flow_batch, flow_head, flow_row)
        flow = load_rows(d_output, flow_offsets, flow_column, inside, VALUE_WIDTH, BLOCK_V)
        sums -= tl.sum(o.to(tl.float64) * flow.to(tl.float64), 1)
    if d_lse is not None:
        sums += tl.load(d_lse + plane * queries + row, mask=inside, other=0.0).to(tl.float64)
    tl.store(constant + plane * queries + row, sums.to(tl.float32), mask=inside)
