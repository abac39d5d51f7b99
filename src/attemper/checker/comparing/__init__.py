"""`compare`: runs one set of weights in two ways and says where their attention parts first, by which factor, and why.

sides      the two models; run: A keeping each call's q, k, v, rule and output (memory linear in the length), then B
pairing    which call belongs to which; kept: calls that outlive the forward pass
rounding   what rounding alone does to the model, measured; gaps: what is apart beyond it
explain    why two calls part: visibility, scaling, position, weights
records    what is found; verdict: what is returned; text: how it reads
"""

from attemper.checker.comparing.records import PairRow, Parting
from attemper.checker.comparing.run import compare
from attemper.checker.comparing.verdict import Comparison

__all__ = ["Comparison", "PairRow", "Parting", "compare"]
