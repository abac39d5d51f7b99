"""The stable codes: what each rule looks for, why it matters and what to do about it.

A code never changes its meaning; a rule that goes away leaves its number unused.
"""

from collections.abc import Iterable

from attemper.errors import ArgumentError
from attemper.report import Rule, Severity

RULES: tuple[Rule, ...] = (
    Rule(
        code="ATT101",
        name="scale-missing",
        severity=Severity.ERROR,
        summary="The scale that the architecture calls for is not applied.",
        why=(
            "Logits are larger than the weights were made for by the missing factor: heads saturate, gradients die, "
            "16-bit code overflows. The scale that a call really applies is measured, a prescaled query is followed back "
            "to its projection, and the result is held against the architecture's rule."
        ),
        remedy="Pass the scale of the architecture's rule to the attention call, or multiply the query by it, once.",
        source="the rule of the architecture (see the finding); 1/sqrt(d_k): arXiv 1706.03762 section 3.2.1",
        measured="The factor from the projections' q·k to the logits, against the one that the rule gives.",
        ignore_when="The model was trained without the factor, on purpose, and its architecture has no rule in the table.",
        example="attemper.examples.faults:scale_missing",
    ),
    Rule(
        code="ATT102",
        name="scale-twice",
        severity=Severity.ERROR,
        summary="The scale is applied twice.",
        why=(
            "Logits are smaller than the weights were made for by another factor of the scale, so attention is far too "
            "uniform. It happens where the query is scaled first and the kernel's default scale is left on."
        ),
        remedy="Scale the query or let the kernel scale, not both: pass scale=1.0 for a prescaled query.",
        source="the rule of the architecture (see the finding)",
        measured="The factor from the projections' q·k to the logits, against the one that the rule gives.",
        ignore_when="The second factor is meant and the model was trained with it, as in muP's 1/d_head.",
        example="attemper.examples.faults:scale_twice",
    ),
    Rule(
        code="ATT103",
        name="scale-of-model-width",
        severity=Severity.ERROR,
        summary="The scale is computed from the model's width instead of the head's.",
        why=(
            "1/sqrt(d_model) is smaller than 1/sqrt(d_head) by the root of the number of heads: attention is too uniform "
            "by that factor."
        ),
        remedy="Use the width of one head, d_k, in 1/sqrt(d_k).",
        source="the rule of the architecture (see the finding); arXiv 1706.03762 section 3.2.1",
        measured="The factor from the projections' q·k to the logits, against the one that the rule gives.",
        ignore_when="The model was trained with this scale; retraining is the only other way.",
        example="attemper.examples.faults:scale_of_model_width",
    ),
    Rule(
        code="ATT104",
        name="scale-differs",
        severity=Severity.ERROR,
        summary="The scale differs from what the architecture's rule calls for by some other factor.",
        why=(
            "The weights were trained under one scale and run under another. Where the architecture is unknown, "
            "1/sqrt(d_k) is only a convention and the finding is a description."
        ),
        remedy="Compare the scale with the configuration and with the code that the weights were trained with.",
        source="the rule of the architecture (see the finding)",
        measured="The factor from the projections' q·k to the logits, against the one that the rule gives.",
        ignore_when=(
            "The scale is the model's own design and was there in training; a learned or published rule that the table of "
            "architectures lacks."
        ),
        example="attemper.examples.faults:scale_differs",
    ),
    Rule(
        code="ATT105",
        name="argument-ignored",
        severity=Severity.ERROR,
        summary="A backend does not apply the scale, the softcap, the sinks or the mask that its call is given.",
        why=(
            "The same weights then give other results than under the backend that they were trained or tested with. Some rows "
            "of each call are computed in float64 by the rule that the call states; an output that rounding cannot explain is "
            "tried against known ways of not doing as told. Where none fits, it is a warning: something else was done."
        ),
        remedy=(
            "Pass the argument on inside the attention function, or choose a backend that takes it; a mask function has to be "
            "registered together with an attention function."
        ),
        source="worst case of rounding each step of the definition once, in float64",
        measured="The largest distance of an output from its definition, as a multiple of what rounding explains, against 1.",
        ignore_when="The attention function adds something of its own on purpose, and the model was trained with it.",
        example="attemper.examples.faults:argument_ignored",
    ),
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
    Rule(
        code="ATT301",
        name="saturated-head",
        severity=Severity.WARNING,
        summary="Most rows of a head put more than 99 % of their weight on one key.",
        why=(
            "A row with peak > 0.99 has gain 1 - sum p^2 < 0.02: next to no gradient reaches its query and key. Above "
            "half of the rows, the head's median row is such a row. It may be a fault of scale, or learned: matchers and "
            "copying heads saturate on purpose and work, hence a warning. Heads that rest on the first token are "
            "described by ATT302 instead."
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
            "rows; here there are none. Heads that rest on the first token are described by ATT302 instead."
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
    Rule(
        code="ATT401",
        name="fully-masked-row",
        severity=Severity.ERROR,
        summary="A real token may not look at any key.",
        why=(
            "Its attention output is NaN, zero or the mean of all values, depending on which kernel runs: the same model "
            "gives different answers in different places."
        ),
        remedy=(
            "Let every real token see at least itself. Check that a boolean mask has True for take part, and how padding "
            "and causal masks are combined."
        ),
        source="measured: rows without a visible key",
        measured="How many real tokens see no key, against 0.",
        ignore_when="The tokens are padding after all and the attention mask that was given does not say so.",
        example="attemper.examples.faults:blind_row",
    ),
    Rule(
        code="ATT402",
        name="sees-the-future",
        severity=Severity.ERROR,
        summary="A causal model's earlier outputs depend on later tokens.",
        why=(
            "Training loss looks too good and generation fails, since the future is not there. Decided by changing the "
            "later tokens and looking at earlier outputs; only for models that claim to be causal."
        ),
        remedy=(
            "Look at the layers named: is_causal and the mask they pass. A mask function that is not registered with the "
            "attention implementation is a usual cause."
        ),
        source="measured: outputs may move by rounding alone, sqrt(epsilon) of the largest output",
        measured=(
            "How far an earlier output moved when later tokens were changed, against what rounding explains (the threshold "
            "leak-roundings)."
        ),
        ignore_when="The model is not causal and only its class is called so.",
        example="attemper.examples.faults:sees_the_future",
    ),
    Rule(
        code="ATT403",
        name="padding-leaks",
        severity=Severity.ERROR,
        summary="Outputs of real tokens depend on what stands in the padding.",
        why=(
            "Results change with the company a sequence keeps in its batch. Decided by changing what is embedded at "
            "padded positions and looking at the outputs of real tokens."
        ),
        remedy=(
            "Pass the attention mask on to every attention call. A float mask has 0 for take part and a large negative "
            "number for hidden; a boolean one True and False."
        ),
        source="measured: outputs may move by rounding alone, sqrt(epsilon) of the largest output",
        measured=(
            "How far the output of a real token moved when padding was changed, against what rounding explains (the "
            "threshold leak-roundings)."
        ),
        ignore_when="The model always runs on one sequence, or on sequences of one length.",
        example="attemper.examples.faults:padding_leaks",
    ),
    Rule(
        code="ATT404",
        name="nan-in-padding",
        severity=Severity.WARNING,
        summary="The model makes NaN at padded positions, and masks would not keep it from real tokens.",
        why=(
            "A padded query that sees no key gets NaN from a softmax over minus infinity. A hidden key has weight 0, but 0·NaN "
            "is NaN, so one more layer over such a position, or a cache that keeps it, spoils the real tokens. Decided by "
            "embedding NaN at padded positions, which is tried only where the model made a NaN there by itself: nearly every "
            "kernel multiplies hidden weights."
        ),
        remedy=(
            "Let padded queries see some key (themselves, say), hide with a large negative number in place of minus infinity, "
            "or set the outputs of padded positions to zero."
        ),
        source="measured: NaN at padded positions; IEEE 754: 0·NaN is NaN",
        measured="How many real tokens get NaN when NaN is embedded at padded positions, against 0.",
        ignore_when="Nothing reads the padded positions after the place where they become NaN.",
        example="attemper.examples.faults:nan_in_padding",
    ),
    Rule(
        code="ATT405",
        name="cache-continues-wrongly",
        severity=Severity.ERROR,
        summary="Tokens that continue a cache get other outputs than in one run over all tokens.",
        why=(
            "With fewer queries than keys a causal mask must end at the bottom right: query i may see keys up to i + Nk - Nq. "
            "A mask that starts at the top left, as is_causal=True does in F.scaled_dot_product_attention, hides nearly the "
            "whole cache. Decided by running a few tokens at once and in two parts, the second from the cache of the first; "
            "the masks of the second say whether alignment is the cause. A warning if they are aligned, and something else is "
            "at fault."
        ),
        remedy=(
            "Pass a mask that is aligned to the bottom right (torch.nn.attention.bias.causal_lower_right) or compute it from "
            "the positions of the queries. If masks are right: let positions go on from the length of the cache."
        ),
        source="measured: outputs may move by rounding alone, sqrt(epsilon) of the largest output",
        measured=(
            "How far the last outputs part from those of one run, against what rounding explains (the threshold leak-roundings)."
        ),
        ignore_when="The model is never continued by more than one token at a time, and one token is right.",
        example="attemper.examples.faults:cache_continues_wrongly",
    ),
    Rule(
        code="ATT406",
        name="depends-on-batch",
        severity=Severity.ERROR,
        summary="A sequence gets other outputs in a batch than alone.",
        why=(
            "A few tokens are run alone, padded on the right beside a longer sequence, and padded on the left where the model "
            "is causal and takes position_ids. An error if the outputs part without any padding; a warning if they part with "
            "it only, which a convolution over tokens does too, by design. Kernels of other shapes sum in another order: what "
            "that explains is left out."
        ),
        remedy=(
            "Look for a reduction, a norm or a reshape over the batch; with padding: for masks that do not reach every layer, "
            "and for positions that count padding."
        ),
        source="measured: outputs may move by rounding alone, sqrt(epsilon) of the largest output",
        measured=(
            "How far an output parts from that of the sequence alone, against what rounding explains (the threshold "
            "leak-roundings)."
        ),
        ignore_when="The model always runs on one sequence, or mixes its batch on purpose, as with experts of limited capacity.",
        example="attemper.examples.faults:depends_on_batch",
    ),
)

BY_CODE: dict[str, Rule] = {rule.code: rule for rule in RULES}


def rule(code: str) -> Rule:
    """The rule of one code (case does not matter).

    Raises:
        ArgumentError: no rule has this code; the message lists those that exist.
    """
    found = BY_CODE.get(code.strip().upper())
    if found is None:
        raise ArgumentError("code", repr(code), f"one of {', '.join(BY_CODE)}")
    return found


def prefixes(argument: str, given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Codes and prefixes from a list or a comma-separated string, in capitals.

    Raises:
        ArgumentError: one of them fits no rule; the message lists the codes.
    """
    if given is None:
        return ()
    parts = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(part, str) for part in parts):
        raise ArgumentError(argument, repr(given), "codes or beginnings of codes, in a list or with commas")
    wanted = tuple(piece.strip().upper() for part in parts for piece in part.split(",") if piece.strip())
    for prefix in wanted:
        if not any(code.startswith(prefix) for code in BY_CODE):
            raise ArgumentError(argument, repr(prefix), f"a code or the beginning of one: {', '.join(BY_CODE)}")
    return wanted


def is_selected(code: str, select: tuple[str, ...], ignore: tuple[str, ...]) -> bool:
    """Whether a finding with this code is wanted: the longest prefix that fits decides, and ignore wins a tie.

    Without `select` every code is wanted.
    """

    def longest(given: tuple[str, ...]) -> int:
        return max((len(prefix) for prefix in given if code.startswith(prefix)), default=-1)

    chosen = longest(select) if select else 0
    return chosen >= 0 and chosen > longest(ignore)
