"""Facts and checks of ``megatron-fssdp doctor``, and the profiler of a cluster.

Some modules gather facts about the machine and do not judge them. Others check these facts by pure functions,
which return findings. If torch or Megatron is missing or broken, both kinds continue: this is a finding too.
"""
