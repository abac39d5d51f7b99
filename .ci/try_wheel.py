"""Build the sdist and, from it, the wheel; look into both; use the wheel beside torch alone, then beside its `cli` extra.

The bare environment borrows torch and the other packages from the environment that runs this, one link for each of their files,
so that nothing is downloaded twice and nothing that attemper does not require can be imported.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
IN_SDIST = {
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "PKG-INFO", "README.md", "constraints.txt", "pyproject.toml"),
    *("CMakeLists.txt", "benchmarks", "csrc", "docs", "examples", "scripts", "src", "tests"),
}


def main() -> None:
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", str(dist), str(ROOT), quiet=True)
    (sdist,) = dist.glob("*.tar.gz")
    (wheel,) = dist.glob("*.whl")
    look_into(sdist, wheel)
    with tempfile.TemporaryDirectory() as folder:
        use(wheel, Path(folder) / "venv")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, works beside torch alone and with its cli extra")


def look_into(sdist: Path, wheel: Path) -> None:
    """The sdist holds nothing that was not meant; the wheel holds the package, all of it, and nothing else."""
    with tarfile.open(sdist) as archive:
        in_sdist = [Path(*Path(name).parts[1:]) for name in archive.getnames()]
    stray = sorted({path.parts[0] for path in in_sdist if path.parts} - IN_SDIST)
    require(
        not stray,
        f"{sdist.name} holds {stray}; leave it out (sdist.exclude in pyproject.toml) or name it in {Path(__file__).name}",
    )
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {Path(name) for name in archive.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    expected = {Path(name).relative_to("src") for name in tracked}
    require(expected <= in_wheel, f"{wheel.name} lacks {sorted(map(str, expected - in_wheel))}")
    kernel = {path for path in in_wheel if path.match("attemper/kernels/_cpu.abi3.*")}
    require(len(kernel) == 1, f"{wheel.name} lacks the compiled kernel")
    stray = in_wheel - kernel - expected
    require(not stray, f"{wheel.name} holds {sorted(map(str, stray))}, which git does not know")
    require(any(path.suffix == ".safetensors" for path in in_wheel), f"{wheel.name} lacks the weights of the example models")
    require("-cp311-abi3-" in wheel.name, f"{wheel.name} is not one wheel for every Python from 3.11 on")


def use(wheel: Path, folder: Path) -> None:
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(run(str(python), "-c", "import site; print(site.getsitepackages()[0])").strip())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    link("torch", (), site)
    link("nanobind-backend", (), site)
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import torch, attemper\n"
        "q = torch.randn(1, 2, 5, 16)\n"
        "output, rows = attemper.attention(q, q, q, return_stats=True, impl='cpu')\n"
        "assert output.shape == q.shape and rows.max.shape == (1, 2, 5) and attemper.__doc__"
    )
    run(str(python), "-c", code)
    said = run(str(python), "-W", "ignore", "-m", "attemper", "info", code=2)
    require(
        "pip install 'attemper[cli]'" in said and said.count("\n") == 1,
        f"without its extra the command should name it, but says:\n{said}",
    )
    link("attemper", ("cli",), site)
    for model, code in (("unscaled", 1), ("scaled", 0)):
        run(str(python), "-m", "attemper", "check", f"attemper.examples:{model}", code=code)


def link(name: str, extras: tuple[str, ...], site: Path) -> None:
    """Link a package and everything that it requires, from here into `site`."""
    for package in closure(name, extras, set()):
        for top in {file.parts[0] for file in package.files or () if file.parts[0] != ".."}:
            target = site / top
            if (
                not target.exists()
                and not top.endswith((".pth", ".pyc"))
                and top != "__pycache__"
                and not top.startswith("_editable_")
            ):
                target.symlink_to(Path(str(package.locate_file(top))).resolve())


def closure(name: str, extras: tuple[str, ...], seen: set[tuple[str, tuple[str, ...]]]) -> Iterator[Distribution]:
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    package = distribution(name)
    if name != "attemper":
        yield package
    for line in package.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield from closure(requirement.name, tuple(sorted(requirement.extras)), seen)


def run(*command: str, code: int = 0, quiet: bool = False) -> str:
    done = subprocess.run(
        command, check=False, cwd=tempfile.gettempdir(), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    require(
        done.returncode == code, f"{' '.join(command)}\nexit code {done.returncode}, expected {code}\n{done.stdout}{done.stderr}"
    )
    return "" if quiet else done.stdout + done.stderr


def require(condition: bool, message: str) -> None:
    if not condition:
        sys.exit(message)


if __name__ == "__main__":
    main()
