"""Reads a checkpoint with transformers, quietly, by the class its configuration names; fetches one from the Hub."""

import contextlib
import re
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from attemper.checker.budget import Budget
from attemper.checker.folder import Checkpoint
from attemper.checker.options import ENDS, Options, one_line
from attemper.checker.stored_dtypes import refuse_integers
from attemper.checker.streaming import hollow_parameters, stream, tensors_of
from attemper.checker.tokenizer_files import hostile
from attemper.errors import AttemperError, LoadError, MissingExtraError, UnsupportedError, in_one_line

# Larger than any model in use; building this many layers of nothing takes seconds.
MAX_LAYERS = 4096
_MODULES = re.compile(r"layer|depth|(num|n)_.*(block|expert|group|stage|codebook|branch)")
# transformers writes a name for each.
MAX_LABELS = 2_000_000
# How far a configuration may exceed what the files hold (by a head that was not saved, say): a factor, and a count. Quantised
# weights are packed: one int32 may hold 32 numbers.
SLACK_FACTOR, SLACK_ELEMENTS, PACKED = 2, 100_000_000, 32


def read(checkpoint: Checkpoint, options: Options) -> tuple[Any, frozenset[str], tuple[str, ...]]:
    """The model of a checkpoint, names of parameters that it lacks, and notes.

    Raises:
        LoadError: transformers cannot read it, it needs its own code, or its configuration describes far more than it holds.
        MissingExtraError: transformers is not installed.
    """
    transformers = _transformers()
    folder = str(checkpoint.folder)
    _check_config(checkpoint)
    shared = {"trust_remote_code": options.trust_remote_code, "local_files_only": True}
    wanted = {None: torch.float32, "auto": "auto"}.get(options.dtype, options.torch_dtype)
    try:
        with quiet(transformers):
            config = transformers.AutoConfig.from_pretrained(folder, **shared)
            model_class, note = _model_class(transformers, config, options)
            _check_size(model_class, config, checkpoint, options)
            streamed = _streamed(model_class, config, checkpoint, options)
            if streamed is not None:
                model, info = streamed
            else:
                model, info = model_class.from_pretrained(
                    folder,
                    config=config,
                    dtype=wanted,
                    use_safetensors=not checkpoint.pickled,
                    weights_only=True,
                    output_loading_info=True,
                    **shared,
                )
    except AttemperError:
        raise
    except Exception as error:
        hint = (
            ""
            if options.trust_remote_code or "trust_remote_code" not in str(error)
            else "; it brings its own code: --trust-remote-code"
        )
        if "ignore_mismatched_sizes" in str(error):  # transformers names the tensors in its log only
            raise LoadError(f"{folder}: the tensors in its weights have other shapes than its config.json asks for") from error
        raise LoadError(f"{folder} could not be loaded: {one_line(error)}{hint}") from error
    if info.get("error_msgs"):
        raise LoadError(f"{folder} could not be loaded: {in_one_line(info['error_msgs'][0])[:300]}")
    unknown = _unknown_quantisation(checkpoint)
    if unknown or not checkpoint.config.get("quantization_config"):
        refuse_integers(model, checkpoint)
    missing = frozenset(info["missing_keys"]) | {entry[0] for entry in info.get("mismatched_keys", ())}
    notes = [each for each in (note, unknown) if each]
    if streamed is not None:
        notes.append("the weights were read from disk block by block, to keep within --max-memory")
    if stored := checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype"):
        computed = str(next((p.dtype for p in model.parameters() if p.is_floating_point()), wanted)).removeprefix("torch.")
        stored = str(stored).removeprefix("torch.")
        if wanted != "auto" and stored != computed:
            notes.append(f"the checkpoint is {stored}; computed in {computed}")
    if options.trust_remote_code and checkpoint.config.get("auto_map"):
        notes.append("code that the checkpoint brings along was run (--trust-remote-code)")
    if missing:
        notes.append(f"{len(missing)} parameters are not in the checkpoint and are random: {_some(missing)}")
    if unexpected := info.get("unexpected_keys"):
        notes.append(f"{len(unexpected)} tensors of the checkpoint are not used by {type(model).__name__}: {_some(unexpected)}")
    return model, missing, tuple(notes)


def fetch(repository: str, options: Options) -> Path:
    """Download what is needed of a Hub repository (or find it in the cache); never code unless remote code is trusted.

    Raises:
        LoadError: it cannot be reached.
        MissingExtraError: huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingExtraError("huggingface_hub", "hf", "fetch a model from the Hugging Face Hub") from None
    patterns = ["*.json", "*.txt", "*.model", "model*.safetensors"]
    if options.trust_remote_code:
        patterns.append("*.py")
    try:
        folder = Path(snapshot_download(repository, allow_patterns=patterns, ignore_patterns=["*/*"]))
        if options.allow_pickle and not any(folder.glob("model*.safetensors")):
            snapshot_download(repository, allow_patterns=["pytorch_model*.bin"])
    except Exception as error:
        raise LoadError(
            f"{repository}: no such folder here, and not to be had from the Hugging Face Hub: {one_line(error)}"
        ) from error
    return folder


def tokenizer(folder: Path, options: Options) -> tuple[Any, str]:
    """The tokenizer of a folder, or None and the reason."""
    transformers = _transformers()
    try:
        if reason := hostile(folder):
            return None, reason
        with quiet(transformers):
            found = transformers.AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=options.trust_remote_code, local_files_only=True
            )
    except ENDS:
        raise
    except BaseException as error:  # noqa: BLE001 - a model without a usable tokenizer is still checked, on random ids
        return None, one_line(error)
    return found, ""


def brings_tokenizer(folder: Path) -> bool:
    """Whether any file of a folder is by its name a tokenizer's; transformers makes an empty one, or fails at length, without."""
    starts, ends = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece"), (".model", ".tiktoken")
    return any(file.name.startswith(starts) or file.name.endswith(ends) for file in folder.iterdir())


@contextlib.contextmanager
def quiet(transformers: Any) -> Generator[None]:
    """Keep transformers' log, progress bars and warnings to itself; what matters in them is in the report's notes."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtraError("transformers", "hf", "load a Hugging Face model") from None
    return transformers


def _unknown_quantisation(checkpoint: Checkpoint) -> str:
    """In words, that transformers passes over the quantisation that the configuration names; "" where it knows it."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    given = checkpoint.config.get("quantization_config")
    given = given if isinstance(given, dict) else {}
    method = given.get("quant_method")
    if (
        method is None
        or str(method) in AUTO_QUANTIZATION_CONFIG_MAPPING
        or given.get("load_in_8bit")
        or given.get("load_in_4bit")
    ):
        return ""
    named = f"config.json names the quantisation {str(method)[:80]!r}"
    return f"{named}, which transformers does not know: the weights were read as plain"


def _model_class(transformers: Any, config: Any, options: Options) -> tuple[Any, str]:
    """The class that the configuration names, heads included, so that every tensor of the checkpoint finds its place."""
    names = list(config.architectures or ())
    auto_map = getattr(config, "auto_map", None) or {}
    remote = [name for name in auto_map if name.startswith("AutoModel")]
    if options.trust_remote_code and remote:
        exact = [name for name in remote if str(auto_map[name]).rpartition(".")[2] in names]
        return getattr(transformers, (exact or remote)[0]), ""
    for name in names:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found, ""
    base = transformers.AutoModel._model_mapping[type(config)]
    base = base[0] if isinstance(base, (tuple, list)) else base
    return base, f"transformers has no class {names[0]!r}; loaded as {base.__name__}" if names else f"loaded as {base.__name__}"


def _check_config(checkpoint: Checkpoint) -> None:
    where = f"{checkpoint.folder}/config.json"
    remaining: list[tuple[str, Any]] = [("", checkpoint.config)]  # a list, not recursion: nesting is up to the file
    while remaining:
        key, value = remaining.pop()
        attention = "attn_implementation" in key
        if isinstance(value, dict):  # one implementation for each part of a model is named by the part
            remaining += [(key if attention else inner, each) for inner, each in value.items()]
        elif isinstance(value, list):
            remaining += [(key, each) for each in value]
        elif type(value) is int and _MODULES.search(key) and value > MAX_LAYERS:
            raise LoadError(f"{where} asks for {key} = {value}; at most {MAX_LAYERS} are accepted")
        elif type(value) is int and key == "num_labels" and value > MAX_LABELS:
            raise LoadError(f"{where} asks for {key} = {value}; at most {MAX_LABELS} are accepted")
        elif attention and isinstance(value, str) and "/" in value:
            raise LoadError(f"{where} names attention code elsewhere ({value!r}); remove {key} to check it")


def _check_size(model_class: Any, config: Any, checkpoint: Checkpoint, options: Options) -> None:
    packed = PACKED if getattr(config, "quantization_config", None) is not None else 1
    with torch.device("meta"):
        skeleton = _built(model_class, config, options)
    described = sum(tensor.numel() for tensor in [*skeleton.parameters(), *skeleton.buffers()])
    if described > SLACK_FACTOR * packed * checkpoint.elements + SLACK_ELEMENTS:
        raise LoadError(
            f"{checkpoint.folder}/config.json describes {described} numbers, but the weight files hold {checkpoint.elements}; "
            "expected a configuration that fits them"
        )


def _built(model_class: Any, config: Any, options: Options, **settings: Any) -> Any:
    if hasattr(model_class, "_from_config"):
        return model_class._from_config(config, **settings)
    # An Auto class; transformers asks on the terminal where it is not told.
    return model_class.from_config(config, trust_remote_code=options.trust_remote_code, **settings)


def _streamed(model_class: Any, config: Any, checkpoint: Checkpoint, options: Options) -> tuple[Any, dict[str, Any]] | None:
    """A model that reads its weights while it runs, and what transformers would say of them; None where it need not.

    Raises:
        UnsupportedError: it must, and cannot.
    """
    if options.max_memory is None:
        return None
    stated = config.dtype or torch.float32 if options.dtype == "auto" else options.torch_dtype or torch.float32
    dtype = getattr(torch, stated) if isinstance(stated, str) else stated
    budget = Budget(options.max_memory, str(checkpoint.folder))
    if budget.room_for_all(checkpoint.elements * dtype.itemsize):
        return None
    if checkpoint.pickled or getattr(config, "quantization_config", None) is not None:
        kind = "pickled" if checkpoint.pickled else "quantised"
        raise UnsupportedError(f"--max-memory: {checkpoint.folder} is {kind}, and only plain safetensors are read block by block")
    with hollow_parameters():
        model = _built(model_class, config, options, dtype=dtype).eval()
    kept = set(model._keep_in_fp32_modules_strict or ()) if dtype.itemsize < 4 else set()
    kept |= set(model._keep_in_fp32_modules or ()) if dtype == torch.float16 else set()
    if kept:
        raise UnsupportedError(
            f"--max-memory: {type(model).__name__} keeps {', '.join(sorted(kept))} in float32, which is not done block by block; "
            "use --dtype float32"
        )
    stored = _stored(model, checkpoint)
    unused = stream(model, stored, dtype, model.base_model_prefix, budget)
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    unexpected = [key for key in unused if not any(re.search(pattern, key) for pattern in ignored)]
    return model, {"missing_keys": (), "unexpected_keys": unexpected}


def _stored(model: Any, checkpoint: Checkpoint) -> dict[str, tuple[Path, str]]:
    """(file, name in it) of each tensor, by the name that transformers gives it.

    Raises:
        UnsupportedError: transformers would make other tensors of them.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = get_model_conversion_mapping(model)
    stored = {}
    for key, file in tensors_of(checkpoint.files):
        name = key
        for conversion in conversions:
            renamed, matched = conversion.rename_source_key(name)
            if matched is not None and hasattr(conversion, "operations"):
                raise UnsupportedError(
                    f"--max-memory: tensors of {type(model).__name__} such as {key} are converted when they are loaded, "
                    "which is not done block by block; check it without --max-memory, or with more"
                )
            name = renamed
        stored[name] = file, key
    return stored


def _some(names: Any, most: int = 3) -> str:
    listed = sorted(map(str, names))
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
