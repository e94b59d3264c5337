"""Backends: processes and remote servers that run models, and what we know about them."""
