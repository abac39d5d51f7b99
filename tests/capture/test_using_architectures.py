"""Every architecture of the sweep with its attention replaced: outputs and gradients within the error budget of the model's own
eager attention, weights where they are asked for, generation with a cache, and the way back."""

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from tests.attention_cases import Budget
from tests.capture.architectures import ARCHITECTURES, build
from tests.capture.precision import Exact, doubled, doubled_inputs
from tests.capture.watching import same, tensors

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, about kernels that are not installed

# Those whose eager attention is the model's own code have no other path to compare with, and one calls SDPA alone.
BYPASSING = ("falcon_eager", "bloom", "mpt", "gpt_neo", "xglm", "deberta_v2", "swinv2")  # their code asks no interface
COMPARED = [name for name in ARCHITECTURES if name not in BYPASSING and "eager" in ARCHITECTURES[name].attn]
# Its gradient is NaN where attention gives 0, as ours and SDPA do for positions before the first token; eager gives a mean there.
ZEROS_BREAK = ("gemma3n",)
GENERATING = [name for name in COMPARED if ARCHITECTURES[name].kind in ("decoder", "encoder-decoder", "speech")]


def in_use(name: str, **options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    model, inputs = build(name, **options)
    used = attemper.use(model)
    assert used.replaced
    return model, inputs


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """What the model returns in floating point, at positions that the padding mask keeps."""
    given = model(**inputs)
    mask = inputs.get("attention_mask")
    kept = []
    for tensor in tensors(given):
        if tensor.is_floating_point():
            padded = mask is not None and tensor.ndim == 3 and tensor.shape[:2] == mask.shape
            kept.append(tensor[mask.bool()] if padded and mask is not None else tensor)
    return kept


def loss_of(outputs: list[Tensor]) -> Tensor:
    return torch.stack([tensor.square().mean() for tensor in outputs]).sum()


class Compared(Budget):
    """The budget of a result that is many tensors: each in units of its largest number, and all of them together."""

    def take(self, what: str, ours: list[Tensor], exact: list[Tensor], *peers: list[Tensor]) -> None:
        assert len(ours) == len(exact) > 0
        largest = [float(tensor.abs().max()) for tensor in exact]
        for each, own in zip(zip(ours, exact, *peers, strict=True), largest, strict=True):
            # What is far smaller than the rest, as the gradient of a key's bias, is a sum that cancels: its terms have the size.
            unit = torch.tensor(max(own, 1e-2 * max(largest)))
            self.add(what, *((tensor / unit.to(tensor.dtype)) for tensor in each))


def trained(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs in train mode, and gradients of all parameters."""
    model.train()
    torch.manual_seed(11)  # layers that are dropped in training are the same ones
    found = outputs(model, inputs)
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(loss_of(found), parameters, allow_unused=True)
    return [tensor.detach() for tensor in found], [gradient for gradient in gradients if gradient is not None]


@pytest.mark.parametrize("name", COMPARED)
def test_outputs_and_gradients_are_within_the_error_budget(name: str) -> None:
    budget = Compared()
    for padding, seed in (("right", 7), ("left", 8), ("right", 9)):
        if name in ZEROS_BREAK and padding == "left":
            continue
        eager, inputs = build(name, attn="eager", padding=padding, gain=2.0, seed=seed)
        ours, _ = in_use(name, padding=padding, gain=2.0, seed=seed)
        with Exact():
            exact = trained(doubled(copy.deepcopy(eager)), doubled_inputs(inputs))
        found, peer = trained(ours, inputs), trained(eager, inputs)
        # The same sums in another order: the rows of the batch the other way round.
        turned = trained(eager, {key: tensor.flip(0) for key, tensor in inputs.items()})
        budget.take("outputs", found[0], exact[0], peer[0])
        budget.take("gradients", found[1], exact[1], peer[1], turned[1])
        with torch.no_grad():
            with Exact():
                exact_outputs = outputs(doubled(copy.deepcopy(eager)).eval(), doubled_inputs(inputs))
            budget.take("outputs", outputs(ours.eval(), inputs), exact_outputs, outputs(eager.eval(), inputs))
    budget.check()


def test_at_least_forty_architectures_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{len(COMPARED)} architectures compared, {len(GENERATING)} of them generate\n")
    assert len(COMPARED) >= 40


@pytest.mark.parametrize("name", COMPARED)
def test_all_that_goes_through_a_seam_is_replaced_and_nothing_is_kept(name: str) -> None:
    model, inputs = build(name, padding="right")
    before = {"config": model.config.to_dict(), "name": model.config._attn_implementation}
    with torch.no_grad():
        plain = model(**inputs)
        with attemper.use(model) as used:
            model(**inputs)
        again = model(**inputs)
    modules = 1 if name == "albert" else ARCHITECTURES[name].calls
    assert len(used.replaced) == modules
    assert used.kept == ()
    assert same(plain, again)
    assert {"config": model.config.to_dict(), "name": model.config._attn_implementation} == before
    assert not any(key.startswith("_attemper") for module in model.modules() for key in module.__dict__)


@pytest.mark.parametrize("name", BYPASSING)
def test_own_code_is_kept_with_the_reason(name: str) -> None:
    model, inputs = build(name)
    with torch.no_grad():
        plain = model(**inputs)
        used = attemper.use(model)
        output = model(**inputs)
    assert same(plain, output)
    assert used.replaced == ()
    assert len(used.kept) == (3 if name == "swinv2" else 2)
    assert all("it computes its attention in its own code" in each.reason for each in used.kept)


@pytest.mark.parametrize("name", GENERATING)
def test_generation_with_a_cache_gives_the_same_tokens(name: str) -> None:
    results = []
    for using in (False, True):
        model, inputs = build(name, attn="eager", padding="left", gain=3.0)
        model = doubled(model)
        if using:
            used = attemper.use(model)
        with torch.no_grad(), Exact():
            results.append(
                model.generate(
                    **doubled_inputs(inputs),
                    max_new_tokens=5,
                    do_sample=False,
                    eos_token_id=None,
                    cache_implementation="static" if len(name) % 2 else None,  # half of them, for time
                    output_logits=True,
                    return_dict_in_generate=True,
                )
            )
    plain, ours = results
    assert torch.equal(plain.sequences, ours.sequences)
    assert plain.sequences.shape[1] >= 6
    for one, other in zip(plain.logits, ours.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    assert used.kept == ()


@pytest.mark.parametrize("name", COMPARED)
def test_weights_are_given_where_they_are_asked_for(name: str) -> None:
    results = []
    for using in (False, True):
        model, inputs = build(name, attn="eager")
        if using:
            attemper.use(model)
        with torch.no_grad():
            results.append(model(**inputs, output_attentions=True))
    plain, ours = results
    fields = [field for field in plain if "attentions" in field]
    assert [field for field in ours if "attentions" in field] == fields
    for field in fields:
        for one, other in zip(plain[field], ours[field], strict=True):
            assert one.shape == other.shape
            visible = one.sum(-1) > 0
            mask = inputs.get("attention_mask")
            if mask is not None and one.shape[-2] == mask.shape[-1]:
                visible = visible & mask.bool()[:, None]
            torch.testing.assert_close(one[visible], other[visible], rtol=1e-5, atol=1e-5)
