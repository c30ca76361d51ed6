"""Parm's schedules as dispatchers with Megatron's interface; :class:`ParmDispatcher` is the entry.

Parm (arXiv 2407.00599) orders the collectives of an MoE layer under tensor, expert and expert tensor
parallelism. ``parm_dispatcher`` selects a schedule for each forward pass and hands its phases to the
dispatcher of this schedule, in ``baseline_dispatcher`` or ``direct_dispatchers``, or to Megatron's own.

Process groups have Megatron's names: ``ep`` (Parm's EP), one rank for each of D devices; ``expt_tp`` (ESP),
the ranks that share each expert of a device, X of them; ``tp_ep`` (EP&ESP), where part x of device d is rank
d * X + x; ``tp`` (MP), Y ranks.
"""
