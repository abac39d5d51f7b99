"""Which heads a process has; over several processes see the cases of gathering."""

from torch import nn

from attemper.monitor.sharding import HeadShard, shards


def test_one_process_has_all_heads() -> None:
    model = nn.ModuleDict({"attention": nn.Linear(3, 5)})
    assert shards(model, ["attention", "elsewhere"]) == {"attention": HeadShard(0, 1, True), "elsewhere": HeadShard(0, 1, True)}
