"""A Ray cluster, reached and left in one way by whoever has work for it."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Generator
from typing import Any

from attemper.errors import LoadError, MissingExtraError, in_one_line

_SECONDS = 10.0  # that a node may take to answer


@contextlib.contextmanager
def ray_cluster(address: str, purpose: str) -> Generator[Any]:
    """The module `ray`, connected with a cluster while the block runs.

    Args:
        address: of the cluster; "local" starts one on this machine.
        purpose: what Ray is needed for, as a phrase after "to".

    Raises:
        MissingExtraError: Ray is not installed. LoadError: the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "ray", purpose) from None
    _refuse_silent(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise _unreached(address, error) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _refuse_silent(address: str) -> None:
    """Ray itself tries an address for minutes, and then ends the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _unreached(address, error) from error


def _unreached(address: str, error: Exception) -> LoadError:
    said = f"{type(error).__name__}: {in_one_line(error)}"
    return LoadError(f'ray: no cluster could be reached at {address!r}: {said}; expected the address of one, or "local"')
