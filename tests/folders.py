"""Fixtures: checkpoint folders that several tests read and none changes."""

from pathlib import Path

import pytest

from tests import checkpoints


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(checkpoints.llama(), tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(checkpoints.bert(), tmp_path_factory.mktemp("bert") / "model")
