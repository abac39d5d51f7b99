"""The rules ATT2xx: what overflows, rounds away or is not finite."""

from attemper.report import Rule, Severity

RANGE: tuple[Rule, ...] = (
    Rule(
        code="ATT201",
        name="product-overflows-float16",
        severity=Severity.WARNING,
        summary="A raw product q.k passes the largest finite float16 number.",
        why=(
            "Code that writes the product down in float16 before it applies the scale (eager attention) gets infinity and "
            "then NaN. Fused kernels that accumulate in float32 do not. The orders are run on rows of the captured q, k and "
            "v, and the finding says which hold. An error where float16 is the dtype that was asked for and the model's own "
            "code breaks in it, a warning otherwise."
        ),
        remedy=(
            "Multiply the query by the scale before the product, keep the product in float32 or bfloat16, or clip the "
            "projections (QK-clip)."
        ),
        source="largest finite float16 number, 65504 (IEEE 754 binary16)",
        measured="The largest |q·k| before any scale, against 65504.",
        ignore_when="The model never runs in float16, or only through fused kernels that accumulate in float32.",
        example="attemper.examples.faults:product_overflows",
    ),
    Rule(
        code="ATT202",
        name="logit-above-100",
        severity=Severity.WARNING,
        summary="A logit is larger than 100.",
        why=(
            "Two different things look like this. If logits stand far above the mean of their row, the softmax is sharp "
            "and training tends to diverge as they grow. If a whole row is shifted by a common offset, the softmax "
            "ignores it and no gradient is lost, but 16-bit logits become coarse: the finding says which."
        ),
        remedy=(
            "In training: QK-norm, QK-clip at 100, or a lower learning rate for the query and key projections. For an "
            "offset: keep logits in float32, or remove the key bias direction that all keys share."
        ),
        source="QK-clip threshold of Kimi K2, arXiv 2507.20534; divergence above 1e4: arXiv 2309.14322",
        measured="The largest logit of the worst head, against the threshold large-logit.",
        ignore_when="A finished model that runs in float32 or bfloat16 and whose heads were saturated in training too.",
        example="attemper.examples.faults:large_logits",
    ),
    Rule(
        code="ATT203",
        name="not-finite",
        severity=Severity.ERROR,
        summary="The forward pass makes a NaN or an infinity; the first module that made it is named.",
        why=(
            "Everything behind it is wrong. Every module's inputs and outputs are looked at in the order in which they "
            "run, so the place where it begins is known, and whether that is attention or something else, such as a "
            "residual stream that passes 65504 in float16."
        ),
        remedy=(
            "If it begins in a parameter, the checkpoint is damaged. If it is a float16 overflow, run in bfloat16 or "
            "float32, or rescale what overflows."
        ),
        source="measured; largest finite float16 number, 65504 (IEEE 754 binary16)",
        ignore_when="Never, unless the inputs were not meant for the model.",
        example="attemper.examples.faults:not_finite",
    ),
    Rule(
        code="ATT204",
        name="activation-passes-float16",
        severity=Severity.INFO,
        summary="An activation outside attention passes the largest finite float16 number.",
        why=(
            "Nothing is wrong in the dtype that was measured. In float16 the same model would overflow there, although "
            "its attention may have ample headroom."
        ),
        remedy="Do not run this model in float16; bfloat16 has the range.",
        source="largest finite float16 number, 65504 (IEEE 754 binary16)",
        measured="The largest finite activation outside attention weights and logits, against 65504.",
        ignore_when="The model never runs in float16.",
        example="attemper.examples.faults:large_activation",
    ),
    Rule(
        code="ATT205",
        name="logits-round-away",
        severity=Severity.WARNING,
        summary="Logits written down in 16 bits are so coarse that attention weights go to other keys.",
        why=(
            "Near a logit of 100 the steps of bfloat16 are 0.5 and those of float16 0.06: differences between keys that are "
            "smaller than that are lost, also where the softmax itself runs in float32. Orders of operations are run in "
            "both dtypes on rows of the captured q, k and v and held against float64. A warning where the dtype and the "
            "order are those that the model really uses, a description otherwise."
        ),
        remedy=(
            "Use a fused kernel, or keep the product, the scale and the softmax in float32 and round the weights only. If "
            "the logits are mostly an offset common to the row, remove it (the direction that all keys share)."
        ),
        source="measured against float64; steps of float16 and bfloat16: IEEE 754 and their 11 and 8 bits of precision",
        measured=(
            "The largest total variation between a row's weights and those of float64, among the rows that were run, against "
            "the threshold sixteen-bit-error."
        ),
        ignore_when="The model never writes its logits down in 16 bits: only fused kernels run it.",
        example="attemper.examples.faults:coarse_logits",
    ),
    Rule(
        code="ATT206",
        name="float8-range",
        severity=Severity.INFO,
        summary="Attention with q, k and v in float8 would lose numbers or attention weight.",
        why=(
            "float8_e4m3fn ends at 448 and has 4 bits of precision, float8_e5m2 ends at 57344 and has 3. q, k, v and the "
            "weights of some rows are really rounded to both, as they are and with each tensor scaled to the range, and the "
            "result is held against float64."
        ),
        remedy=(
            "Keep attention of these layers in 16 bits. If only the range is short, scale each tensor by its largest number; "
            "if one channel holds it, rotate q and k by the same orthogonal matrix first or scale by block."
        ),
        source="float8 formats: arXiv 2209.05433; per-block scales and rotation: arXiv 2407.08608 section 3.3",
        measured=(
            "The largest total variation between a row's weights and those of float64, in the better of the two formats with "
            "scaled tensors, against the threshold eight-bit-error."
        ),
        ignore_when="The model never runs in float8.",
        example="attemper.examples.faults:float8_range",
    ),
)
