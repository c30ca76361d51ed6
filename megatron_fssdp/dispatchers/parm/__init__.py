"""Parm's schedules as dispatchers with Megatron's interface; :class:`ParmDispatcher` is the entry.

Parm (arXiv 2407.00599) orders the collectives of an MoE layer under tensor, expert and expert tensor
parallelism. ``parm_dispatcher`` selects a schedule for each forward pass and hands its phases to the
dispatcher of this schedule, in ``baseline_dispatcher`` or ``direct_dispatchers``, or to Megatron's own.
"""
