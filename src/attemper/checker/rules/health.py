"""The rules ATT3xx: what the softmax does, head by head."""

from attemper.report import Rule, Severity

HEALTH: tuple[Rule, ...] = (
    Rule(
        code="ATT301",
        name="saturated-head",
        severity=Severity.WARNING,
        summary="Most rows of a head put more than 99 % of their weight on one key.",
        why=(
            "A row with peak > 0.99 has gain 1 - sum p^2 < 0.02: next to no gradient reaches its query and key. Above "
            "half of the rows, the head's median row is such a row. It may be a fault of scale, or learned: matchers and "
            "copying heads saturate on purpose and work, hence a warning. A head in which nearly every row is so far gone that "
            "it has next to no gain is told by ATT304 in place of this code. Heads that rest on the first token are described by "
            "ATT302 instead."
        ),
        remedy=(
            "Check the scale first. In training: QK-norm, QK-clip, or a lower learning rate for the query and key "
            "projections. In a finished model: leave it, but do not expect fine-tuning to move this head."
        ),
        source="peak > 0.99 in more than half of the rows with two visible keys or more: the median row is saturated",
        measured=(
            "The share of saturated rows of the worst head, among its rows with two visible keys or more, against the "
            "threshold saturated-share."
        ),
        ignore_when="A finished model whose head matches or copies on purpose: saturation is then what was learned.",
        example="attemper.examples.faults:saturated_head",
    ),
    Rule(
        code="ATT302",
        name="sink-head",
        severity=Severity.INFO,
        summary="Most rows of a head have one and the same key as their strongest.",
        why=(
            "The head parks its weight on a key that carries little content, often the first token or a separator. This "
            "is common in trained models and harmless by itself; it matters for key-value cache eviction, for "
            "quantisation and for reading attention maps."
        ),
        remedy=(
            "Nothing to repair. Keep the sink's key when a cache is cut. Learned sinks or gated attention avoid the "
            "effect in new models."
        ),
        source="mean weight > 0.3: arXiv 2410.10781 section 3; sinks: arXiv 2309.17453",
        measured="A lower bound of the mean weight on one key, of the worst head, against the threshold sink-weight.",
        ignore_when="Always, unless a cache is cut, weights are quantised or attention maps are read.",
        example="attemper.examples.faults:sink_head",
    ),
    Rule(
        code="ATT303",
        name="uniform-head",
        severity=Severity.INFO,
        summary="A head weighs all visible keys next to equally.",
        why=(
            "It takes the mean of the values, whatever its queries and keys say. Some trained heads do so, in first layers "
            "above all; where every head does, and that is said once for the whole model, the weights are untrained or the "
            "logits are far too small, as under a scale that is applied twice."
        ),
        remedy="Check the scale first. A trained head that stays uniform could be pruned, or its logits given a larger scale.",
        source="normalized entropy 1 is the uniform distribution; the threshold is ours",
        measured="The mean normalized entropy of the most uniform head, against the threshold uniform-entropy.",
        ignore_when="The model is untrained, or averaging is what the head is for.",
        example="attemper.examples.faults:uniform_head",
    ),
    Rule(
        code="ATT304",
        name="dead-head",
        severity=Severity.WARNING,
        summary="Nearly all rows of a head have next to no gain: no gradient reaches its queries and keys.",
        why=(
            "Gain 1 - sum p^2 is the trace of the softmax's Jacobian. A saturated head (ATT301) may still learn from its other "
            "rows; here there are none, and ATT301 is not told besides. Heads that rest on the first token are described by "
            "ATT302 instead."
        ),
        remedy=(
            "Check the scale first. In training: QK-clip, or initialise the head's query and key projections again, since no "
            "learning rate moves them. In a finished model: leave it, or prune it."
        ),
        source="gain below dead-gain in nearly all rows with two visible keys or more",
        measured="The share of dead rows of the worst head, against the threshold dead-rows.",
        ignore_when="A finished model whose head matches exactly on purpose.",
        example="attemper.examples.faults:dead_head",
    ),
    Rule(
        code="ATT305",
        name="previous-token-head",
        severity=Severity.INFO,
        summary="In most rows of a head the strongest key is the token before.",
        why=(
            "A description: most trained language models have such heads, and induction heads read what they write. Told so "
            "that a sharp head is known for what it does."
        ),
        remedy="Nothing to repair. Keep such heads when heads are pruned.",
        source="0.9 of the rows at one relative position: arXiv 1905.09418, section 5.2",
        measured="The share of rows whose strongest key is the position before, of the head with most, against previous-rows.",
        ignore_when="Always, unless heads are pruned or attention maps are read.",
        example="attemper.examples.faults:previous_token_head",
    ),
    Rule(
        code="ATT306",
        name="logit-bound",
        severity=Severity.INFO,
        summary="The weights alone do not keep a head's logits within reason.",
        why=(
            "With --weights-only. Behind a norm an input has a length that its gain gives, so the spectral norms of W_q and W_k "
            "bound every logit there can be: scale·‖W_q‖·‖W_k‖·‖x‖², biases included. Below the threshold no input whatever "
            "gives large logits; above it, a run must tell. A warning where the bound before the scale passes 65504 and the "
            "weights are float16."
        ),
        remedy="Run the check without --weights-only. In training: QK-norm, σReparam or QK-clip keep the bound down.",
        source="σReparam, arXiv 2303.06296: logits are bounded by spectral norms; the threshold: arXiv 2309.14322",
        measured="The bound of the worst head, against the threshold logit-bound.",
        ignore_when="A run on real inputs shows that logits stay far below the bound.",
        example="attemper.examples.faults:logit_bound",
        options="--weights-only",
    ),
    Rule(
        code="ATT307",
        name="query-and-key-outgrow-value",
        severity=Severity.INFO,
        summary="The spectral norms of W_q and W_k are far larger than that of W_v.",
        why=(
            "With --weights-only. The three projections start alike. The logits' sharpness grows with ‖W_q‖·‖W_k‖, and where it "
            "runs away from the rest of the layer, attention entropy collapses and training becomes unstable. Behind QK-norm "
            "these norms have no effect, and nothing is said."
        ),
        remedy="In training: σReparam, QK-norm, QK-clip, or a lower learning rate for the query and key projections.",
        source="entropy collapse and spectral norms: arXiv 2303.06296, sections 2 and 3; the threshold is ours",
        measured="sqrt(‖W_q‖·‖W_k‖) / ‖W_v‖, against the threshold norm-ratio.",
        ignore_when="Training is over and the softmax is healthy on real inputs.",
        example="attemper.examples.faults:query_and_key_outgrow_value",
        options="--weights-only",
    ),
)
