"""What the lab needs beyond the command."""

import importlib.util

from attemper.errors import MissingExtraError

_PACKAGES = {
    "pydantic": "pydantic",
    "pyarrow": "pyarrow",
    "safetensors": "safetensors",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
}


def require_lab() -> None:
    """Do nothing if the lab can run here.

    Raises:
        MissingExtraError: a package of the extra `lab` is absent.
    """
    for module, package in _PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(package, "lab", "run the lab")
