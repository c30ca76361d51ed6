"""Parm's four schedules: how a micro-batch's rows reach all parts of their experts, and the results return.

There is one file for each schedule: baseline, megatron, S1 and S2. The adapter's dispatcher calls the same
steps of each. Schedules differ in the tokens that a rank brings and in the collectives that carry their rows
(Parm, §III, Fig. 3 and 4)::

    step            baseline         megatron             s1                 s2
    gather          ESP-AllGather
    permute
    dispatch        EP-AlltoAll      EP-AlltoAll          EP&ESP-AlltoAll    MP-Split, EP&ESP-AlltoAll
    gather_peers                     ESP-AllGather
    (experts)
    sum_peers       ESP-AllReduce    ESP-ReduceScatter
    combine         EP-AlltoAll      EP-AlltoAll          EP&ESP-AlltoAll
    unpermute       ESP-Split                                                EP&ESP-AlltoAll, MP-AllGather

EP is among devices, ESP among the parts of an expert, and MP among tensor-parallel ranks with the same
tokens.

The deduplicated exchange takes the same steps as schedule megatron, but sends tokens instead of pairs.
"""
