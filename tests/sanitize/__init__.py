"""Engines built with sanitizers: how they are run, what they reported, and defects planted to be found."""
