"""What stands around the topics in each language: headings, verdicts, the page's own words."""

from collections.abc import Mapping
from dataclasses import dataclass

from attemper.report.lessons import Wording


@dataclass(frozen=True)
class Headings:
    """The headings of the parts and the names of the voices, by key."""

    parts: Mapping[str, str]
    voices: Mapping[str, str]


HEADINGS = {
    "en": Headings(
        {
            "answer": "The answer in half a minute",
            "derivation": "The derivation",
            "measurement": "Measured on this machine",
            "follow-ups": "What is asked next",
            "claims": "What people say, and what is so",
            "testing": "What the question is really testing",
            "voices": "Telling it from your own experience",
            "reading": "Where to read more",
        },
        {
            "large-models": "If you have trained large models",
            "recurrent": "If you come from recurrent networks",
            "mathematics": "If you have only the mathematics",
        },
    ),
    "zh": Headings(
        {
            "answer": "半分钟回答",
            "derivation": "推导",
            "measurement": "在本机上测得",
            "follow-ups": "接下来会被追问什么",
            "claims": "常见说法，对在哪里、错在哪里",
            "testing": "这个问题真正在考什么",
            "voices": "怎样结合自己的经历来讲",
            "reading": "延伸阅读",
        },
        {
            "large-models": "如果你训练过大模型",
            "recurrent": "如果你是从循环网络做起的",
            "mathematics": "如果你只有数学",
        },
    ),
}

WORDINGS = {
    "en": Wording(
        language="en",
        title="Scaling attention, measured",
        lead="Why attention divides by √d, and everything that gets asked after that. Each number was measured on the machine "
        "that made this page; ± is how far a measurement with other random seeds may differ, ×÷ by what factor. "
        "d is the width of one head (d_k), n the number of keys, u = q·k a product, z a logit, p a weight.",
        contents="Questions",
        as_table="This picture as a table",
        no_scripts="The picture needs JavaScript; the table below it does not.",
        made="measured in {seconds} s",
        dark="Dark",
        light="Light",
        switch="switch between light and dark",
        verdicts={"right": "right", "partly": "partly right", "wrong": "wrong"},
    ),
    "zh": Wording(
        language="zh",
        title="注意力的缩放，逐条实测",
        lead="注意力为什么要除以 √d，以及由此引出的一连串追问。页面上的每个数都是生成本页的这台机器当场测出来的；"
        "± 表示换一批随机种子重测时允许的偏差，×÷ 表示允许相差的倍数。"
        "d 指单个头的宽度（即 d_k），n 是键的个数，u = q·k 是点积，z 是 logit，p 是权重。",
        contents="问题目录",
        as_table="用表格看这张图",
        no_scripts="图需要 JavaScript；下面的表格不需要。",
        made="测量用时 {seconds} 秒",
        dark="深色",
        light="浅色",
        switch="切换浅色与深色",
        verdicts={"right": "对", "partly": "对一半", "wrong": "错"},
    ),
}
