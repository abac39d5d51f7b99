"""The example models as they ship: what they are, what their attention does, and what happens when their files are not right."""

import json
import math
import pickle
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attemper import examples
from attemper.errors import LoadError, MissingExtraError
from attemper.examples.decoder import CausalSelfAttention, Decoder, rotate
from attemper.examples.figures import HeadFigures, measure, next_byte_loss
from attemper.examples.provenance import Provenance
from attemper.examples.summary import summary
from attemper.examples.weights import load, save

FACTORIES = {"scaled": examples.scaled, "unscaled": examples.unscaled}
HEAD_WIDTH = 64


@pytest.fixture(scope="module")
def models() -> dict[str, Decoder]:
    return {name: factory() for name, factory in FACTORIES.items()}


@pytest.fixture(scope="module")
def figures(models: dict[str, Decoder]) -> dict[str, list[HeadFigures]]:
    torch.set_num_threads(1)
    return {name: measure(model, model.example_inputs()["input_ids"]) for name, model in models.items()}


def record(model: Decoder) -> Provenance:
    assert model.provenance is not None
    return model.provenance


# What they are


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_gives_a_model_ready_to_use(models: dict[str, Decoder], name: str) -> None:
    model = models[name]
    assert not any(module.training for module in model.modules())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    attention = [module for module in model.modules() if isinstance(module, CausalSelfAttention)]
    assert [module.head_dim for module in attention] == [HEAD_WIDTH] * 4
    input_ids = model.example_inputs()["input_ids"]
    assert input_ids.dtype == torch.int64
    assert model(**model.example_inputs()).shape == (*input_ids.shape, 256)


def test_modules_have_the_usual_names(models: dict[str, Decoder]) -> None:
    names = {name for name, _ in models["scaled"].named_modules()}
    assert {f"blocks.{layer}.attention.{side}_proj" for layer in range(4) for side in "qkvo"} <= names


def test_the_weights_take_three_megabytes_at_most() -> None:
    assert sum(path.stat().st_size for path in examples.FOLDER.iterdir() if path.is_file()) <= 3_000_000


class Scales(TorchFunctionMode):
    """Collects the `scale` that reaches `F.scaled_dot_product_attention`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[object] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.found.append(kwargs["scale"])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "scale"), [("scaled", 1 / math.sqrt(HEAD_WIDTH)), ("unscaled", 1.0)])
def test_every_layer_multiplies_by_the_factor_of_its_name(models: dict[str, Decoder], name: str, scale: float) -> None:
    with Scales() as scales, torch.no_grad():
        models[name](**models[name].example_inputs())
    assert scales.found == [scale] * 4
    assert record(models[name]).scale == scale


@pytest.mark.parametrize("name", FACTORIES)
def test_no_position_sees_a_later_one(models: dict[str, Decoder], name: str) -> None:
    input_ids = models[name].example_inputs()["input_ids"][:1, :23]
    changed = input_ids.clone()
    changed[:, 17] = ord("#")
    with torch.no_grad():
        before, after = models[name](input_ids), models[name](changed)
    assert torch.equal(before[:, :17], after[:, :17])
    assert ((before - after)[:, 17:].abs().amax(-1) > 0).all()


def test_rotated_products_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(2, 1, 1, 1, 10, dtype=torch.float64)
    products = rotate(query.expand(1, 1, 13, 10)) @ rotate(key.expand(1, 1, 13, 10)).mT
    for distance in range(-12, 13):
        diagonal = products[0, 0].diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert products[0, 0, 0].std() > 0.1


# How they were made


def test_provenance_says_how_to_make_them_again(models: dict[str, Decoder]) -> None:
    for model in models.values():
        assert re.fullmatch(r"[0-9a-f]{64}", record(model).text_sha256)
        assert record(model).command == "attemper lab run examples --out DIR"
    own = {"scale", "train_loss", "validation_loss", "passage_loss"}
    scaled, unscaled = (vars(record(models[name])) for name in FACTORIES)
    assert {name for name in scaled if scaled[name] != unscaled[name]} == own, "they differ in more than the factor"


def test_the_document_beside_the_weights_says_the_same(models: dict[str, Decoder]) -> None:
    text = (examples.FOLDER / "PROVENANCE.md").read_text("utf-8")
    for name, model in models.items():
        made = record(model)
        losses = f"{made.train_loss:.4f} | {made.validation_loss:.4f} | {made.passage_loss:.4f}"
        assert f"| {name} | {made.scale:g} | {losses} |" in text
        assert made.text_sha256 in text
        assert f"seed {made.seed}" in text
        assert f"{made.steps} steps of {made.batch} × {made.context}" in text


def test_the_head_of_the_document_is_what_is_written_of_these_models(models: dict[str, Decoder]) -> None:
    text = (examples.FOLDER / "PROVENANCE.md").read_text("utf-8")
    written = summary(models, models["scaled"].example_inputs()["input_ids"][:1, :7])
    assert text.partition("\n## scaled")[0] == written.partition("\n## scaled")[0]


@pytest.mark.parametrize("name", FACTORIES)
def test_the_loss_on_the_passage_is_the_recorded_one(models: dict[str, Decoder], name: str) -> None:
    with torch.no_grad():
        loss = next_byte_loss(models[name], models[name].example_inputs()["input_ids"]).item()
    assert loss == pytest.approx(record(models[name]).passage_loss, abs=2e-4)


# What they show


def test_scaling_gives_the_lower_loss(models: dict[str, Decoder]) -> None:
    scaled, unscaled = (record(models[name]) for name in FACTORIES)
    assert scaled.validation_loss < unscaled.validation_loss - 0.1
    assert scaled.train_loss < unscaled.train_loss - 0.1
    assert scaled.passage_loss < unscaled.passage_loss - 0.05


def test_the_scaled_heads_are_healthy(figures: dict[str, list[HeadFigures]]) -> None:
    # Half would be the median row. One head of the last layer, which looks at a byte and the one before, is near an eighth.
    assert max(head.saturated for head in figures["scaled"]) < 0.25
    assert sum(head.saturated for head in figures["scaled"]) / 8 < 0.05
    assert max(head.logit_max for head in figures["scaled"]) < 50
    assert min(head.gain for head in figures["scaled"]) > 0.2


def test_the_unscaled_heads_are_saturated(figures: dict[str, list[HeadFigures]]) -> None:
    assert min(head.saturated for head in figures["unscaled"]) > 0.2
    assert sum(head.saturated > 0.5 for head in figures["unscaled"]) == 6
    assert sum(head.gain < 0.15 for head in figures["unscaled"]) == 6
    assert all(other.logit_std > 2 * own.logit_std for own, other in zip(figures["scaled"], figures["unscaled"], strict=True))


def test_figures_agree_with_a_row_by_row_definition(models: dict[str, Decoder]) -> None:
    model = models["scaled"]
    # The loss needs a byte after the last one that attention sees.
    input_ids = model.example_inputs()["input_ids"][:1, :12]
    rows = list(rows_of_the_last_layer(model, input_ids[:, :11]))
    for head in range(2):
        logits = [value for position in range(11) for value in rows[position][head]]
        weights = [softmax(rows[position][head]) for position in range(1, 11)]
        got = measure(model, input_ids)[3 * 2 + head]
        assert got.logit_max == pytest.approx(max(logits), abs=1e-4)
        mean = sum(logits) / len(logits)
        assert got.logit_std == pytest.approx(math.sqrt(sum((z - mean) ** 2 for z in logits) / (len(logits) - 1)), rel=1e-4)
        assert got.saturated == sum(max(row) > 0.99 for row in weights) / 10
        entropies = [-sum(p * math.log(p) for p in row) / math.log(len(row)) for row in weights]
        assert got.entropy == pytest.approx(sum(entropies) / 10, abs=1e-4)
        assert got.gain == pytest.approx(sum(1 - sum(p * p for p in row) for row in weights) / 10, abs=1e-4)


def rows_of_the_last_layer(model: Decoder, input_ids: Tensor) -> Iterator[list[list[float]]]:
    """For each query, for each head, its visible logits: taken from what reaches the attention function."""
    seen: list[tuple[Tensor, Tensor, float]] = []

    class Keep(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.nn.functional.scaled_dot_product_attention:
                seen.append((args[0], args[1], kwargs["scale"]))
            return func(*args, **(kwargs or {}))

    with Keep(), torch.no_grad():
        model(input_ids)
    query, key, scale = seen[-1]
    for position in range(input_ids.shape[1]):
        yield [
            [
                scale * sum(a * b for a, b in zip(query[0, head, position].tolist(), key[0, head, other].tolist(), strict=True))
                for other in range(position + 1)
            ]
            for head in range(query.shape[1])
        ]


def softmax(logits: list[float]) -> list[float]:
    largest = max(logits)
    powers = [math.exp(logit - largest) for logit in logits]
    return [power / sum(powers) for power in powers]


def test_measuring_leaves_nothing_behind(models: dict[str, Decoder]) -> None:
    model = models["unscaled"]
    measure(model, model.example_inputs()["input_ids"][:1, :7])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


# Files that are not right


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"gone\.safetensors: no such file; .*attemper lab run examples"):
        load(tmp_path / "gone.safetensors")


@pytest.mark.parametrize("kept", [0, 7, 1000, 100_000])
def test_a_file_cut_short_is_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes((examples.FOLDER / "scaled.safetensors").read_bytes()[:kept])
    with pytest.raises(LoadError, match=r"short\.safetensors: not the weights of an example model \(.+\); install") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_other_tensors_are_refused(tmp_path: Path, models: dict[str, Decoder]) -> None:
    other = Decoder(0.5)
    other.blocks = other.blocks[:3]
    save(other, tmp_path / "three.safetensors", record(models["scaled"]))
    with pytest.raises(LoadError, match=r"three\.safetensors: .*blocks\.3\.attention"):
        load(tmp_path / "three.safetensors")


@pytest.mark.parametrize(
    ("metadata", "cause"),
    [
        (None, "'null'"),
        ({"provenance": "[]"}, r"'\[\]'"),
        ({"provenance": "{"}, "property name"),
        ({"provenance": "SCALE"}, "'1/8'"),
    ],
)
def test_a_file_without_provenance_is_refused(
    tmp_path: Path, models: dict[str, Decoder], metadata: dict[str, str] | None, cause: str
) -> None:
    from safetensors.torch import save_file

    if metadata == {"provenance": "SCALE"}:
        metadata = {"provenance": json.dumps(vars(record(models["scaled"])) | {"scale": "1/8"})}
    save_file(models["scaled"].state_dict(), tmp_path / "bare.safetensors", metadata=metadata)
    with pytest.raises(LoadError, match=rf"bare\.safetensors: .*{cause}"):
        load(tmp_path / "bare.safetensors")


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_in_disguise_is_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "pickle.safetensors").write_bytes(pickle.dumps(Payload(ran)))
    torch.save({"weights": Payload(ran)}, tmp_path / "zip.safetensors")
    for name in ("pickle", "zip"):
        with pytest.raises(LoadError, match=rf"{name}\.safetensors: not the weights of an example model"):
            load(tmp_path / f"{name}.safetensors")
    assert not ran.exists()
    pickle.loads((tmp_path / "pickle.safetensors").read_bytes())
    assert ran.exists(), "the payload would not have done anything"


@pytest.mark.parametrize("name", FACTORIES)
def test_without_safetensors_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingExtraError, match=r"safetensors is needed to read .*pip install 'attemper\[examples\]'"):
        FACTORIES[name]()


def test_what_is_saved_is_what_is_loaded(tmp_path: Path, models: dict[str, Decoder]) -> None:
    path = tmp_path / "copy.safetensors"
    shutil.copyfile(examples.FOLDER / "scaled.safetensors", path)
    first = path.read_bytes()
    save(models["scaled"], path, record(models["scaled"]))
    assert path.read_bytes() == first
    assert load(path).provenance == record(models["scaled"])
