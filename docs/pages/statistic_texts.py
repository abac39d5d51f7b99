"""What the page of each statistic says in words: one entry for each field of `RowStats` and each figure derived from it.

tests/docs/test_statistics.py holds the table to the code: nothing is missing, nothing is here that is not there.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Statistic:
    """One statistic of a row, in words.

    Attributes:
        name: the attribute or method of `RowStats`.
        definition: what it is, in a sentence.
        formula: in LaTeX, with z for logits, p for weights, u for products, n for the number of visible keys.
        range: which values it may have, in MyST.
        uniform: its value where n logits are all c; one_hot: as one logit rises far above the others; both in MyST.
        sink: what a sink does to it.
        reading: how to read it, in MyST.
        lines: Python that prints something of `rows`, a record of 8 heads and 512 queries.
        codes: findings and alarms that stand on it.
        heads: the attributes of `HeadStats` that sum it up; figures: what the tables of a watched run call it.
        picture: how its mean over rows is drawn over the standard deviation of the logits; "" where that says nothing.
        argument: what is passed to a method that takes something, as code.
    """

    name: str
    definition: str
    formula: str
    range: str
    uniform: str
    one_hot: str
    sink: str
    reading: str
    lines: str
    codes: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    picture: Literal["linear", "log", ""] = "linear"
    argument: str = ""


_NOT_COUNTED = "It does not count."

STATISTICS: tuple[Statistic, ...] = (
    Statistic(
        name="count",
        definition="How many keys are visible to the query: those that the mask, the causal rule and the window all let through.",
        formula=r"n = \text{number of visible keys}",
        range="whole numbers from 0 to the number of keys",
        uniform="n",
        one_hot="n",
        sink=_NOT_COUNTED,
        reading=(
            "0 is a row that nothing can attend to: its output is 0, its gradient is 0, and it is left out of every mean. 1 is "
            "a row without a choice, such as the first one under the causal rule: its weight is 1 whatever the logits are, so "
            "it is left out of normalized entropy and of the share of saturated rows. A real token with an empty row is a "
            "fault of the mask."
        ),
        lines="print(rows.count[0, 0, :4].tolist(), (rows.count == 0).sum().item())",
        codes=("ATT401",),
        heads=("rows", "empty_rows", "softmax_rows"),
        figures=("rows", "empty_rows"),
        picture="",
    ),
    Statistic(
        name="max",
        definition="The largest logit of the row: exact, never a running bound of the kernel.",
        formula=r"\max_j z_j",
        range="any number",
        uniform="c",
        one_hot="as large as that logit",
        sink=_NOT_COUNTED,
        reading=(
            "Two different things make it large. Either one key stands out, and then [centred_max](centred_max.md) is large "
            "too; or the whole row is shifted by an offset, which the softmax ignores, and which only costs digits in 16 bits. "
            "Over 1024 keys whose logits are normal with standard deviation σ it is 3.2 σ on average, and for n keys never "
            "more than σ√(2 ln n) on average. In training its course tells more than its size: logits that double and double "
            "again come before divergence."
        ),
        lines="print(rows.max.amax(dim=(0, 2)))  # of each head",
        codes=("ATT202",),
        heads=("max",),
        figures=("max_logit",),
        picture="log",
    ),
    Statistic(
        name="min",
        definition="The smallest logit of the row.",
        formula=r"\min_j z_j",
        range="any number, at most `max`",
        uniform="c",
        one_hot="of the other keys",
        sink=_NOT_COUNTED,
        reading=(
            "Seldom of interest by itself: a key with a very small logit gets no weight, and that is all. Far below the rest "
            "it points to a bias by position (ALiBi goes to −1000 and below on purpose), or to a mask that is written as a "
            "large negative number which attemper did not take for one. With `max` it gives the spread that a 16-bit format "
            "must hold."
        ),
        lines="print((rows.max - rows.min).amax())  # the widest row",
        heads=("min",),
        figures=("min_logit",),
    ),
    Statistic(
        name="argmax",
        definition="Which key has the largest logit; the first of them on a tie.",
        formula=r"\operatorname{argmax}_j z_j",
        range="whole numbers from 0 to the number of keys less 1; −1 for an empty row",
        uniform="0",
        one_hot="the place of that key",
        sink=_NOT_COUNTED,
        reading=(
            "The same key in most rows is a sink: the head rests there, often on the first token. The place before the query "
            "in most rows is a previous-token head. Where weights are near to uniform it is decided by little and says little. "
            "After a slice of the keys it counts within the slice: `with_key_offset` shifts it before records are merged."
        ),
        lines="print(rows.argmax[0, 0, -4:].tolist(), rows.argmax[0, 0].bincount().max().item())",
        codes=("ATT301", "ATT302", "ATT304", "ATT305"),
        picture="",
    ),
    Statistic(
        name="mean",
        definition="The mean of the logits, each visible key counted once.",
        formula=r"\bar z = \frac{1}{n}\sum_j z_j",
        range="any number",
        uniform="c",
        one_hot="that logit / n, where the others are 0",
        sink=_NOT_COUNTED,
        reading=(
            "The offset that the row's logits share. The softmax does not feel it, so it is neither good nor bad; but logits "
            "of 300 ± 4, which real models have, are steps of 2 apart in bfloat16. It comes from a direction that all keys "
            "have in common, often a bias of the key projection, and can be removed there without any change of the output. It "
            "is formed in two passes, so that an offset costs it no digits."
        ),
        lines="print(rows.mean.abs().amax(), (rows.max - rows.mean).mean())",
        codes=("ATT202", "ATT507"),
        picture="",
    ),
    Statistic(
        name="var",
        definition="The population variance of the logits, each visible key counted once.",
        formula=r"\sigma^2 = \frac{1}{n}\sum_j (z_j - \bar z)^2",
        range="0 and above",
        uniform="0",
        one_hot="that logit² (n − 1) / n², where the others are 0",
        sink=_NOT_COUNTED,
        reading=(
            "Its root σ is the one number that best tells how sharp a softmax of many keys is, and the horizontal axis of the "
            "pictures on these pages. 1/√d aims at σ = 1 at initialisation. Below about 0.3 attention all but averages. A row "
            "of one key has the variance 0."
        ),
        lines="print(rows.var.sqrt().mean())  # near 1: independent entries of variance 1, divided by the root of their width",
        picture="log",
    ),
    Statistic(
        name="lse",
        definition="The logarithm of the sum that normalises the weights.",
        formula=r"\mathrm{lse} = \ln\sum_j e^{z_j}",
        range="from `max` to `max` + ln n; −∞ for an empty row",
        uniform=r"c + ln n",
        one_hot="that logit",
        sink="Its logit is one more term of the sum. An empty row with a sink has the sink's logit.",
        reading=(
            "What turns a logit into a weight: p = e^(z − lse). It carries gradients, of which the weights are the derivative; "
            "its square is the z-loss, which keeps logits from drifting (`attemper.nn.z_loss`). It merges records: the share "
            "of a part is e^(lse of the part − lse of the whole). For normal logits it is near ln n + σ²/2 as long as σ² is "
            "small against 2 ln n. A row whose lse or mean is NaN or infinite is counted as not finite."
        ),
        lines="print(rows.lse.square().mean())  # the z-loss",
        codes=("ATT507",),
        heads=("nonfinite_rows",),
        figures=("nonfinite_rows",),
        picture="log",
    ),
    Statistic(
        name="entropy",
        definition="The entropy of the weights, in nats.",
        formula=r"H = -\sum_j p_j \ln p_j",
        range="0 to ln n",
        uniform="ln n",
        one_hot="0",
        sink="It is one more place for weight: up to ln(n + 1).",
        reading=(
            "How much choice is left: 0 is one key, ln n all keys alike. It depends on n, so compare heads and layers by "
            "[normalized_entropy](normalized_entropy.md). For normal logits it is near ln n − σ²/2 while σ is small. It "
            "carries gradients, so that a penalty may hold it up (`attemper.nn.entropy_floor`); those of a row that is one-hot "
            "already are 0."
        ),
        lines="print(rows.entropy.mean(dim=(0, 2)))  # of each head",
        heads=("mean_entropy",),
        figures=("entropy",),
    ),
    Statistic(
        name="p2",
        definition="The sum of the squared weights.",
        formula=r"p_2 = \sum_j p_j^2",
        range="1/n to 1; 0 for an empty row",
        uniform="1/n",
        one_hot="1",
        sink="Its squared weight is one more term.",
        reading=(
            "The chance that two keys, drawn by their weights, are the same one. Its inverse counts keys, as "
            "[effective_keys](effective_keys.md) does, with more regard for the large weights. It is stored because "
            "[gain](gain.md) and [jacobian_norm](jacobian_norm.md) follow from it; read those."
        ),
        lines="print((1 / rows.p2).mean())  # keys, counted by the squares of their weights",
        codes=("ATT304", "ATT506"),
        picture="log",
    ),
    Statistic(
        name="p3",
        definition="The sum of the cubed weights.",
        formula=r"p_3 = \sum_j p_j^3",
        range="1/n² to 1; 0 for an empty row",
        uniform="1/n²",
        one_hot="1",
        sink="Its cubed weight is one more term.",
        reading=(
            "Stored for [jacobian_norm](jacobian_norm.md) alone. With p2 it bounds the largest weight: p3/p2 ≤ max p ≤ "
            "p3^(1/3), also after records were merged."
        ),
        lines="print((rows.p3 / rows.p2).mean(), rows.peak().mean(), rows.p3.pow(1 / 3).mean())",
        picture="log",
    ),
    Statistic(
        name="product_max",
        definition="The largest product q·k of the row, before scale, softcap, bias and mask values.",
        formula=r"\max_j u_j, \quad u_j = q \cdot k_j",
        range="any number",
        uniform="c/s",
        one_hot="that logit / s",
        sink=_NOT_COUNTED,
        reading=(
            "What code that writes the product down before it scales must be able to hold. Read "
            "[product_absmax](product_absmax.md), which has both ends, or [headroom](headroom.md), which holds it against a "
            "dtype."
        ),
        lines="print(rows.product_max.amax() / 64**0.5, rows.max.amax())  # alike: no softcap and no bias here",
        codes=("ATT201", "ATT501", "ATT502", "ATT503", "ATT504"),
        heads=("product_max",),
        picture="log",
    ),
    Statistic(
        name="product_min",
        definition="The smallest product q·k of the row, before scale, softcap, bias and mask values.",
        formula=r"\min_j u_j, \quad u_j = q \cdot k_j",
        range="any number, at most `product_max`",
        uniform="c/s",
        one_hot="of the other keys",
        sink=_NOT_COUNTED,
        reading=(
            "The other end of the range: float16 overflows at −65504 as it does at 65504, and a negative infinity hides a key "
            "without a word, where a positive one at least makes NaN."
        ),
        lines="print(rows.product_min.amin())",
        codes=("ATT201", "ATT501", "ATT502", "ATT503", "ATT504"),
        heads=("product_min",),
    ),
    Statistic(
        name="peak",
        definition="The largest weight of a key.",
        formula=r"\max_j p_j = e^{\max - \mathrm{lse}}",
        range="1/n to 1; 0 for an empty row",
        uniform="1/n",
        one_hot="1",
        sink="It is no key: where it takes all the weight, the peak is near 0.",
        reading=(
            "Above 0.99 the row is [saturated](saturated.md). A peak of one half still leaves a gain of 0.5 or more: the "
            "softmax learns best where it hesitates. It is as exact as lse, which is rounded at its own size: float32 logits "
            "of 1e5 leave the peak known to 1 %. A mean over rows hides what the share of saturated rows shows; histograms of "
            "both are in `HeadStats`."
        ),
        lines="print(rows.peak().mean(), rows.peak().median())",
        codes=("ATT301", "ATT302"),
        heads=("mean_peak",),
        figures=("peak",),
    ),
    Statistic(
        name="centred_max",
        definition="How far the largest logit stands above the mean of its row.",
        formula=r"\max_j z_j - \bar z",
        range="0 and above",
        uniform="0",
        one_hot="that logit (n − 1)/n, where the others are 0",
        sink=_NOT_COUNTED,
        reading=(
            "The part of `max` that the softmax feels. A largest logit of 300 with a centred_max of 4 is a healthy row with an "
            "offset; with a centred_max of 290 it is one key and nothing else. Over n keys a row is saturated only if it "
            "passes (1 − 1/n)(ln(n − 1) + 4.6), which is 2.3 for two keys and 10.8 for 512: the weight of the others is least "
            "where they are alike."
        ),
        lines="print(rows.centred_max().amax(), (rows.max.amax() - rows.mean.amax()))",
        codes=("ATT202",),
        heads=("centred_max", "mean_centred_max"),
        figures=("max_centred", "mean_centred"),
        picture="log",
    ),
    Statistic(
        name="gain",
        definition="The trace of the softmax's Jacobian: how much of a gradient reaches the logits.",
        formula=r"\sum_j p_j (1 - p_j) = 1 - p_2",
        range="0 to 1 − 1/n",
        uniform="1 − 1/n",
        one_hot="0",
        sink="It counts as a key would: up to 1 − 1/(n + 1).",
        reading=(
            "0 is a dead row: whatever the loss wants of its weights, queries and keys do not hear of it. Near 1 is not better "
            "than 0.5: a uniform row has the largest trace and spreads it thinly. Look at where it falls to: below 0.02 the "
            "row is saturated, below 1e-3 it is less than the rounding of a weight in bfloat16."
        ),
        lines="print(rows.gain().mean(), (rows.gain() < 1e-3).float().mean())",
        codes=("ATT304", "ATT506"),
        heads=("mean_gain",),
        figures=("gain",),
    ),
    Statistic(
        name="jacobian_norm",
        definition="The Frobenius norm of the softmax's Jacobian.",
        formula=r"\lVert \mathrm{diag}(p) - p p^\top \rVert_F = \sqrt{p_2 - 2 p_3 + p_2^2}",
        range="0 to ½",
        uniform=r"√(n − 1)/n",
        one_hot="0",
        sink="It counts as a key would.",
        reading=(
            "A bound on how far the weights move for a small step of the logits, as a multiple of that step. It is small at "
            "both ends: for uniform weights over many keys, since each has little to give, and for one key, since nothing "
            "moves it. It is largest, ½, where two keys share the weight. In float32 the difference cancels near one-hot rows: "
            "below about 3e-4 it is rounding."
        ),
        lines="print(rows.jacobian_norm().mean())",
        heads=("mean_jacobian_norm",),
        figures=("jacobian_norm",),
    ),
    Statistic(
        name="effective_keys",
        definition="How many keys a uniform row of the same entropy would have: the perplexity of the weights.",
        formula=r"e^H",
        range="1 to n; 0 for an empty row",
        uniform="n",
        one_hot="1",
        sink="It counts as a key would: up to n + 1.",
        reading=(
            "The entropy in a unit that one can picture: this head looks at some five keys. It is a count, so means over rows "
            "of different lengths are ruled by the long ones; use [normalized_entropy](normalized_entropy.md) for those."
        ),
        lines="print(rows.effective_keys()[0, 0, [1, 15, 511]])  # of rows with 2, 16 and 512 visible keys",
        picture="log",
    ),
    Statistic(
        name="normalized_entropy",
        definition="The entropy as a share of the largest that the row could have.",
        formula=r"\frac{H}{\ln n} \quad \text{(with a sink } \frac{H}{\ln(n + 1)} \text{)}",
        range="0 to 1; NaN for a row with at most one visible key",
        uniform="1",
        one_hot="0",
        sink="It is one more place: the divisor is ln(n + 1).",
        reading=(
            "0 is one key, 1 is uniform, for rows of any length. Above 0.99 a head only averages; whole layers below 0.05 that "
            "were higher before have collapsed. It falls slowly: over 4096 keys 0.5 still leaves 64 effective keys. Rows "
            "without a choice are NaN, so use `torch.nanmean`."
        ),
        lines="print(rows.normalized_entropy().nanmean(), rows.normalized_entropy()[0, 0, 0])",
        codes=("ATT303", "ATT505"),
        heads=("mean_normalized_entropy",),
        figures=("normalized_entropy",),
    ),
    Statistic(
        name="saturated",
        definition="Whether a row with at least two visible keys puts more than 0.99 of its weight on one of them.",
        formula=r"n \ge 2 \;\text{ and }\; \max_j p_j > 0.99",
        range="true or false; a mean over rows is a share",
        uniform="false",
        one_hot="true",
        sink="What it takes is missing from the keys: a row whose sink has 0.01 or more is not saturated.",
        reading=(
            "A saturated row has a gain below 0.02 and next to no gradient. Above one half of the rows, the head's median row "
            "is one. It is no fault by itself, since heads that match or copy saturate on purpose; of an untrained model, or "
            "of most heads at once, it says that the logits are too large, mostly for a missing scale."
        ),
        lines="print(rows.saturated().float().mean())",
        codes=("ATT301",),
        heads=("saturated_share",),
        figures=("saturated_share",),
    ),
    Statistic(
        name="product_absmax",
        definition="The largest size of a product q·k of the row, before the scale.",
        formula=r"\max_j \lvert u_j \rvert",
        range="0 and above; −∞ for an empty row",
        uniform="c/s",
        one_hot="that logit / s",
        sink=_NOT_COUNTED,
        reading=(
            "Times the scale it is what QK-clip holds under its threshold, and what the alarms of a training run are about: it "
            "is taken before the softcap, which hides growth, and before biases, which are large on purpose. Before the scale "
            "it is √d times larger than the logits, and that is where float16 ends: at 65504."
        ),
        lines="print(rows.product_absmax().amax(dim=(0, 2)))  # of each head",
        codes=("ATT201", "ATT501", "ATT502", "ATT503", "ATT504"),
        heads=("product_absmax",),
        figures=("max_scaled_product", "max_product"),
        picture="log",
    ),
    Statistic(
        name="headroom",
        definition="How many times larger the products could be before they leave the range of a dtype.",
        formula=r"\frac{\text{largest finite number}}{\max_j \lvert u_j \rvert}",
        range="0 and above; +∞ for an empty row",
        uniform="65504 s/c in float16",
        one_hot="65504 s / that logit in float16",
        sink=_NOT_COUNTED,
        reading=(
            "Below 1, code that writes the product in that dtype before it scales gets infinity and then NaN. Kernels that "
            "accumulate in float32 are not concerned, and code that scales q first has √d times as much. bfloat16 has the "
            "range of float32, so its headroom is never the problem; its steps are. The pictures are those of float16."
        ),
        lines="print(rows.headroom(torch.float16).amin(), rows.headroom(torch.bfloat16).amin())",
        codes=("ATT201", "ATT203", "ATT204"),
        heads=("headroom",),
        picture="log",
        argument="torch.float16",
    ),
    Statistic(
        name="headroom_bits",
        definition="How many doublings of the products fit into the range of a dtype.",
        formula=r"\log_2 \mathrm{headroom}",
        range="any number; +∞ for an empty row",
        uniform="log₂ of headroom",
        one_hot="log₂ of headroom",
        sink=_NOT_COUNTED,
        reading=(
            "Headroom in the unit in which logits grow: in a run whose logits double every thousand steps, three bits are "
            "three thousand steps. Below 0 the product has overflown."
        ),
        lines="print(rows.headroom_bits(torch.float16).amin())",
        codes=("ATT201",),
        argument="torch.float16",
    ),
)
