"""Looks at a checkpoint folder before anything else reads it. A checkpoint is hostile input:

- no file outside the folder is opened: shard names are plain, links may not lead out, only regular files count;
- nothing in it runs: safetensors unless pickle is allowed, and then only pickle in stored (not compressed) archives;
- nothing in it makes us allocate what the files do not hold: headers are capped, and must agree with the size of their file.
"""

import json
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attemper.errors import LoadError

CONFIG = "config.json"
SAFE_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLE_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")

# The format's own cap is 100 MB, which takes Python seconds and gigabytes to parse; the largest shards in use have 2 MB.
MAX_HEADER_BYTES = 32 * 1024 * 1024
MAX_JSON_BYTES = 64 * 1024 * 1024
# What transformers reads beside the weights: the largest tokenizer.json in use has 35 MB.
MAX_OTHER_BYTES = 256 * 1024 * 1024
MAX_TENSORS = 200_000
MAX_DIMENSIONS = 64

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


_READ = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".vocab")


@dataclass(frozen=True)
class Checkpoint:
    """A folder that may be loaded.

    Attributes:
        folder: where it is; config: what config.json says.
        pickled: whether the weights are pickle (and that was allowed).
        elements: how many numbers the weight files hold; for pickle their bytes, which is more.
        files: the weight files, if they are safetensors.
    """

    folder: Path
    config: dict[str, Any]
    pickled: bool
    elements: int
    files: tuple[Path, ...] = ()


def open_checkpoint(folder: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Look at a folder with Hugging Face's file names and decide whether it may be loaded.

    Raises:
        LoadError: it is missing, incomplete, unsafe, or its files are not what they claim to be.
    """
    if not folder.exists():
        raise LoadError(f"{folder}: no such folder; expected one with {CONFIG} and {SAFE_WEIGHTS[0]}")
    if not folder.is_dir():
        raise LoadError(f"{folder} is a file; expected the folder that holds it, with {CONFIG} beside the weights")
    if not (folder / CONFIG).is_file():
        raise LoadError(
            f"{folder} has no {CONFIG}; expected a folder in Hugging Face's layout, or package.module:factory for other models"
        )
    _check_others(folder)
    config = read_json(inside(folder, CONFIG))
    if (folder / "adapter_config.json").exists():
        raise LoadError(f"{folder} holds an adapter (adapter_config.json); merge it into its base model and check the result")
    named = config.get("transformers_weights")
    if named is not None and named not in SAFE_WEIGHTS:
        raise LoadError(
            f"{folder / CONFIG} sends the reader to other weights ({named!r}); expected {SAFE_WEIGHTS[0]} in the folder itself"
        )
    safe = [name for name in SAFE_WEIGHTS if (folder / name).exists()]
    if safe:
        elements, files = _elements(folder, safe[0])
        return Checkpoint(folder, config, pickled=False, elements=elements, files=files)
    pickled = [name for name in PICKLE_WEIGHTS if (folder / name).exists()]
    if not pickled:
        raise LoadError(f"{folder} has no weights: looked for {', '.join(SAFE_WEIGHTS + PICKLE_WEIGHTS)}")
    if not allow_pickle:
        raise LoadError(
            f"{folder} has its weights as pickle only ({pickled[0]}), and reading pickle can run code; "
            "convert them to safetensors, or pass --allow-pickle if you trust them"
        )
    files = _weight_files(folder, pickled[0], ".bin")
    for file in files:
        _check_pickle(file)
    return Checkpoint(folder, config, pickled=True, elements=sum(file.stat().st_size for file in files))


def weight_files(checkpoint: Checkpoint) -> list[Path]:
    """The files that hold the weights: one, or the shards that an index lists.

    Raises:
        LoadError: they are gone, or are not what they were when the folder was opened.
    """
    names, suffix = (PICKLE_WEIGHTS, ".bin") if checkpoint.pickled else (SAFE_WEIGHTS, ".safetensors")
    used = next((name for name in names if (checkpoint.folder / name).exists()), names[0])
    return _weight_files(checkpoint.folder, used, suffix)


def safetensors_elements(file: Path) -> dict[str, int]:
    """Read the header of a safetensors file and hold it against the file's size.

    Returns:
        How many numbers each tensor has.

    Raises:
        LoadError: truncated, oversized, or its header does not fit the file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        if len(head) < 8:
            raise LoadError(f"{file} is truncated: {size} bytes, expected a safetensors file")
        (length,) = struct.unpack("<Q", head)
        if length > MAX_HEADER_BYTES:
            raise LoadError(
                f"{file} claims a header of {length} bytes; at most {MAX_HEADER_BYTES} are accepted, is it a safetensors file?"
            )
        if length > size - 8:
            raise LoadError(f"{file} is truncated: its header should have {length} bytes, the file has {size}")
        header = parse_json(stream.read(length), file, "header")
    return _check_header(header, size - 8 - length, file)


def inside(folder: Path, name: str) -> Path:
    """The file of that name in the folder, if it is a regular file that really lies there.

    Links are followed as far as they stay in the folder, or in the repository of a Hub cache that the folder is a snapshot of.

    Raises:
        LoadError: the name is not a plain one, or the file is missing, leads elsewhere, or is not regular.
    """
    if not name or name in (".", "..") or any(c in name for c in "/\\\0:") or not name.isprintable():
        raise LoadError(f"{folder} names the file {name!r}; expected a plain file name inside the folder")
    file = folder / name
    try:
        real = file.resolve(strict=True)
    except (OSError, RuntimeError):
        raise LoadError(f"{file} does not exist; expected a regular file") from None
    root = _root(folder)
    if not real.is_relative_to(root):
        raise LoadError(f"{file} is a link that leads out of the folder; expected a file inside it")
    if not real.is_file():
        raise LoadError(f"{file} is not a regular file")
    return file


def path_of(name: str) -> Path:
    """The path that a user typed, "~" expanded where there is such a home."""
    path = Path(name)
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        LoadError: too large, not JSON, or not an object.
    """
    size = file.stat().st_size
    if size > MAX_JSON_BYTES:
        raise LoadError(f"{file} has {size} bytes; at most {MAX_JSON_BYTES} are accepted")
    return parse_json(file.read_bytes(), file, "contents")


def parse_json(raw: bytes, file: Path, what: str) -> dict[str, Any]:
    """The object that is written there.

    Args:
        raw: JSON. file: where it stands, and what: which part of the file it is, for the message.

    Raises:
        LoadError: not JSON, not an object, or a name is given twice, where readers differ in which they take.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            raise LoadError(f"{file} gives a name twice in its {what}")
        return entries

    try:
        value = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise LoadError(f"{file} is damaged: its {what} cannot be read as JSON") from None
    if not isinstance(value, dict):
        raise LoadError(f"{file} is damaged: its {what} should be a JSON object, found {type(value).__name__}")
    return value


def _check_others(folder: Path) -> None:
    """Hold what lies beside the weights to the same rules: transformers reads configurations, tokenizers and templates too."""
    root = _root(folder)
    for place in (folder, folder / "additional_chat_templates"):
        for entry in place.iterdir() if place.is_dir() else ():
            if entry.is_symlink() and entry.exists() and not entry.resolve().is_relative_to(root):
                raise LoadError(f"{entry} is a link that leads out of the folder; expected a file inside it")
            if entry.suffix in _READ and entry.is_file() and entry.stat().st_size > MAX_OTHER_BYTES:
                raise LoadError(f"{entry} has {entry.stat().st_size} bytes; at most {MAX_OTHER_BYTES} are accepted")


def _root(folder: Path) -> Path:
    real = folder.resolve()
    # A Hub cache keeps files as links from models--org--name/snapshots/<revision>/ into models--org--name/blobs/.
    repository = real.parent.parent
    if real.parent.name == "snapshots" and repository.name.startswith("models--") and (repository / "blobs").is_dir():
        return repository
    return real


def _weight_files(folder: Path, name: str, suffix: str) -> list[Path]:
    """The files that `name` stands for: itself, or the shards that it, an index, lists."""
    file = inside(folder, name)
    if not name.endswith(".index.json"):
        return [file]
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise LoadError(f"{file} has no usable weight_map; expected tensor names and the shards that hold them")
    if len(weight_map) > MAX_TENSORS:
        raise LoadError(f"{file} lists {len(weight_map)} tensors; at most {MAX_TENSORS} are accepted")
    shards = []
    for shard in sorted(set(weight_map.values())):
        if not shard.endswith(suffix):
            raise LoadError(f"{file} names the shard {shard!r}; expected file names that end in {suffix}")
        shards.append(inside(folder, shard))
    return shards


def _elements(folder: Path, name: str) -> tuple[int, tuple[Path, ...]]:
    files = _weight_files(folder, name, ".safetensors")
    held: dict[str, dict[str, int]] = {file.name: safetensors_elements(file) for file in files}
    if name.endswith(".index.json"):
        for tensor, shard in read_json(folder / name)["weight_map"].items():
            if tensor not in held[shard]:
                raise LoadError(f"{folder / name} says that {shard} holds {tensor!r}, but it does not")
    owner: dict[str, str] = {}
    for shard, tensors in held.items():
        for tensor in tensors:
            if owner.setdefault(tensor, shard) != shard:
                raise LoadError(f"{folder}: {tensor!r} is in two shards, {owner[tensor]} and {shard}; expected it in one")
    return sum(sum(tensors.values()) for tensors in held.values()), tuple(files)


def _check_header(header: dict[str, Any], data_bytes: int, file: Path) -> dict[str, int]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise LoadError(f"{file} has a header whose __metadata__ is not an object")
    if len(header) > MAX_TENSORS:
        raise LoadError(f"{file} lists {len(header)} tensors; at most {MAX_TENSORS} are accepted")
    spans, elements = [], {}
    for name, entry in header.items():
        try:
            bits, shape, (begin, end) = _BITS[entry["dtype"]], entry["shape"], entry["data_offsets"]
            whole = all(type(number) is int and number >= 0 for number in [*shape, begin, end])
        except (KeyError, TypeError, ValueError):
            whole, bits, shape, begin, end = False, 8, [], 0, 0
        if not whole or len(shape) > MAX_DIMENSIONS:
            raise LoadError(f"{file} has a header entry that cannot be read: {name!r}")
        count = 1
        for length in shape:
            count *= length
        if not begin <= end <= data_bytes:
            raise LoadError(f"{file} is truncated or lies: {name!r} should end at byte {end} of {data_bytes}")
        if count * bits != (end - begin) * 8:
            raise LoadError(f"{file} lies about {name!r}: shape {shape} of {entry['dtype']} does not fill {end - begin} bytes")
        spans.append((begin, end, name))
        elements[name] = count
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise LoadError(f"{file} lies about {name!r}: its bytes begin at {begin}, expected {position}")
        position = end
    if position != data_bytes:
        raise LoadError(f"{file} has {data_bytes} bytes of tensors, its header accounts for {position}")
    return elements


def _check_pickle(file: Path) -> None:
    if not zipfile.is_zipfile(file):  # the older format, read by torch with weights_only=True as well
        return
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    if len(entries) > MAX_TENSORS:
        raise LoadError(f"{file} has {len(entries)} entries; at most {MAX_TENSORS} are accepted")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise LoadError(f"{file} is a compressed archive, which can unpack to any size; expected what torch.save writes")
