"""Print the versions of the running environment as a constraints file (our own package left out)."""

from importlib.metadata import distributions

IGNORED = {"llama-proxy", "pip", "setuptools", "wheel"}

print("# Written by `make lock`: the versions that were tested together.")
for line in sorted(
    {f"{d.name.lower()}=={d.version}" for d in distributions() if d.name.lower() not in IGNORED}
):
    print(line)
