"""What `attemper info` says: versions, kernels, threads, extras."""

import importlib.metadata
import platform
import sys

import torch

import attemper
from attemper.ops import IMPLEMENTATIONS

EXTRAS = {
    "cli": ("typer", "rich"),
    "hf": ("transformers", "safetensors", "huggingface_hub"),
    "html": ("jinja2", "altair", "vl-convert-python"),
    "ray": ("ray",),
}


def describe() -> list[str]:
    """One line for each thing worth knowing in a bug report."""
    lines = [
        f"attemper {attemper.__version__}",
        f"python {platform.python_version()} on {platform.system()} {platform.machine()}",
        f"torch {torch.__version__}, {torch.get_num_threads()} threads",
        f"accelerator: {_accelerator()}",
    ]
    lines += [f"kernel {each.name}: {'here' if each.kernel else 'absent'}: {each.description}" for each in IMPLEMENTATIONS]
    for extra, packages in EXTRAS.items():
        found = {package: _version(package) for package in packages}
        words = ", ".join(f"{package} {version}" if version else f"{package} missing" for package, version in found.items())
        hint = "" if all(found.values()) else f" (install with: pip install 'attemper[{extra}]')"
        lines.append(f"extra {extra}: {words}{hint}")
    return lines


def _accelerator() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return "none that torch can use"


def _version(package: str) -> str:
    if package in sys.modules and (version := getattr(sys.modules[package], "__version__", None)):
        return str(version)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
