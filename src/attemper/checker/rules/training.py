"""The alarms ATT5xx of a training run: what `attemper.watch` says over time. check, which sees a model once, never gives them."""

from attemper.report import Rule, Severity

_FORCED = "forced to about 1e3 training gets worse, and every run whose largest logit passed 1e4 diverged: arXiv 2309.14322"
_REMEDY = "attemper.QKClip after each optimizer step, a lower learning rate (for the query and key projections), or QK-norm"

TRAINING: tuple[Rule, ...] = (
    Rule(
        code="ATT501",
        name="logit-above-100-in-training",
        severity=Severity.WARNING,
        summary="The largest |scale·q·k| of a head has passed 100 in training.",
        why=(
            "Logits this large saturate rows, are steps of 0.5 apart in bfloat16, and in runs that end badly they go on growing. "
            "Kimi K2 was trained with every head held at 100. The product is taken before softcap, bias and mask, since a "
            "bias by position makes large negative logits on purpose."
        ),
        remedy=f"Watch whether it goes on. If so: {_REMEDY}.",
        source="100 is the threshold of QK-clip in Kimi K2: arXiv 2507.20534",
        measured="The largest |scale·q·k| of the head in the logged step, against the threshold alarming-logit.",
        ignore_when="It stays where it is, and the rows of the head are not saturated: an offset of a whole row costs nothing.",
    ),
    Rule(
        code="ATT502",
        name="logit-above-1e3-in-training",
        severity=Severity.ERROR,
        summary="The largest |scale·q·k| of a head has passed 1000 in training.",
        why=(
            "Runs that were forced to logits of this size ended with a worse loss than the same runs without. In bfloat16 such "
            "logits are steps of 4 apart: the softmax then chooses by rounding."
        ),
        remedy=f"Now: {_REMEDY}. If the loss has risen already, go back to a checkpoint from before.",
        source=_FORCED,
        measured="The largest |scale·q·k| of the head in the logged step, against the threshold hurting-logit.",
        ignore_when="The model caps its logits, and was trained with the cap from the start.",
    ),
    Rule(
        code="ATT503",
        name="logit-above-1e4-in-training",
        severity=Severity.ERROR,
        summary="The largest |scale·q·k| of a head has passed 10000 in training.",
        why="No run that passed it came back, in a study of many sizes and learning rates.",
        remedy=f"Stop, go back to a checkpoint from before, and train on with {_REMEDY}.",
        source=_FORCED,
        measured="The largest |scale·q·k| of the head in the logged step, against the threshold diverging-logit.",
        ignore_when="Never known.",
    ),
    Rule(
        code="ATT504",
        name="logits-growing",
        severity=Severity.WARNING,
        summary="The largest |scale·q·k| of a head grows so fast that it passes 1e3, or 1e4, soon.",
        why=(
            "Divergence is preceded by logits that double and double again, while the loss still falls. log2 of the maximum is "
            "regressed on the step, over the last 24 records and over the last 192 in means of 8. There is growth where the "
            "slope is certain against the scatter around the line, the line rises by an octave or more within the window, ends "
            "half an octave above all that was before, and grows in its later half at least three quarters as fast as in its "
            "earlier one: noise, and the growth after an initialisation, which slows down, do not fire it. It is told if the "
            "line reaches the next size within the horizon."
        ),
        remedy=f"Before it gets there: {_REMEDY}.",
        source="sizes: arXiv 2309.14322; the regression and its thresholds are ours",
        measured=(
            "The largest |scale·q·k| of the head that is there first, against the size that its line leads to: the threshold "
            "hurting-logit or the threshold diverging-logit, within the threshold growth-horizon; not below the threshold "
            "growth-floor, and with the threshold growth-certainty."
        ),
        ignore_when="It stops by itself before 100, as it may while the learning rate warms up.",
    ),
    Rule(
        code="ATT505",
        name="entropy-collapse",
        severity=Severity.WARNING,
        summary="The attention entropy of a layer has fallen to next to nothing.",
        why=(
            "Each row then has one key, whichever its largest logit picks, and small changes of the weights move all of it at "
            "once. In transformers of several kinds such a collapse came before divergence. Single heads may become sharp and "
            "should; so the mean over the layer's heads is looked at, it must have been several times higher before in the same "
            "run, and it must stay low for some records in a row."
        ),
        remedy=f"One of these: {_REMEDY}; or σReparam (attemper.weights.spectral_reparam).",
        source="collapse comes before divergence: arXiv 2303.06296, sections 2 and 3; the thresholds are ours",
        measured=(
            "Normalized entropy, averaged over rows and then over the layer's heads, against the threshold collapsed-entropy; it "
            "must have fallen by the threshold collapse-fall, for as many records as the threshold collapse-records says."
        ),
        ignore_when="The task has one right key for each query in this layer, as copying and sorting have, and the loss is low.",
    ),
    Rule(
        code="ATT506",
        name="gain-collapse",
        severity=Severity.WARNING,
        summary="Next to no gradient passes the softmax in nearly all heads of a layer.",
        why=(
            "1 - sum p^2 is the trace of the softmax's Jacobian: at 0 no gradient reaches queries and keys, and the layer's "
            "attention stays as it is, whatever the loss says. It is told where nearly all heads of a layer are there, and the "
            "layer was several times above before."
        ),
        remedy=f"Go back to a checkpoint from before: what gets no gradient does not recover by itself. Then {_REMEDY}.",
        source="gain 1 - 0.99^2 < 0.02 of a saturated row; the thresholds are ours",
        measured=(
            "The mean gain of the layer; of its heads, the share that the threshold collapsed-heads names must be below the "
            "threshold collapsed-gain, the layer fallen by the threshold collapse-fall, for the threshold collapse-records."
        ),
        ignore_when="As of entropy-collapse (ATT505).",
    ),
    Rule(
        code="ATT507",
        name="nonfinite-logits-in-training",
        severity=Severity.ERROR,
        summary="A head has logits that are NaN or infinite.",
        why="One such row makes the gradient of every weight NaN, and the optimizer's state keeps it.",
        remedy=(
            "Skip the step, or go back to a checkpoint from before. Look for products that overflow float16 (attemper check, "
            "ATT201), and for NaN in weights and inputs."
        ),
        source="NaN and infinity are no logits; an infinity of a mask is not counted",
        measured="How many rows of the head have such a logit in the logged step.",
        ignore_when="A loss scaler skips the step, as it does in the first steps in float16.",
    ),
    Rule(
        code="ATT508",
        name="query-and-key-outgrow-value-in-training",
        severity=Severity.WARNING,
        summary="The norms of W_q and W_k have grown far faster than that of W_v.",
        why=(
            "The three start alike. The logits' sharpness grows with ‖W_q‖·‖W_k‖, and where it runs away from the rest of the "
            "layer, attention entropy collapses. Behind QK-norm these norms have no effect, and nothing is said. Needs the norms "
            "of the weights in the records."
        ),
        remedy=f"One of these: {_REMEDY}; or σReparam (attemper.weights.spectral_reparam).",
        source="entropy collapse and the norms of the projections: arXiv 2303.06296, sections 2 and 3; the threshold is ours",
        measured=(
            "sqrt(‖W_q‖·‖W_k‖) / ‖W_v‖ in Frobenius norms, divided by what it was at the first record, against the threshold "
            "norm-growth."
        ),
        ignore_when="Weight decay shrinks W_v alone, and the logits stay small.",
    ),
)
