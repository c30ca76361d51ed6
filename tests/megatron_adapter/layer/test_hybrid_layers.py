"""Hybrid models, in which layers of attention, Mamba and experts alternate, have the strategy's layer.

Without Transformer Engine, Megatron can build only the layers of experts of its hybrid spec, after its norm
is replaced. Layers of Mamba need a GPU.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.layer import model_layers
from megatron_fssdp.megatron_adapter.layer.model_layers import StrategyMoELayer, join
from megatron_fssdp.megatron_adapter.layer.moe_layer import install_beginnings
from tests.support.training_preload import on_ranks

from ..training_run import train_on_all_ranks
from .small_config import build_layer, moe_config, session_of

EXPERTS, HIDDEN, LAYERS = 4, 8, 3
CONFIG = partial(moe_config, 2, HIDDEN, EXPERTS, num_layers=LAYERS, hidden_dropout=0.0)
SETTINGS = {"slots": 1, "overlap_degree": 2}


@on_ranks(2, ep=2)
def test_a_stack_computes_what_stock_megatron_computes():
    hybrid_stack_spec.submodules.moe_layer.submodules.pre_mlp_layernorm = WrappedTorchNorm
    config, groups = CONFIG(), ProcessGroupCollection.use_mpu_process_groups()

    how = {"layer_type_list": ["E"] * LAYERS, "post_layer_norm": False, "pg_collection": groups}
    stock, ours = (HybridStack(config, hybrid_stack_spec.submodules, **how) for _ in range(2))
    session = session_of("fssdp", SETTINGS)
    join(ours, session)
    ours.load_state_dict(stock.state_dict())
    hidden = torch.randn(16, 1, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))
    wanted, got = (stack(hidden.clone(), None) for stack in (stock, ours))
    assert (wanted - got).abs().max() <= 1e-6
    assert list(session.slots.layer_numbers()) == [1, 2, 3]
    assert _order_of_begins(ours)[:3] == ["launch", "other", "mark"]


def _order_of_begins(stack):
    """What a pass does, if a layer of another kind comes before those of experts."""
    done, first = [], stack.layers[0]
    other = torch.nn.Identity()
    other.config, other.layer_number, other._te_cuda_graph_replay = first.config, 0, None
    other.forward = lambda hidden_states, **_: done.append("other") or hidden_states
    stack.layers.insert(0, other)
    for layer in stack.layers[1:]:
        slots = layer.mlp.slot_layer
        slots.launch = lambda hidden, launch=slots.launch: done.append("launch") or launch(hidden)
        slots.mark = lambda _, forward, *__: forward == "other" and done.append("mark")
    install_beginnings(stack)
    hidden = torch.randn(16, 1, HIDDEN)
    for layer in stack.layers:
        hidden = layer(hidden_states=hidden)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    return done


def _stock_layer(number=None):
    layer = build_layer(CONFIG(), "", {}, stock=True)
    layer.layer_number = number
    return layer


@on_ranks(2, ep=2)
def test_layers_of_multi_token_prediction_get_numbers_after_the_decoder():
    class Later(MultiTokenPredictionLayer):
        """A layer of multi-token prediction of which only what counts for its MoE layer is left."""

        def __init__(self, depth):
            torch.nn.Module.__init__(self)
            self.layer_number, self.mtp_layer_pattern = depth, "*E"
            self.moe = _stock_layer(2)

    layers = join(torch.nn.ModuleList([_stock_layer(2), Later(1), Later(2)]), session_of("fssdp", SETTINGS))
    assert [layer.slot_layer.local.context.layer for layer in layers] == [2, LAYERS + 2, LAYERS + 4]
    assert [layer._index for layer in layers] == [0, None, None]


@on_ranks(2, ep=2)
def test_two_pools_of_experts_in_a_layer_have_different_numbers():
    """As in ERNIE-4.5-VL, where only their routers know the number. Strategies remember layers by it."""
    pools, session = [_stock_layer() for _ in range(4)], session_of("fssdp", SETTINGS)
    for pool, number in zip(pools, (1, 1, 2, 2), strict=True):
        pool.router.set_layer_number(number)
    join(torch.nn.ModuleList(pools), session)
    assert list(session.slots.layer_numbers()) == [1, 1001, 2, 1002]


@on_ranks(2, ep=2)
def test_layers_of_known_hosts_join_under_sequence_parallelism():
    layer, session = _stock_layer(), session_of("fssdp", SETTINGS)
    layer.__class__ = kind = type("OfHost", (type(layer),), {"__module__": "host"})
    model_layers._OF_HOSTS = ("host.OfHost",)
    groups, layer.tp_group = layer.tp_group, SimpleNamespace(size=lambda: 2)
    with pytest.raises(ConfigurationError, match=r"OfHost.*sequence parallelism"):
        join(layer, session)
    layer.tp_group = groups
    (joined,) = join(layer, session)
    assert isinstance(joined, StrategyMoELayer)
    assert isinstance(joined, kind)


def test_the_script_for_gpt_refuses_patterns_of_hybrid_layers(text_data):
    """It would train attention in all layers, without a word about the pattern."""
    arguments = "--train-iters 1 --disable-bias-linear --hybrid-layer-pattern *E*E"
    (run,) = train_on_all_ranks(1, arguments, text_data)
    assert (run.exit_code, run.losses) == (1, ())
