"""What one run is: everything that its curve depends on, checked where it enters, and nothing else.

What it must hold:
- two runs that could differ in a number differ in a field, so that a run's name can be a hash of its configuration;
- a file that says something unknown or impossible is refused with the place and what would do, before anything is trained;
- a field that is left out is what its default says, whatever the version of the file.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# Numbers that float32, int64 and torch's seeds hold with room to spare; strict, so that neither true nor "2" is a number.
LARGEST, MOST = 1e30, 2**31 - 1
Positive = Annotated[float, Field(strict=True, gt=0, le=LARGEST, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, le=LARGEST, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1, le=MOST)]
FromZero = Annotated[int, Field(strict=True, ge=0, le=MOST)]

TaskName = Literal["text", "digits", "recall", "reversal"]
RuleName = Literal["none", "inverse_sqrt", "inverse", "mup", "learned", "cosine", "log_length", "log_length_learned"]
Arithmetic = Literal["fp32", "bf16", "fp16", "fp16_safe", "fp16_naive", "bf16_naive"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class Task(_Section):
    """What is learned.

    Attributes:
        name: "text", next byte of a text; "digits", the class of an 8 × 8 image; "recall", the value that belongs to a key seen
            before; "reversal", a sequence backwards, by an encoder and a decoder.
        path: own text, a file or a folder of text files, for "text"; "": the help topics of the running Python.
        length: tokens of an example: bytes of text, pairs of "recall" (2·pairs + 1 tokens), symbols of "reversal"; "digits" has
            an image's 16 patches, whatever this is.
        symbols: different symbols of "recall" and "reversal".
    """

    name: TaskName = "text"
    path: Annotated[str, Field(max_length=4096)] = ""  # with a limit pydantic refuses what UTF-8 cannot write
    length: Count = 64
    symbols: Annotated[int, Field(strict=True, ge=2, le=MOST)] = 16


class Model(_Section):
    """What learns: pre-norm blocks of attention and a two-layer perceptron.

    Attributes:
        layers, heads: how many; "reversal" has as many layers in the encoder as in the decoder.
        head_dim: d_k, one number, or one for each head.
        width: of the residual stream, whatever heads·head_dim is. hidden: of the perceptrons; None: 4·width.
        attention: "dot"; "additive" (one head, "reversal" alone); or "example", the product as the example models have it: by
            PyTorch's own function and their rotary positions, causal, and with a rule that is one number.
        rule: the factor on q·k. "none" 1; "inverse_sqrt" 1/√d; "inverse" 1/d; "mup" √mup_base/d, 1/√d at d = mup_base; "learned"
            starts at 1/√d, one a head; "cosine" of q and k with a learned temperature; "log_length" ln(n)/(√d·ln(length)) with n
            the keys in view, fixed; "log_length_learned" SSMax, a learned slope a head on the base 1/√d. In "reversal" it is
            that of the decoder's look at the encoder, and within a sequence there is 1/√d.
        own_scales: heads of unequal width: each has the rule of its own width; False: all share that of the mean width.
        mup_base: the width at which "mup" is 1/√d.
        qk_norm: RMSNorm on q and k with learned gains, before the rule. softcap: bound on |logit|.
        position: "rotary", "learned" or "none".
        init: "unit" gives linear layers variance 1/inputs, so that q and k have unit variance; "torch" leaves PyTorch's default;
            "mup" is "unit" with the output layer at 0, and the learning rate of matrices between hidden layers, and of the output
            layer, times 64/width (Yang et al. 2022, arXiv 2203.03466, table 3, for Adam).
    """

    layers: Count = 2
    heads: Count = 2
    head_dim: Count | Annotated[tuple[Count, ...], Field(min_length=1)] = 32
    width: Count = 64
    hidden: Count | None = None
    attention: Literal["dot", "additive", "example"] = "dot"
    rule: RuleName = "inverse_sqrt"
    own_scales: bool = True
    mup_base: Count = 32
    qk_norm: bool = False
    softcap: Positive | None = None
    position: Literal["rotary", "learned", "none"] = "rotary"
    init: Literal["unit", "torch", "mup"] = "unit"


class Precision(_Section):
    """In what it is computed.

    Attributes:
        arithmetic: of the attention and, for the 16-bit ones, of all matrix products. "fp32"; "bf16", autocast; "fp16", products
            rounded to float16 (and infinite beyond 65504) with a float32 softmax that subtracts the maximum; "fp16_safe", the
            same with a softmax in 16 bits; "fp16_naive" and "bf16_naive", one in 16 bits that does not subtract the maximum.
        loss_scale: factor on the loss before the backward pass; "dynamic" halves it at an overflow and doubles it after
            200 steps without one.
    """

    arithmetic: Arithmetic = "fp32"
    loss_scale: Positive | Literal["dynamic"] = 1.0


class Optimiser(_Section):
    """How it is trained.

    Attributes:
        name: "adamw", "sgd" (momentum 0.9) or "muon" (on the matrices of the blocks; AdamW on the rest).
        learning_rate, warmup: highest rate, and the steps in which it rises to it from 0.
        decay: "cosine" to a twentieth, which the step after the last one would have, or "none".
        weight_decay, gradient_clip: as usual; None: no clipping.
        qk_clip: threshold of `attemper.QKClip`; None: none.
    """

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    learning_rate: Positive = 3e-3
    warmup: FromZero = 20
    decay: Literal["cosine", "none"] = "cosine"
    weight_decay: NotNegative = 0.1
    gradient_clip: Positive | None = 1.0
    qk_clip: Positive | None = None


class After(_Section):
    """What is measured when the training is over; each gives a validation loss.

    Attributes:
        logit_factors: κ, each multiplies scale·q·k in every layer of the trained model, before a cap.
        lengths: of the examples, instead of that of the training.
    """

    logit_factors: tuple[Positive, ...] = ()
    lengths: tuple[Count, ...] = ()


class RunConfig(_Section):
    """One run.

    Attributes:
        task, model, precision, optimiser, after: its parts.
        steps, batch: how many, and examples in each.
        seed: of the weights and of the order of the examples.
        evaluate_every: steps from one validation loss to the next; also at the last step.
        log_every: steps from one record of the statistics to the next.
        threads: of the arithmetic; more than one add in another order, and so give another curve.
    """

    task: Task = Task()
    model: Model = Model()
    precision: Precision = Precision()
    optimiser: Optimiser = Optimiser()
    after: After = After()
    steps: Count = 300
    batch: Count = 32
    seed: FromZero = 0
    evaluate_every: Count = 50
    log_every: Count = 10
    threads: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1  # where the system has no more, OpenMP ends the process
