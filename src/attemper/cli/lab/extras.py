"""What the lab needs beyond the command."""

from attemper.errors import require_packages

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
    require_packages(_PACKAGES, "lab", "run the lab")
