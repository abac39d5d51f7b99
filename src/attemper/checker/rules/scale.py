"""The rules ATT1xx: which scale is applied to q·k."""

from attemper.report import Rule, Severity

SCALE: tuple[Rule, ...] = (
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
)
