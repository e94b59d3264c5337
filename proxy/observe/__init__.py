"""Observation of running engines from outside: samples on one clock, recorded, counted, paired.

`sampler`, `logfile`, `session` and `recording` do the I/O; `records`, `clocks`, `tally`, `frames` and `account` are
pure. Nothing here starts, stops or changes an engine.
"""
