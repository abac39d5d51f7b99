"""The same checks on a Ray cluster: each is a task that starts the same process on the node that it lands on."""

from collections.abc import Callable, Sequence
from typing import Any

from attemper.checker.many.process import check_one
from attemper.checker.many.records import ModelResult
from attemper.checker.options import one_line
from attemper.clusters import ray_cluster
from attemper.report.records import COULD_NOT_RUN


def on_ray(
    address: str, models: Sequence[str], arguments: Sequence[str], timeout: float | None, tell: Callable[[ModelResult], None]
) -> tuple[ModelResult, ...]:
    """Check each model on the cluster at that address.

    Raises:
        MissingExtraError: Ray is not installed. LoadError: the cluster cannot be reached.
    """
    with ray_cluster(address, "check models on a Ray cluster") as ray:
        # A node that is lost takes its task with it: Ray starts it again elsewhere, once.
        task = ray.remote(num_cpus=1, max_retries=1)(_check)
        waiting = {task.remote(model, tuple(arguments), timeout): place for place, model in enumerate(models)}
        results: dict[int, ModelResult] = {}
        while waiting:
            (ready, *_), _ = ray.wait(list(waiting), num_returns=1)
            place = waiting.pop(ready)
            results[place] = _answer(ray, ready, models[place])
            tell(results[place])
        return tuple(results[place] for place in range(len(models)))


def _check(model: str, arguments: tuple[str, ...], timeout: float | None) -> ModelResult:
    return check_one(model, arguments, timeout, 1, lambda _process: None)


def _answer(ray: Any, reference: Any, model: str) -> ModelResult:
    try:
        return ray.get(reference)
    except Exception as error:  # noqa: BLE001 - whatever became of one task, the others count
        return ModelResult(model, COULD_NOT_RUN, 0.0, error=f"its task failed: {one_line(error)}")
