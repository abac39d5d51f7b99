"""What the model is run on: what the user gives, or something sensible and real, always described in words."""

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from attemper.checker import made_up
from attemper.checker.folder import path_of, safetensors_elements
from attemper.checker.load import Subject, call_foreign, import_callable
from attemper.checker.options import ENDS, Options, one_line
from attemper.checker.passage import PASSAGE
from attemper.errors import AttemperError, LoadError, MissingExtraError

MAX_TEXT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Inputs:
    """Arguments for one forward pass.

    Attributes:
        args, kwargs: as the model takes them; description: what they are, in words; notes: what a reader should know.
        part: which passage of a text they are, from 1 (of random ids there are as many as are asked for); 0: none.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    description: str
    notes: tuple[str, ...] = ()
    part: int = 0


def prepare(subject: Subject, given: Any, options: Options) -> Inputs:
    """The inputs that were given, or sensible ones; of a text, the passage that the options name.

    Args:
        given: None, a tensor, a dict of tensors by parameter name, a sequence of positional tensors, or a string: a text file, a
            safetensors file of named tensors, or module:function.

    Raises:
        LoadError: it cannot be read, or there is nothing sensible to run this model on.
    """
    try:
        inputs = _given(subject, given, options) if given is not None else _default(subject, options)
        if options.passages > 1 and not inputs.part:
            raise LoadError(f"inputs: --passages {options.passages} cuts text, and these are {inputs.description}")
        if not inputs.args and subject.config is not None:
            inputs = _completed(subject, inputs)
    except AttemperError:
        raise
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # sizes are whatever config.json says
        raise LoadError(
            f"inputs: none could be made from the configuration of {subject.name}: {one_line(error)}; expected --inputs"
        ) from error
    _check_arguments(subject, inputs)
    return _in_dtype(subject, inputs)


def prepare_all(subject: Subject, given: Any, options: Options) -> tuple[Inputs, ...]:
    """The inputs, one for each run: what was given, each of a list of names or of dicts, or a text cut into passages.

    Raises:
        LoadError: one of them cannot be read, or there is no text to cut into passages.
    """
    several = isinstance(given, list) and len(given) > 0 and all(isinstance(each, (str, os.PathLike, Mapping)) for each in given)
    return tuple(
        prepare(subject, each, replace(options, passage=number))
        for each in (given if several else [given])
        for number in range(options.passages)
    )


def _given(subject: Subject, given: Any, options: Options) -> Inputs:
    if isinstance(given, Tensor):
        return Inputs((given,), {}, f"a tensor of shape {tuple(given.shape)}")
    if isinstance(given, Mapping):
        return Inputs((), dict(given), f"given: {_names(given) or 'nothing'}")
    if isinstance(given, (str, os.PathLike)):
        return _named(subject, os.fspath(given), options)
    if isinstance(given, Sequence):
        return Inputs(tuple(given), {}, f"{len(given)} positional argument{'' if len(given) == 1 else 's'}")
    raise LoadError(f"inputs: got {type(given).__name__}; expected a dict of tensors, a tensor, a tuple of tensors, or a string")


def _named(subject: Subject, given: str, options: Options) -> Inputs:
    path = path_of(given)
    if path.is_file():
        if path.suffix == ".safetensors":
            return Inputs((), _read_tensors(path), f"the tensors of {path.name}")
        return _text(subject, [_read_text(path)], path.name, options)
    if path.exists():
        raise LoadError(f"inputs: {given} is not a file; expected a text file, a .safetensors file, or module:function")
    if ":" in given and not given.startswith((".", "/", "~")):
        returned = call_foreign(import_callable(given, "inputs"), f"inputs {given!r} failed")
        if isinstance(returned, str):
            raise LoadError(f"inputs {given!r} returned text; expected a dict of tensors by parameter name")
        made = _given(subject, returned, options)
        return replace(made, description=f"{given} ({made.description})")
    raise LoadError(f"inputs: {given} does not exist; expected a text file, a .safetensors file, or module:function")


def _default(subject: Subject, options: Options) -> Inputs:
    model, config = subject.model, subject.config
    own = getattr(model, "example_inputs", None)
    if callable(own):
        given = call_foreign(own, f"{subject.name}.example_inputs() failed")
        if isinstance(given, str) or not isinstance(given, (Tensor, Mapping, Sequence)):
            raise LoadError(
                f"{subject.name}.example_inputs() returned {type(given).__name__}; "
                "expected a dict of tensors by parameter name, a tensor, or a tuple of tensors"
            )
        return replace(_given(subject, given, options), description="the model's own example_inputs()")
    if config is None:
        raise LoadError(
            f"inputs: none given, and {subject.name} has no example_inputs(); "
            "expected --inputs, or a model with a method example_inputs that returns a dict of tensors by parameter name"
        )
    wanted = made_up.wanted(model, config)
    if not wanted:
        raise LoadError(
            f"inputs: none given, and none known for {type(model).__name__}; expected --inputs with its tensors by name"
        )
    parts: dict[str, Any] = {}
    words: list[str] = []
    notes: tuple[str, ...] = ()
    if "input_ids" in wanted:
        text = _passage_or_random(subject, options)
        parts, words, notes = dict(text.kwargs), [text.description], text.notes
    batch = parts["input_ids"].shape[0] if parts else 1
    for name in wanted:
        if name != "input_ids":
            parts[name], description = made_up.make(name, model, config, batch)
            words.append(description)
    return Inputs((), parts, "; ".join(words), notes, options.passage + 1 if "input_ids" in wanted else 0)


def _passage_or_random(subject: Subject, options: Options) -> Inputs:
    if subject.folder is None:
        return _random(subject, options, "the model brings no tokenizer")
    try:
        # The second text is shorter, so that a model that pads shows what it does with padding.
        return _text(subject, [PASSAGE, PASSAGE[: len(PASSAGE) // 2]], "the built-in passage", options)
    except _NoTokenizerError as error:
        from attemper.checker.pretrained import brings_tokenizer

        reason = str(error) if brings_tokenizer(subject.folder) else "the folder holds no tokenizer"
        return _random(subject, options, reason)


class _NoTokenizerError(LoadError):
    """There is no tokenizer, or it cannot be meant for this text."""


def _text(subject: Subject, texts: list[str], name: str, options: Options) -> Inputs:
    from attemper.checker.pretrained import tokenizer

    if subject.folder is None:
        raise _NoTokenizerError(
            f"inputs: {name} is text, and {subject.name} brings no tokenizer; expected tensors by parameter name"
        )
    texts = [_passage(each, options, name) for each in texts]
    found, reason = tokenizer(subject.folder, options)
    if found is None:
        raise _NoTokenizerError(f"no tokenizer could be loaded ({reason})")
    limit = min(made_up.longest(subject.model, subject.config), options.max_tokens, _own_limit(found))
    pads = getattr(found, "pad_token_id", None) is not None
    texts = texts if pads else texts[:1]
    try:
        encoded = found(texts, truncation=True, max_length=limit, padding=pads, return_tensors="pt")
        whole = len(found(texts[0], truncation=False, verbose=False)["input_ids"])
    except ENDS:
        raise
    except BaseException as error:
        raise _NoTokenizerError(f"the tokenizer failed ({one_line(error)})") from error
    ids = encoded["input_ids"]
    if ids.shape[-1] > limit:
        raise _NoTokenizerError(f"the tokenizer gives {ids.shape[-1]} tokens where at most {limit} were asked for")
    _check_fits(found, ids, made_up.vocabulary(subject.config), name)
    kwargs = {key: value for key, value in encoded.items() if key in made_up.parameters(subject.model)}
    cut = f", cut from {whole}" if whole > ids.shape[1] else ""
    second = f", with a shorter one padded on the {found.padding_side}" if len(texts) > 1 else ""
    words = f"{name}{_which(options)}, its own tokenizer, {ids.shape[1]} tokens{cut}{second}"
    return Inputs((), kwargs, words, part=options.passage + 1)


def _passage(text: str, options: Options, name: str) -> str:
    """The part of a text that is asked for, cut between words."""
    words = re.findall(r"\s*\S+", text)
    if len(words) < options.passages:
        raise LoadError(f"inputs: {name} has {len(words)} words; --passages {options.passages} needs as many or more")
    start, stop = (len(words) * number // options.passages for number in (options.passage, options.passage + 1))
    return "".join(words[start:stop]) if options.passages > 1 else text


def _check_fits(tokenizer: Any, ids: Tensor, vocabulary: int | None, name: str) -> None:
    """Refuse a tokenizer that cannot be the model's: transformers builds an empty one where files of another kind are missing."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    if ids.numel() == 0 or (unknown is not None and (ids == unknown).double().mean() > 0.5) or len(ids.unique()) < 5:
        raise _NoTokenizerError(f"the tokenizer makes next to nothing but unknown tokens of {name}")
    if vocabulary is not None and int(ids.max()) >= vocabulary:
        raise _NoTokenizerError(f"the tokenizer gives ids up to {int(ids.max())}, the model has {vocabulary}")


def _own_limit(tokenizer: Any) -> int:
    limit = getattr(tokenizer, "model_max_length", None)
    # transformers writes 1e30 where nothing is known.
    return int(limit) if isinstance(limit, (int, float)) and 2 <= limit < 10**9 else 10**9


def _random(subject: Subject, options: Options, reason: str) -> Inputs:
    vocabulary = made_up.vocabulary(subject.config)
    if vocabulary is None:
        raise LoadError(
            f"inputs: none given, {reason}, and the size of its vocabulary is unknown; expected --inputs with tensors by name"
        )
    length = min(made_up.longest(subject.model, subject.config), options.max_tokens, 128)
    kwargs = made_up.token_ids(subject.model, subject.config, vocabulary, length, draw=options.passage)
    notes = (f"inputs are random token ids: {reason}",)
    return Inputs((), kwargs, f"random token ids{_which(options)}, {length} tokens", notes, options.passage + 1)


def _which(options: Options) -> str:
    return f", passage {options.passage + 1} of {options.passages}" if options.passages > 1 else ""


def _completed(subject: Subject, inputs: Inputs) -> Inputs:
    """Give an encoder-decoder something to decode, where only the encoder's side is there."""
    if not getattr(subject.config, "is_encoder_decoder", False) or "decoder_input_ids" not in made_up.parameters(subject.model):
        return inputs
    if any(name in inputs.kwargs for name in ("decoder_input_ids", "decoder_inputs_embeds", "labels")):
        return inputs
    ids = made_up.decoder_ids(subject.config, inputs.kwargs)
    if ids is None:
        return inputs
    kwargs = {**inputs.kwargs, "decoder_input_ids": ids}
    return replace(inputs, kwargs=kwargs, description=f"{inputs.description}; {ids.shape[1]} decoder tokens")


def _check_arguments(subject: Subject, inputs: Inputs) -> None:
    for name, value in [*inputs.kwargs.items(), *enumerate(inputs.args)]:
        if isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any()):
            raise LoadError(f"inputs: {name!r} holds NaN; expected numbers")
    accepted = inspect.signature(subject.model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return
    unknown = [name for name in inputs.kwargs if name not in accepted]
    if unknown:
        raise LoadError(f"inputs: {subject.name} takes no {', '.join(map(repr, unknown))}; it takes {', '.join(accepted)}")


def _in_dtype(subject: Subject, inputs: Inputs) -> Inputs:
    """Floating-point inputs in the dtype of the model's parameters, on their device."""
    first = next((p for p in subject.model.parameters() if p.is_floating_point()), None)
    if first is None:
        return inputs

    def fit(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(first.device, first.dtype) if value.is_floating_point() else value.to(first.device)

    return replace(inputs, args=tuple(map(fit, inputs.args)), kwargs={k: fit(v) for k, v in inputs.kwargs.items()})


def _read_text(path: Path) -> str:
    size = path.stat().st_size
    if size > MAX_TEXT_BYTES:
        raise LoadError(f"inputs: {path} has {size} bytes; at most {MAX_TEXT_BYTES} are read")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise LoadError(
            f"inputs: {path} is not UTF-8 text; expected a text file, or tensors in a file that ends in .safetensors"
        ) from None
    if not text.strip():
        raise LoadError(f"inputs: {path} is empty")
    return text


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise MissingExtraError("safetensors", "hf", "read inputs from a safetensors file") from None
    safetensors_elements(path)
    try:
        return load_file(path)
    except Exception as error:
        raise LoadError(f"inputs: {path} could not be read: {one_line(error)}") from error


def _names(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" if isinstance(value, Tensor) else name for name, value in values.items())
