"""A sweep on a Ray cluster: Ray Tune deals the runs out, each is trained as here, into the same files."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from attemper.clusters import ray_cluster
from attemper.errors import LoadError, MissingExtraError
from attemper.lab.config import RunConfig
from attemper.lab.events import Event, Tell
from attemper.lab.identity import run_id
from attemper.lab.store.files import RunFiles
from attemper.lab.training import train


def on_ray(address: str, folder: Path, todo: Sequence[RunConfig], tell: Tell) -> None:
    """Train the runs on the cluster.

    Args:
        address: of the cluster; "local" starts one on this machine.
        folder: of the sweep, which all nodes see under this name.
        todo: the runs.
        tell: told of each run that is over, when all are.

    Raises:
        MissingExtraError: Ray is not installed. LoadError: the cluster cannot be reached, or a run failed there.
    """
    purpose, place = "run a sweep on a Ray cluster", folder.resolve()
    by_id = {run_id(config): config for config in todo}
    texts = {name: config.model_dump_json() for name, config in by_id.items()}
    with ray_cluster(address, purpose):
        try:
            from ray import tune
        except ImportError:  # Ray alone lacks what its Tune needs
            raise MissingExtraError("ray[tune]", "ray", purpose) from None
        given = {"folder": str(place), "texts": texts, "began_in": str(Path.cwd())}
        trainable = tune.with_resources(tune.with_parameters(train_there, **given), {"cpu": 1})
        tuner = tune.Tuner(
            trainable,
            param_space={"run": tune.grid_search(list(by_id))},
            run_config=tune.RunConfig(storage_path=str(place / "ray"), name="tune", verbose=0),
        )
        failed = [str(error) for error in tuner.fit().errors]
    for name, config in by_id.items():
        result = RunFiles(folder, name).result()
        if result is not None:
            tell(Event(name, result.ended + 1, config.steps, result.loss, over=True))
    if failed:
        last = failed[0].strip().splitlines()[-1]
        raise LoadError(f"ray: {len(failed)} of {len(todo)} runs failed, the first with: {last}; the others are kept")


def train_there(config: dict[str, str], folder: str, texts: dict[str, str], began_in: str) -> dict[str, float]:
    """Train one run in a process of the cluster.

    Args:
        config: what Tune gives: "run", the run's id.
        folder: of the sweep, absolute.
        texts: the configurations as JSON, by id.
        began_in: the folder that relative paths to an own text start from. Tune makes each trial's own folder the current one.

    Returns:
        The loss, for Tune.
    """
    # On another machine there may be no such folder.
    there = contextlib.chdir(began_in) if Path(began_in).is_dir() else contextlib.nullcontext()
    with there:
        result = train(RunConfig.model_validate_json(texts[config["run"]]), Path(folder))
    return {"loss": result.loss}
