"""What ``megatron-fssdp doctor`` looks at: facts of a machine, and what follows from them.

Modules that gather facts touch the machine and decide nothing. Checks are pure functions from
facts to findings. Neither fails where torch or Megatron is missing or broken: that is a finding.
"""
