"""The words of the dials, one dict a language with the same keys; numbers, formulas and code are shared."""

from collections.abc import Mapping
from typing import Any

WORDS: Mapping[str, Mapping[str, Any]] = {
    "en": {
        "title": "Turn the dials",
        "lead": "Random queries and keys, made and multiplied in your browser. Each query looks for one of the n keys, with "
        "which it correlates by ρ; the other keys are independent of it. The same settings give the same numbers.",
        "no_scripts": "The dials need JavaScript.",
        "dials": {
            "d": ("Width d", "entries of a query and of a key (d_k)"),
            "n": ("Keys n", "how many keys a query chooses from"),
            "rho": ("Correlation ρ", "of a query with the key that it looks for: 0 at the start of training, larger later"),
            "sigma": ("Size σ", "standard deviation of the entries of q and k"),
            "rule": ("Scale", "the factor s in z = s·u, u = q·k"),
            "tau": ("Factor τ on the cosine", "the inverse temperature; only with the cosine"),
            "dtype": ("Number format", "entries, products and logits are rounded to it, as in code that is not fused"),
            "softmax": ("Softmax", "the same weights on paper, not in the computer"),
        },
        "rules": {"none": "none (s = 1)", "sqrt": "1/√d", "linear": "1/d", "cosine": "cosine after QK-norm, × τ"},
        "softmaxes": {"safe": "e^(z − max) / Σ", "plain": "e^z / Σ, maximum not subtracted"},
        "histogram": "Logits of all rows",
        "histogram_spoken": "Histogram of the logits, from {low} to {high}; standard deviation within a row {std}",
        "limit": "Right of the dashed line, at z = {limit}, e^z overflows.",
        "weights": "Weights of the first row, sorted",
        "weights_spoken": "Weights of the first row, sorted; the largest is {first}, the {count} smallest, which are not drawn, "
        "add up to {share}",
        "rest": "The other {count} keys together: {share}",
        "lost": "This row is lost: a product is infinite, or the weights are no numbers or all 0.",
        "means": "Where a figure belongs to a row, its mean over the rows is shown.",
        "spoken": "Normalized entropy {normalized_entropy}, peak {peak}, gain {gain}, gradient {gradient_rms}; products that "
        "overflow {product_overflow}, rows lost {lost_rows}",
        "figures": {
            "logit_std": ("Spread of the logits", "within a row. For independent q and k of size 1: √d unscaled, 1 with 1/√d."),
            "product_absmax": ("Largest |q·k|", "before the scale, as the number format holds it. float16 ends at 65504."),
            "normalized_entropy": ("Normalized entropy", "1: all keys get the same; 0: one key gets everything."),
            "peak": ("Peak", "the largest weight; above 0.99 the row counts as saturated."),
            "gain": ("Gain", "the trace of the softmax's Jacobian; at 0 no gradient passes."),
            "jacobian_norm": ("Size of the Jacobian", "its Frobenius norm; never above ½, where two keys share the weight."),
            "gradient_rms": (
                "Gradient at the logits",
                "what is left of a gradient of variance 1 at the weights (root mean square).",
            ),
            "gradient_median": ("The same, middle row", "few rows carry the mean; this is the row in the middle."),
            "product_overflow": (
                "Products that overflow",
                "they are stored before the scale is applied: no scale brings them back.",
            ),
            "exp_overflow": (
                "e^z that overflow",
                "unless the maximum is subtracted: beyond z = 11.09 in float16, 88.7 in bfloat16 and float32.",
            ),
            "lost_rows": (
                "Rows lost",
                "with an infinite product, or weights that are no numbers or all 0 (e^z fits, Σ not); left out of the means.",
            ),
        },
    },
    "zh": {
        "title": "自己动手调一调",
        "lead": "query 和 key 是随机生成的，点积就在你的浏览器里算。每个 query 要找 n 个 key 中的某一个，与它的相关系数为 ρ，"
        "与其余的 key 相互独立。设置相同，得到的数也相同。",
        "no_scripts": "这一部分需要 JavaScript。",
        "dials": {
            "d": ("宽度 d", "每个 query 和 key 的分量个数（d_k）"),
            "n": ("key 的个数 n", "一个 query 在多少个 key 里挑"),
            "rho": ("相关系数 ρ", "query 与它要找的 key 之间：训练刚开始时为 0，之后变大"),
            "sigma": ("大小 σ", "q、k 各分量的标准差"),
            "rule": ("缩放", "z = s·u 中的系数 s，u = q·k"),
            "tau": ("余弦前的系数 τ", "即温度的倒数；只在选余弦时有用"),
            "dtype": ("数值格式", "分量、点积和 logit 都舍入到这种格式，与未融合的代码一样"),
            "softmax": ("softmax", "纸面上两种写法结果相同，在计算机里不同"),
        },
        "rules": {"none": "不缩放（s = 1）", "sqrt": "1/√d", "linear": "1/d", "cosine": "QK-norm 之后取余弦，再乘 τ"},
        "softmaxes": {"safe": "e^(z − max) / Σ", "plain": "e^z / Σ，不减最大值"},
        "histogram": "所有行的 logit",
        "histogram_spoken": "logit 的直方图，从 {low} 到 {high}；行内标准差 {std}",
        "limit": "虚线在 z = {limit} 处，再往右 e^z 就溢出。",
        "weights": "第一行的权重，从大到小",
        "weights_spoken": "第一行的权重，从大到小；最大的是 {first}，最小的 {count} 个没有画出，合计 {share}",
        "rest": "其余 {count} 个 key 合计 {share}",
        "lost": "这一行已经作废：有点积成了无穷大，或者权重不是数（NaN）、全为 0。",
        "means": "凡是按行定义的量，这里都取各行的平均。",
        "spoken": "归一化熵 {normalized_entropy}，最大权重 {peak}，增益 {gain}，梯度 {gradient_rms}；"
        "溢出的点积 {product_overflow}，作废的行 {lost_rows}",
        "figures": {
            "logit_std": ("logit 的散布", "在一行之内。q、k 独立且 σ = 1 时：不缩放为 √d，除以 √d 后为 1。"),
            "product_absmax": ("最大的 |q·k|", "缩放之前，按所选格式存下来的值。float16 到 65504 为止。"),
            "normalized_entropy": ("归一化熵", "1：所有 key 平分；0：一个 key 独占。"),
            "peak": ("最大权重", "超过 0.99，这一行就算饱和。"),
            "gain": ("增益", "softmax 雅可比矩阵的迹；为 0 时梯度传不过去。"),
            "jacobian_norm": ("雅可比矩阵的大小", "即 Frobenius 范数；不会超过 ½，两个 key 平分权重时达到。"),
            "gradient_rms": ("传到 logit 的梯度", "权重上的梯度方差为 1 时，到这里还剩多少（均方根）。"),
            "gradient_median": ("同上，取中间的一行", "均值往往靠少数几行撑着，这里看的是排在正中间的那一行。"),
            "product_overflow": ("溢出的点积", "点积先存下来，然后才缩放：溢出之后，怎么缩放都救不回来。"),
            "exp_overflow": (
                "溢出的 e^z",
                "这是不减最大值的情形：float16 过了 z = 11.09 溢出，bfloat16 和 float32 过了 88.7 溢出。",
            ),
            "lost_rows": ("作废的行", "有无穷大的点积，或者权重不是数、全为 0（e^z 放得下，Σ 放不下）；求平均时不计入。"),
        },
    },
}
