"""Parm's schedules as dispatchers with Megatron's interface; :class:`ParmDispatcher` is the entry.

Parm (arXiv 2407.00599) orders the collectives of an MoE layer under tensor, expert and expert tensor
parallelism. ``parm_dispatcher`` selects a schedule for each forward pass and hands its phases to the
dispatcher of this schedule: ``baseline_dispatcher``, ``s1_dispatcher``, ``s2_dispatcher``, or Megatron's own.
``DividedGate`` is the gate of layers whose tensor-parallel ranks have the same tokens.
"""

from megatron_fssdp.dispatchers.parm.parm_dispatcher import DividedGate, ParmDispatcher
from megatron_fssdp.dispatchers.parm.parm_groups import ParmGroups
from megatron_fssdp.dispatchers.parm.schedule_selector import ScheduleSelector

__all__ = ["DividedGate", "ParmDispatcher", "ParmGroups", "ScheduleSelector"]
