"""`compare`: runs one set of weights in two ways and says where their attention parts first, by which factor, and why.

    run        loads both, runs A keeping each call's q, k, v, rule and output (memory linear in the length), then B
    pairing    which call belongs to which
    rounding   what rounding alone does to the model, measured; gaps: what is apart beyond it
    applied    the rule that a call really applied, judged by its output
    explain    why they part: visibility, scaling, position, weights
    verdict    what is returned; text: how it reads
"""

from attemper.checker.comparing.run import compare
from attemper.checker.comparing.verdict import Comparison, PairRow, Parting

__all__ = ["Comparison", "PairRow", "Parting", "compare"]
