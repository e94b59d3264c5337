"""Benchmarks. Here: the matrix of the engine harness, from its runs over their evidence to summary and plots."""

from proxy.bench.errors import BenchError
from proxy.bench.evidence import Outcome, Result
from proxy.bench.matrix import Configuration, HashRule, Matrix, Policy, parse_policies, plan_runs
from proxy.bench.plots import plots
from proxy.bench.runner import Program, run_matrix
from proxy.bench.store import Store, fingerprint, identify_engine, write_json, write_text
from proxy.bench.summary import METRICS, PRIMARY, summarize

__all__ = [
    "METRICS",
    "PRIMARY",
    "BenchError",
    "Configuration",
    "HashRule",
    "Matrix",
    "Outcome",
    "Policy",
    "Program",
    "Result",
    "Store",
    "fingerprint",
    "identify_engine",
    "parse_policies",
    "plan_runs",
    "plots",
    "run_matrix",
    "summarize",
    "write_json",
    "write_text",
]
