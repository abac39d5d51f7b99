"""Which topics there are, which statements stand under each, and with which verdict: the same in every language."""

from dataclasses import dataclass

from attemper.errors import ArgumentError

LANGUAGES = ("en", "zh")
PARTS = ("answer", "derivation", "measurement", "follow-ups", "claims", "testing", "voices", "reading")
VOICES = ("large-models", "recurrent", "mathematics")
RIGHT, PARTLY, WRONG = "right", "partly", "wrong"


@dataclass(frozen=True)
class Topic:
    """A topic.

    Attributes:
        name: how the command calls it.
        claims: the verdict on each statement that circulates, by the statement's name.
        x_log, y_log: whether the picture's axes are logarithmic.
    """

    name: str
    claims: dict[str, str]
    x_log: bool = True
    y_log: bool = True


TOPICS = {
    topic.name: topic
    for topic in (
        Topic("why-sqrt-d", {"variance-is-d": PARTLY, "paper-on-the-variance": WRONG}),
        Topic("softmax-jacobian", {"gradients-vanish": PARTLY}),
        Topic("why-not-d", {"divide-by-d": PARTLY}, y_log=False),
        Topic("additive-or-dot", {"additive-needs-none": PARTLY, "additive-costs-more": WRONG}),
        Topic(
            "sixteen-bit",
            {
                "overflow-is-a-symptom": PARTLY,
                "forty-overflows": WRONG,
                "flash-is-about-stability": WRONG,
                "safe-softmax": RIGHT,
            },
        ),
        Topic("qk-norm", {"layernorm-cannot": PARTLY}),
        Topic("learned-temperature", {"temperature-is-learnable": RIGHT, "per-head-brings-little": PARTLY}),
        Topic("rope-yarn", {"rope-keeps-norms": RIGHT}, y_log=False),
        Topic("many-heads", {"heads-share": RIGHT, "module-has-a-scale": WRONG}),
        Topic("width-one", {"one-needs-none": RIGHT}, x_log=False),
        Topic("initialisation", {"xavier-gives-one": PARTLY, "t5-divides": WRONG}),
        Topic("during-training", {"large-means-saturated": WRONG}, x_log=False),
    )
}


def check_topic(name: str) -> str:
    """The name of a topic.

    Raises:
        ArgumentError: there is no such topic; the message lists those that there are.
    """
    if name not in TOPICS:
        raise ArgumentError("TOPIC", repr(name), f"one of {', '.join(TOPICS)}")
    return name
