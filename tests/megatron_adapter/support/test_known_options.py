import argparse
import copy
import json
import os
from dataclasses import field, fields, make_dataclass
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import add_megatron_arguments

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run import megatron_options
from megatron_fssdp.megatron_adapter.entry import argument_check
from megatron_fssdp.megatron_adapter.support import megatron_settings as options
from tests.support.python_process import ROOT, python_output

NAMES = "from tests.megatron_adapter.support.test_known_options import names; print('NAMES', names())"


def names():
    """Names of Megatron's options by class, in JSON."""
    kinds = [DistributedDataParallelConfig, OptimizerConfig, TransformerConfig]
    for kind in kinds:
        kinds += kind.__subclasses__()
    field_names = {kind.__name__: [field.name for field in fields(kind)] for kind in kinds}
    parser = unwrap(add_megatron_arguments)(argparse.ArgumentParser())
    return json.dumps(field_names | {"Namespace": [action.dest for action in parser._actions]})


@pytest.fixture(scope="module", params=["", *filter(None, [os.environ.get("MEGATRON_LM_PATH")])])
def checkout_and_names(request, tmp_path_factory):
    """A checkout of Megatron-LM, or nothing for the installed one, and names of its options by class."""
    if not request.param:
        return "", json.loads(names())
    alone = tmp_path_factory.mktemp("checkout")  # without the checkout's own package "tests"
    (alone / "megatron").symlink_to(Path(request.param, "megatron").absolute())
    path = os.pathsep.join([str(alone), str(ROOT)])
    return request.param, json.loads(python_output("-c", NAMES, PYTHONPATH=path).rpartition("NAMES")[2])


def test_every_option_of_megatron_is_in_the_list(checkout_and_names):
    names = set().union(*checkout_and_names[1].values())
    assert len(names) > 800
    assert names - options.known_options() == set(), "sort them into known_options.txt, or refuse them"


def test_megatron_has_every_attribute_exactly_where_it_is_declared(checkout_and_names):
    checkout, names = checkout_and_names
    kinds = set().union(*options.attributes().values()) - {options.OPTIONAL}
    kinds_of = {name: {kind for kind in kinds if name in names[kind]} for name in options.attributes()}
    absent = {name for name, kinds in kinds_of.items() if not kinds}
    for name in kinds_of.keys() - absent:
        assert kinds_of[name] == options.attributes()[name] - {options.OPTIONAL}, name
    optional = {name for name, declared in options.attributes().items() if options.OPTIONAL in declared}
    assert absent <= ({"kitchen_config_file"} if checkout else optional)
    assert optional <= options.known_options()


def _check(default, value, module="megatron.core.made_up", **methods):
    fields = [("new_thing", Any, field(default_factory=lambda: default)), ("num_layers", int, 1)]
    config = make_dataclass("Config", fields, namespace=methods, module=module)
    host = make_dataclass("Provider", [("own", int, 0)], bases=(config,), module="megatron.bridge.models")
    options.check_known("--moe-strategy fssdp", host(own=1, num_layers=2, new_thing=value))


@pytest.mark.parametrize(("default", "value"), [(None, 0), ([], ["x"]), (torch.half, torch.zeros(2, 2))])
def test_an_unknown_field_may_only_have_its_default(default, value, monkeypatch):
    _check(default, default)
    with pytest.raises(ConfigurationError, match=f"new_thing: got .* set {options.ALLOWED}=new_thing"):
        _check(default, value)
    monkeypatch.setenv(options.ALLOWED, "other,new_thing")
    _check(default, value)


def test_a_field_that_the_config_derives_is_no_choice_of_the_user():
    derive = lambda config: vars(config).update(new_thing=config.new_thing or 3 * config.num_layers)  # noqa: E731
    _check(0, 6, __post_init__=derive)
    with pytest.raises(ConfigurationError, match="new_thing: got 7"):
        _check(0, 7, __post_init__=derive)


@pytest.fixture
def parser(monkeypatch):
    """Megatron's parser, before this package knows its defaults."""
    monkeypatch.setattr(argument_check, "_defaults", {})
    return copy.deepcopy(megatron_options.megatron_parser())


def test_unknown_arguments_are_refused_but_not_those_of_scripts(parser):
    parser.add_argument("--moe-new-thing", type=float, default="1")
    argument_check.add_strategy_arguments(parser)
    parser.add_argument("--of-the-script")
    words = ["--num-experts", "2", "--moe-strategy", "fssdp", "--of-the-script", "x"]
    argument_check.requested_by(parser.parse_args(words))
    with pytest.raises(ConfigurationError, match=r"moe_new_thing: got 2\.0"):
        argument_check.requested_by(parser.parse_args([*words, "--moe-new-thing", "2"]))


def test_a_megatron_without_an_option_that_is_read_is_refused(parser):
    renamed, own = (
        make_dataclass("TransformerConfig", [("num_layers", int, 1)], module=module)
        for module in ("megatron.core.made_up", "host")
    )
    with pytest.raises(ConfigurationError, match="TransformerConfig has no num_moe_experts"):
        options.check_known("--moe-strategy fssdp", renamed())
    options.check_known("--moe-strategy fssdp", own())
    argument_check.add_strategy_arguments(parser)
    del argument_check._defaults["moe_paged_stash"]
    with pytest.raises(ConfigurationError, match="Namespace has no moe_paged_stash"):
        argument_check.requested_by(parser.parse_args(["--num-experts", "2", "--moe-strategy", "fssdp"]))
