"""Admission in simulated time: the real decision, a model of the engine, seeded workloads.

`python -m tests.simulation --help` compares policies; the tests beside it assert what must come of it.
"""
