"""A dispatcher has the config of its layer, but for the slots."""

import copy

from tests.support.training_preload import on_ranks

from .small_config import build_layer, moe_config

EXPERTS = 4


@on_ranks(2, ep=2)
def test_a_config_that_hands_on_what_is_set_stays_as_it_is():
    """A student's config of Megatron-Bridge sets its teacher's attributes, too."""
    config = moe_config(2, 8, EXPERTS)
    teacher = copy.copy(config)

    class Student(type(config)):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            setattr(teacher, name, value)

    config.__class__ = Student
    dispatchers = build_layer(config, "fssdp", {})._dispatchers
    made = dispatchers._make(dispatchers._stock, EXPERTS)
    assert made.config.num_moe_experts == 2 * EXPERTS
    assert teacher.num_moe_experts == config.num_moe_experts == EXPERTS
