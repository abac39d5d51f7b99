"""Inputs made by code for Hugging Face models: token ids, an image, a sound; their sizes are read from the configuration."""

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import LoadError

SEED = 1706
DECODER_TOKENS = 64
MAX_ELEMENTS = 2**28


def parameters(model: nn.Module) -> frozenset[str]:
    """Names that the model's forward takes."""
    return frozenset(inspect.signature(model.forward).parameters)


def wanted(model: nn.Module, config: Any) -> tuple[str, ...]:
    """Names of the inputs that this model needs, () where we cannot tell."""
    names, main = parameters(model), getattr(model, "main_input_name", "input_ids")
    pair = hasattr(config, "vision_config") and hasattr(config, "text_config") and not _image_token(config)
    if pair and {"input_ids", "pixel_values"} <= names:
        return ("input_ids", "pixel_values")  # two towers, as in CLIP
    return (main,) if main in names and main in ("input_ids", "pixel_values", "input_features", "input_values") else ()


def make(name: str, model: nn.Module, config: Any, batch: int) -> tuple[Tensor, str]:
    """The input of that name (not token ids), and what it is, in words."""
    if name == "pixel_values":
        return _image(getattr(config, "vision_config", config), batch)
    mels = _first(config, "num_mel_bins", "feature_size", "input_feat_per_channel")
    if name == "input_values" and mels is None:
        time = torch.arange(16_000) / 16_000
        wave = torch.sin(2 * math.pi * (200 * time + 900 * time**2)) * (0.5 + 0.5 * torch.sin(2 * math.pi * 3 * time))
        return wave.expand(batch, -1).contiguous(), "one second of a made-up rising tone"
    frames = _first(config, "max_source_positions")
    length = (
        2 * frames
        if frames and name == "input_features" and hasattr(config, "encoder_layers")
        else _first(config, "max_length") or 128
    )
    spectrum = _spectrum(mels or 80, length)
    whisper_like = name == "input_features" and frames is not None
    spectrum = spectrum if whisper_like else spectrum.T
    return spectrum.expand(batch, *spectrum.shape).contiguous(), f"a made-up spectrogram, {mels or 80} bands x {length} frames"


def vocabulary(config: Any) -> int | None:
    """How many token ids there are, None where the configuration does not say."""
    return _first(_text_config(config), "vocab_size")


def longest(model: nn.Module, config: Any) -> int:
    """How many tokens the model can take."""
    config = _text_config(config)
    limit = _first(config, "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length") or 10**9
    # RoBERTa and its kin count positions from the padding id + 1 on.
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            limit = min(limit, module.num_embeddings - module.padding_idx - 1)
            break
    if limit < 2:
        raise LoadError(f"inputs: its configuration says that it takes {limit} tokens; expected 2 or more")
    return limit


def token_ids(model: nn.Module, config: Any, count: int, length: int, draw: int = 0) -> dict[str, Tensor]:
    """Two rows of random ids; the end of the second is padding where the model has a padding id and an attention mask."""
    generator = torch.Generator().manual_seed(SEED + draw)
    ids = torch.randint(0, count, (2, length), generator=generator)
    pad = _first(_text_config(config), "pad_token_id")
    if pad is None or not 0 <= pad < count or count < 3 or "attention_mask" not in parameters(model):
        return {"input_ids": ids[:1]}
    ids = torch.where(ids == pad, (pad + 1) % count, ids)
    mask = torch.ones_like(ids)
    mask[1, length - length // 4 :] = 0
    return {"input_ids": torch.where(mask.bool(), ids, pad), "attention_mask": mask}


def padding_id(config: Any) -> int:
    """What stands at padded positions: the configuration's id, or 0 where it names none."""
    return int(_first(_text_config(config), "pad_token_id") or 0) if config is not None else 0


def decoder_ids(config: Any, given: dict[str, Any]) -> Tensor | None:
    """What to decode: the first text again, behind the start token, or random ids."""
    start = _first(config, "decoder_start_token_id", "bos_token_id", "pad_token_id") or 0
    decoder = getattr(config, "decoder", config)
    most = min(DECODER_TOKENS, _first(decoder, "max_target_positions", "max_position_embeddings") or DECODER_TOKENS)
    encoder_ids = given.get("input_ids")
    count = _first(decoder, "vocab_size") or vocabulary(config)
    batch = next((value.shape[0] for value in given.values() if isinstance(value, Tensor)), 1)
    if encoder_ids is not None and not hasattr(config, "decoder"):
        body = encoder_ids[:1, : most - 1].expand(batch, -1)
    elif count is not None:
        body = torch.randint(0, count, (1, most - 1), generator=torch.Generator().manual_seed(SEED)).expand(batch, -1)
    else:
        return None
    return torch.cat([torch.full((batch, 1), start), body], dim=1)


def _image(config: Any, batch: int) -> tuple[Tensor, str]:
    size = _first(config, "image_size", "input_size") or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = _first(config, "num_channels", "in_channels", "in_chans") or 3
    frames = _first(config, "num_frames") or 0
    _bounded(channels, height, width, frames or 1)
    generator = torch.Generator().manual_seed(SEED)
    y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    planes = []
    for channel in range(channels):
        disc = ((x - 0.3 * channel + 0.2) ** 2 + (y + 0.1 * channel) ** 2 < 0.2).float()
        planes.append(x * (1 - 0.5 * channel) + y * 0.5 + 1.5 * disc + 0.3 * torch.sin(20 * x * (1 + channel)))
    image = torch.stack(planes) + 0.1 * torch.randn(channels, height, width, generator=generator)
    image = (image - image.mean()) / image.std()
    if frames:
        video = torch.stack([image.roll(3 * frame, dims=-1) for frame in range(frames)])
        return video.expand(batch, *video.shape).contiguous(), f"a made-up video, {frames} frames of {height} x {width}"
    return image.expand(batch, *image.shape).contiguous(), f"a made-up image, {height} x {width}"


def _bounded(*shape: int) -> None:
    """Refuse to make what a configuration has no business asking for."""
    if not all(isinstance(size, int) and size > 0 for size in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise LoadError(f"inputs: its configuration asks for an input of {shape} numbers; expected at most {MAX_ELEMENTS} in all")


def _spectrum(bands: int, frames: int) -> Tensor:
    _bounded(bands, frames)
    generator = torch.Generator().manual_seed(SEED)
    band, frame = torch.arange(bands).unsqueeze(1), torch.arange(frames)
    ridge = torch.exp(-(((band - bands * (0.3 + 0.2 * torch.sin(frame / 40))) / 3.0) ** 2))
    return 2 * ridge - 0.5 + 0.1 * torch.randn(bands, frames, generator=generator)


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _image_token(config: Any) -> bool:
    return _first(config, "image_token_id", "image_token_index") is not None


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
