"""The rules ATT4xx: what may be seen and is, or is not."""

from attemper.report import Rule, Severity

MASKS: tuple[Rule, ...] = (
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
            "later tokens and looking at earlier outputs; only for models that claim to be causal. A warning where nothing says "
            "that a model is causal, and most of its masks are, but for a few pairs of a query and a later key."
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
        ignore_when="The model is not causal and only its class is called so, or it is meant to look ahead by one token.",
        example="attemper.examples.faults:sees_the_future",
    ),
    Rule(
        code="ATT403",
        name="padding-leaks",
        severity=Severity.ERROR,
        summary="Outputs of real tokens depend on what stands in the padding.",
        why=(
            "Results change with the company a sequence keeps in its batch. Decided by changing what is embedded at "
            "padded positions (or, where no embedding reads the ids, what is given there) and looking at the outputs of real "
            "tokens."
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
            "that explains is left out. One cause is told once: where outputs part with padding only, ATT403 stands in for this "
            "code if what is embedded at padded positions leaks, and ATT402 if it is padding on the right alone and the future "
            "is seen, since that padding lies there."
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
