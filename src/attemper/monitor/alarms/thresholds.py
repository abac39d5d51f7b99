"""The numbers that decide alarms."""

from dataclasses import dataclass

from attemper.errors import ArgumentError
from attemper.thresholds import OURS, Described, Meaning, Threshold, threshold

_LOGIT = "|scale·q·k|"


@dataclass(frozen=True)
class AlarmThresholds(Described):
    """The thresholds of the alarms of one run; `ALARM_THRESHOLDS` says what each means.

    Raises:
        ArgumentError: one of them is not a number in its range, or the three sizes of a logit do not rise.
    """

    alarming_logit: float = threshold(
        100.0,
        Meaning(
            "The largest |scale·q·k| of a head above which there is a warning.",
            _LOGIT,
            ("ATT501",),
            "the threshold of QK-clip in Kimi K2, arXiv 2507.20534",
        ),
    )
    hurting_logit: float = threshold(
        1e3,
        Meaning(
            "The largest |scale·q·k| of a head above which there is an error.",
            _LOGIT,
            ("ATT502", "ATT504"),
            "training that was forced to logits of about 1e3 got worse: arXiv 2309.14322",
        ),
    )
    diverging_logit: float = threshold(
        1e4,
        Meaning(
            "The largest |scale·q·k| of a head above which a run is held to be lost.",
            _LOGIT,
            ("ATT503", "ATT504"),
            "every run whose largest logit passed 1e4 diverged: arXiv 2309.14322",
        ),
    )
    growth_floor: float = threshold(
        50.0,
        Meaning(
            "The largest |scale·q·k| of a head below which its growth is no matter.",
            _LOGIT,
            ("ATT504",),
            OURS + ": logits grow fast, and soundly, from where an initialisation puts them",
        ),
    )
    growth_horizon: float = threshold(
        1000,
        Meaning(
            "Growth is told if it leads to the next size of logit within this many steps.",
            "steps",
            ("ATT504",),
            OURS,
            low=1,
        ),
    )
    growth_certainty: float = threshold(
        6.0,
        Meaning(
            "How many standard errors the slope of log2 max |scale·q·k| must lie above zero.",
            "standard errors",
            ("ATT504",),
            OURS + ": noise without a trend reaches it in 1 of 400 000 windows (24 points, Student's t)",
        ),
    )
    collapsed_entropy: float = threshold(
        0.05,
        Meaning(
            "The normalized entropy, averaged over a layer's heads, below which attention has collapsed.",
            "entropy / ln(number of visible keys), 0 to 1",
            ("ATT505",),
            OURS + "; that collapse to 0 precedes divergence: arXiv 2303.06296",
            high=1.0,
        ),
    )
    collapsed_gain: float = threshold(
        0.02,
        Meaning(
            "The mean gain 1 - sum p^2 below which a head has collapsed.",
            "gain, 0 to 1",
            ("ATT506",),
            OURS + ": a row whose largest weight is 0.99 has 0.02 at most",
            high=1.0,
        ),
    )
    collapsed_heads: float = threshold(
        0.9,
        Meaning(
            "The share of a layer's heads that must have collapsed.",
            "share of heads",
            ("ATT506",),
            OURS + ": one sharp head is often what was learned; all heads of a layer are not",
            high=1.0,
        ),
    )
    collapse_fall: float = threshold(
        4.0,
        Meaning(
            "How many times lower than their highest value in the run entropy or gain must have fallen.",
            "ratio",
            ("ATT505", "ATT506"),
            OURS + ": where they were low from the beginning nothing collapsed",
            low=1.0,
        ),
    )
    collapse_records: float = threshold(
        3,
        Meaning(
            "For how many logged steps in a row entropy or gain must be that low.",
            "logged steps",
            ("ATT505", "ATT506"),
            OURS + ": one odd batch is no collapse",
            low=1,
        ),
    )
    norm_growth: float = threshold(
        4.0,
        Meaning(
            "How many times sqrt(|W_q| |W_k|) / |W_v| may grow beyond its value at the first logged step.",
            "ratio of Frobenius norms",
            ("ATT508",),
            OURS + ": they start alike, and the logits grow with the square, here 16 times",
            low=1.0,
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (self.alarming_logit, self.hurting_logit, self.diverging_logit)
        if not sizes[0] < sizes[1] < sizes[2]:
            given = ", ".join(f"{size:g}" for size in sizes)
            raise ArgumentError("thresholds", given, "alarming-logit < hurting-logit < diverging-logit")


ALARM_THRESHOLDS: tuple[Threshold, ...] = AlarmThresholds.described()
