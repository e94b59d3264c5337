"""llama-proxy: one OpenAI-compatible port in front of phase-aware llama-server processes."""

__version__ = "0.1.0"
