"""Cases of the callbacks on two processes, each of which trains on every second batch under DDP."""

import os
import tempfile
import warnings

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from attemper.monitor import StepRecord, Watch, watch
from attemper.monitor.callbacks.accelerate import AcceleratorLog
from attemper.monitor.callbacks.huggingface import AttemperCallback
from attemper.monitor.callbacks.lightning import AttemperCallback as LightningCallback
from attemper.monitor.clipping import QKClip
from tests.monitor.callbacks.huggingface_loop import trainer_of
from tests.monitor.callbacks.lightning_loop import Module, trained
from tests.monitor.callbacks.training import BATCH, RATE, Counting, assert_same, llama, micro_batches, plain, tokens

if "RANK" in os.environ:  # not where the cases are only listed
    # To all three it says that somebody else starts the processes. Nobody connects to that place: they are joined already.
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated", FutureWarning)


def expected() -> list[StepRecord]:
    """The records of one process that trains on all batches."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return plain(micro_batches(8 * BATCH, 2), clip=5.0, group=alone)


def compare(counting: Counting, within: str = "") -> None:
    """What the first process logged with what one alone does, but for the loss, which is of its own batches."""
    found, wanted = counting.records, expected()
    assert len(found) == (4 if dist.get_rank() == 0 else 0)
    if found:
        for one, other in zip(found, wanted, strict=True):
            assert other.scalars["clipped_heads"] > 0
            one.scalars["loss"] = other.scalars["loss"]
        assert_same(found, wanted, within)


def case_huggingface() -> None:
    counting = Counting()
    with tempfile.TemporaryDirectory() as folder:
        callback = AttemperCallback(clip=5.0, trackers=counting)
        trainer = trainer_of(folder, callback, gradient_accumulation_steps=1, ddp_backend="gloo")
        trainer.train()
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        assert Watch.of(trainer.model) is None
        compare(counting)


def case_huggingface_stops_everywhere() -> None:
    with tempfile.TemporaryDirectory() as folder:
        callback = AttemperCallback(stop_on="warning", alarms={"alarming-logit": 3.0})
        trainer = trainer_of(folder, callback, gradient_accumulation_steps=1, ddp_backend="gloo")
        trainer.train()
        assert trainer.state.global_step == 1


def case_lightning() -> None:
    counting, module = Counting(), Module()
    callback = LightningCallback(clip=5.0, trackers=counting)
    mine = torch.cat(tokens(8 * BATCH).split(BATCH)[dist.get_rank() :: 2])
    arguments = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False, "accumulate_grad_batches": 1}
    trainer = trained(module, callback, data=mine, num_sanity_val_steps=0, limit_val_batches=0, **arguments)
    assert trainer.world_size == 2
    assert "training_step" not in vars(module)
    compare(counting, within="net.")


def case_accelerate() -> None:
    counting, logged = Counting(), {}
    accelerator = Accelerator(cpu=True)
    accelerator.log = lambda values, step=None: logged.update({step: values})
    inner = llama()
    data = DataLoader(tokens(8 * BATCH), batch_size=BATCH)
    model, optimizer, batches = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=RATE), data)
    assert isinstance(model, DistributedDataParallel)
    with watch(model, trackers=[counting, AcceleratorLog(accelerator)]) as watching:
        clip = QKClip(model, 5.0, watch=watching)
        for number, batch in enumerate(batches, 1):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            clip.step()
            watching.step(number, **clip.scalars())
    compare(counting)
    assert list(logged) == ([1, 2, 3, 4] if accelerator.is_main_process else [])
