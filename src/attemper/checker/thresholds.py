"""The numbers that decide findings, in one place: what each means, its unit, which codes use it, where it comes from.

They can be set in the configuration. Numbers that are facts stay out of it: the largest float16 number, and the peak of 0.99
that "saturated" means (see the statistics).
"""

from dataclasses import dataclass

from attemper.monitor.alarms.thresholds import ALARM_THRESHOLDS
from attemper.thresholds import OURS, Described, Meaning, Threshold, threshold

_SHARE = "share of the rows with two visible keys or more"


@dataclass(frozen=True)
class Thresholds(Described):
    """The thresholds of one check; `THRESHOLDS` says what each means.

    Raises:
        ArgumentError: one of them is not a number in its range.
    """

    scale_exact: float = threshold(
        1e-5,
        Meaning(
            "How far a scale that was read off exactly may lie from the rule's.",
            "relative",
            ("ATT101", "ATT102", "ATT103", "ATT104"),
            "two ways of writing a scale down agree to a few times 2^-24",
            high=0.1,
        ),
    )
    scale_measured: float = threshold(
        0.01,
        Meaning(
            "How far a scale may lie from the rule's where a factor on q or k was measured; up to here a deviation is rounding.",
            "relative",
            ("ATT101", "ATT102", "ATT103", "ATT104"),
            "bfloat16 rounds by up to 0.2 %; the smallest mistake to be told from it, a forgotten mscale^2, is 14 %",
            high=0.1,
        ),
    )
    large_logit: float = threshold(
        100.0,
        Meaning(
            "The logit above which a head is reported.",
            "logit",
            ("ATT202",),
            "QK-clip threshold of Kimi K2, arXiv 2507.20534",
        ),
    )
    offset_share: float = threshold(
        0.5,
        Meaning(
            "A large logit is mostly an offset if no more than this share of it stands above the mean of its row.",
            "share of the logit",
            ("ATT202",),
            OURS,
            high=1.0,
        ),
    )
    sixteen_bit_error: float = threshold(
        0.1,
        Meaning(
            "How much of a row's weight 16-bit logits may put elsewhere before it is reported.",
            "total variation against float64, 0 to 1",
            ("ATT205",),
            OURS + ": logits that are steps of 0.5 apart give up to 0.12",
            high=1.0,
        ),
    )
    eight_bit_error: float = threshold(
        0.25,
        Meaning(
            "How much of a row's weight float8, each tensor scaled to its range, may put elsewhere before it is reported.",
            "total variation against float64, 0 to 1",
            ("ATT206",),
            OURS + ": all heads of all-MiniLM-L6-v2, whose logits reach 76, stay below 0.12",
            high=1.0,
        ),
    )
    fewest_rows: float = threshold(
        8,
        Meaning(
            "Heads with fewer rows than this are not judged by shares of rows.",
            "rows",
            ("ATT301", "ATT302", "ATT303", "ATT304", "ATT305"),
            OURS + ": fewer say nothing about a share",
            low=1,
        ),
    )
    saturated_share: float = threshold(
        0.5,
        Meaning(
            "The share of saturated rows above which a head is saturated.",
            _SHARE,
            ("ATT301",),
            OURS + ": above a half, the head's median row has gain 1 - sum p^2 < 1 - 0.99^2 < 0.02",
            high=1.0,
        ),
    )
    at_rest_rows: float = threshold(
        0.9,
        Meaning(
            "A saturated or dead head is at rest, and no finding, if this share of its rows or more choose the first token.",
            _SHARE,
            ("ATT301", "ATT304"),
            OURS,
            high=1.0,
        ),
    )
    sink_weight: float = threshold(
        0.3,
        Meaning(
            "The mean weight above which one key is a sink.",
            "attention weight, 0 to 1",
            ("ATT302",),
            "arXiv 2410.10781 section 3",
            high=1.0,
        ),
    )
    sink_rows: float = threshold(
        0.5,
        Meaning(
            "The share of rows above which they agree on one strongest key.",
            _SHARE,
            ("ATT302",),
            OURS,
            high=1.0,
        ),
    )
    uniform_entropy: float = threshold(
        0.99,
        Meaning(
            "The mean normalized entropy above which a head is uniform.",
            "entropy / ln(number of visible keys), 0 to 1",
            ("ATT303",),
            OURS + ": logits that differ by a standard deviation of s lack s^2 / (2 ln n), so over 512 keys s is below 0.36",
            high=1.0,
        ),
    )
    dead_gain: float = threshold(
        1e-3,
        Meaning(
            "The gain 1 - sum p^2 below which a row is dead.",
            "gain, 0 to 1",
            ("ATT304",),
            OURS + ": the rounding of the weights in bfloat16, 2^-9, is larger",
            high=1.0,
        ),
    )
    dead_rows: float = threshold(
        0.99,
        Meaning("The share of dead rows from which a head is dead.", _SHARE, ("ATT304",), OURS + ": nearly all rows", high=1.0),
    )
    previous_rows: float = threshold(
        0.9,
        Meaning(
            "The share of rows from which a head whose strongest key is the position before is a previous-token head.",
            _SHARE + ", behind the first",
            ("ATT305",),
            "positional heads in arXiv 1905.09418, section 5.2",
            high=1.0,
        ),
    )
    logit_bound: float = threshold(
        1e4,
        Meaning(
            "The bound on a logit, from the weights alone, above which a head is reported.",
            "logit",
            ("ATT306",),
            "training diverged once the largest logits passed 1e4: arXiv 2309.14322",
        ),
    )
    norm_ratio: float = threshold(
        10.0,
        Meaning(
            "How many times the spectral norm of W_v the geometric mean of those of W_q and W_k may be.",
            "ratio",
            ("ATT307",),
            OURS + ": they start equal, and the logits grow with their square",
        ),
    )
    leak_roundings: float = threshold(
        1.0,
        Meaning(
            "How far an output may move when it should not, as a multiple of sqrt(epsilon) of the largest output.",
            "sqrt(epsilon) of the output's dtype x largest output",
            ("ATT402", "ATT403", "ATT405", "ATT406"),
            OURS + ": rounding alone moves outputs by less",
        ),
    )


THRESHOLDS: tuple[Threshold, ...] = Thresholds.described()
DEFAULTS = Thresholds()


def used_by(code: str) -> tuple[Threshold, ...]:
    """The thresholds that decide findings, or alarms, of one code."""
    return tuple(each for each in (*THRESHOLDS, *ALARM_THRESHOLDS) if code in each.meaning.codes)
