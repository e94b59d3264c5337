"""The patched llama-server over HTTP: the barrier contract, the policies, the mirror, random load.

`-k contract` selects the barrier contract; `-m soak` the long ones. `enginekit` holds what the tests share:
a server process, exchanges that can be cut, the oracle (answers of the unpatched engine), transitions and traces.
Every test ends with a check that its engine lives, rests, leaks nothing, and never mixed or was early.
"""
