"""Process groups that a host ends and makes anew between iterations, to free their memory, as slime does."""

from inspect import isfunction

import torch.distributed as dist

from megatron_fssdp.testing import megatron_parallel_state, run_ranks
from tests.support.training_preload import TRAINING_PRELOAD

from .host_loops import assert_equal, swift, trained
from .test_host_loops import MOVING

_renewable = []


class Renewable(dist.ProcessGroup):
    """A group in the place of another one, without a name."""

    def __init__(self, make):
        self.make, self.group = make, make()
        super().__init__(dist.get_rank(self.group), dist.get_world_size(self.group))
        _renewable.append(self)


def forwarding(name):
    return lambda self, *args, **kwargs: getattr(self.group, name)(*args, **kwargs)


for name, method in vars(dist.ProcessGroup).items():
    if callable(method) and not name.startswith("__"):
        setattr(Renewable, name, forwarding(name))


def use_renewable_groups():
    """Let functions of torch make such groups and use those for which they stand."""
    new_group = dist.new_group

    def of_inner(call):
        def called(*args, **kwargs):
            inner = [arg.group if isinstance(arg, Renewable) else arg for arg in args]
            return call(*inner, **{k: v.group if isinstance(v, Renewable) else v for k, v in kwargs.items()})

        return called

    for name, call in list(vars(dist).items()):
        if isfunction(call):
            setattr(dist, name, of_inner(call))
    dist.new_group = lambda *args, **kwargs: Renewable(lambda: new_group(*args, **kwargs))


def renewing(host, iteration):
    swift(host, iteration)
    for renewable in _renewable:
        dist.destroy_process_group(renewable)
    for renewable in _renewable:
        renewable.group = renewable.make()


def train(rank, world_size):
    use_renewable_groups()
    with megatron_parallel_state(ep=2):
        return [trained(strategy, renewing) for strategy in (("none", {}), MOVING)]


def test_groups_that_are_made_anew_train_as_stock_megatron():
    assert_equal(run_ranks(train, 2, preload=TRAINING_PRELOAD), ["fssdp"])
